"""What is exported is what is loaded: sizes, weights, id map and drafts survive, in both layouts."""

from __future__ import annotations

import json
from pathlib import Path

import eagle_support as support
import pytest
import torch
from safetensors.torch import load_file, save_file

from foredraft.drafters import eagle_checkpoint as checkpoints
from foredraft.drafters.eagle_head import HeadSegment
from foredraft.errors import ConfigError, ModelLoadError, UnsupportedModelError
from foredraft.export.speculators import Verifier, export_head, write_head

VERIFIER = Verifier("some/model")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    net = support.net()
    write_head(tmp_path / "head", net.shape, net.state(), support.ids(), VERIFIER, dtype=torch.float32)
    return tmp_path / "head"


def drafts(path: Path) -> torch.Tensor:
    checkpoint = checkpoints.read_checkpoint(path)
    shape = checkpoints.head_shape(checkpoint)
    table = support.embedding()
    ids = checkpoints.token_ids(checkpoint, shape)
    head = checkpoints.build_head(shape, checkpoint.tensors, ids, lambda tokens: table[tokens], bits=32)
    taps = torch.randn(6, 3, support.WIDTH, generator=torch.Generator().manual_seed(2))
    logits, _ = head.step([HeadSegment(head.new_state(), [3, 4, 5, 6, 7, 8], head.fuse(taps))])
    full = torch.full((6, shape.vocab), -torch.inf)
    full[:, ids] = logits[0]
    return full


def test_the_names_that_vllm_reads_are_there(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    assert config["speculators_model_type"] == "eagle3"
    assert config["architectures"] == ["Eagle3Speculator"]
    assert config["norm_before_residual"] is False
    assert config["eagle_aux_hidden_state_layer_ids"] == [1, 2, 3]
    assert config["transformer_layer_config"]["vocab_size"] == support.VOCAB
    assert config["transformer_layer_config"]["rope_theta"] == pytest.approx(10000.0)
    assert config["speculators_config"]["verifier"]["name_or_path"] == "some/model"
    tensors = load_file(folder / "model.safetensors")
    assert tensors["d2t"].dtype == torch.int64
    assert (torch.arange(20) + tensors["d2t"]).tolist() == support.ids().tolist()
    assert tensors["t2d"].nonzero().flatten().tolist() == support.ids().tolist()
    assert tensors["fc.weight"].shape == (support.WIDTH, 3 * support.WIDTH)


def test_shape_and_drafts_survive(folder: Path, tmp_path: Path) -> None:
    assert checkpoints.head_shape(checkpoints.read_checkpoint(folder)) == support.shape()
    export_head(folder, tmp_path / "again", VERIFIER)
    assert torch.equal(drafts(folder), drafts(tmp_path / "again"))


def test_the_original_layout_drafts_the_same(folder: Path, tmp_path: Path) -> None:
    original = tmp_path / "original"
    original.mkdir()
    config = json.loads((folder / "config.json").read_text())
    flat = config["transformer_layer_config"] | {"draft_vocab_size": 20, "architectures": ["LlamaForCausalLMEagle3"]}
    flat |= {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 2, 3]}}
    (original / "config.json").write_text(json.dumps(flat))
    tensors = load_file(folder / "model.safetensors")
    save_file({k.replace("layers.0.", "midlayer."): v for k, v in tensors.items()}, original / "model.safetensors")
    assert torch.equal(drafts(original), drafts(folder))
    export_head(original, tmp_path / "converted", VERIFIER)
    assert torch.equal(drafts(tmp_path / "converted"), drafts(folder))


def rewrite(folder: Path, **tensors: torch.Tensor | None) -> None:
    kept = load_file(folder / "model.safetensors") | tensors
    save_file({name: value for name, value in kept.items() if value is not None}, folder / "model.safetensors")


def test_damage_is_named(folder: Path) -> None:
    rewrite(folder, d2t=None)
    with pytest.raises(ModelLoadError, match="id map d2t is missing"):
        drafts(folder)
    rewrite(folder, d2t=support.ids() * 3)
    with pytest.raises(ModelLoadError, match="subtract the draft ids"):
        drafts(folder)
    rewrite(folder, d2t=support.ids() - torch.arange(20), **{"fc.weight": torch.zeros(3, 3)})
    with pytest.raises(ModelLoadError, match=r"fc.weight: must be \[16, 48\]"):
        drafts(folder)


def test_what_cannot_be_honoured_is_refused(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"norm_output": True}))
    with pytest.raises(UnsupportedModelError, match="norm_output"):
        drafts(folder)
    with pytest.raises(ConfigError, match="out: is the folder that is read"):
        export_head(folder, folder, VERIFIER)


def test_pickles_are_refused(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(ModelLoadError, match="pickle"):
        checkpoints.read_checkpoint(folder)
