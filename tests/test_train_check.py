"""The linter names what is wrong with a head, from its files and from what it accepts."""

from __future__ import annotations

import json
from pathlib import Path

import models_support
import pytest
import test_train_eagle as training
import torch
from safetensors.torch import load_file, save_file

from foredraft.export.speculators import Verifier, write_head
from foredraft.models.info import LoadedModel, ModelInfo
from foredraft.models.loading import load_model
from foredraft.train import check, check_parts


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    path = tmp_path_factory.mktemp("model")
    models_support.make_hf("llama").save_pretrained(path)
    target = load_model(path, dtype="float32", device="cpu").target
    return LoadedModel(target, None, ModelInfo("tiny", path, "llama", 3, 64, 101, 0, "float32", 0))


@pytest.fixture(scope="module")
def good(loaded: LoadedModel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A head that was trained on what the check itself will ask for, so that it accepts something."""
    folder = tmp_path_factory.mktemp("good")
    data = folder / "data"
    layers = loaded.target.shape.layers  # type: ignore[attr-defined]
    from foredraft import Engine, SamplingParams
    from foredraft.train.record import Recorder, Task, record

    engine = Engine(loaded.target, Recorder((*training.TAPS, layers)), k=0, prefix_reuse=False)
    params = SamplingParams(max_tokens=check_parts.TOKENS)
    tasks = [Task(2 + n, [1 + n] * 4, params) for n in range(len(check_parts.PROMPTS))]
    list(record(engine, tasks, data))
    run = training.trainer(loaded.target, data, folder / "run", steps=80, batch=4, lr=1e-2, rollout=2, held_out=1)  # type: ignore[arg-type]
    run.task.held_out = []
    run.run()
    write_head(
        folder / "head",
        run.task.shape,
        run.task.weights(),
        run.task.parts.token_ids,
        Verifier("tiny"),
        dtype=torch.float32,
    )
    return folder / "head"


@pytest.fixture
def head(good: Path, tmp_path: Path) -> Path:
    for file in good.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    return tmp_path


def rewrite(folder: Path, **tensors: torch.Tensor | None) -> None:
    kept = load_file(folder / "model.safetensors") | tensors
    save_file(
        {name: value.contiguous() for name, value in kept.items() if value is not None}, folder / "model.safetensors"
    )


def configure(folder: Path, **values: object) -> None:
    config = json.loads((folder / "config.json").read_text()) | values
    kept = {key: value for key, value in config.items() if value != "gone"}
    (folder / "config.json").write_text(json.dumps(kept))


def test_a_good_head_passes(head: Path, loaded: LoadedModel) -> None:
    report = check.check_head(head, loaded)
    assert report.findings == []
    assert report.tau > 1.5
    assert "tokens a target pass" in report.lines()[-1]


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        ({"d2t": None}, "id map d2t is missing"),
        ({"t2d": torch.zeros(101, dtype=torch.bool)}, "t2d and d2t name different tokens"),
        ({"norm.weight": None}, "norm.weight is missing"),
        ({"fc.weight": torch.zeros(64, 192)}, "fc reads 3 tapped layers, config.json names 2"),
        ({"layers.0.mlp.up_proj.weight": torch.full((24, 64), torch.nan)}, "holds NaN"),
        ({"embed_tokens.weight": torch.randn(101, 64)}, "embed_tokens is not the target's embedding"),
    ],
)
def test_broken_files_are_named(head: Path, loaded: LoadedModel, damage: dict[str, torch.Tensor], said: str) -> None:
    rewrite(head, **damage)
    report = check.check_head(head, loaded)
    assert report.broken
    assert any(said in line for line in report.lines()), report.lines()


def test_switches_that_readers_guess_are_named(head: Path, loaded: LoadedModel) -> None:
    configure(head, norm_before_residual="gone")
    report = check.check_head(head, loaded)
    assert not report.broken
    assert "vLLM then takes true" in report.lines()[0]


def test_taps_that_are_off_by_one_are_named(head: Path, loaded: LoadedModel) -> None:
    configure(head, eagle_aux_hidden_state_layer_ids=[0, 1])
    report = check.check_head(head, loaded)
    assert any("tapped layers [1, 2] serve it better than [0, 1]" in line for line in report.lines()), report.lines()


def test_interleaved_rotary_rows_are_named(head: Path, loaded: LoadedModel) -> None:
    tensors = load_file(head / "model.safetensors")
    turned = {}
    for part, heads in (("q", 4), ("k", 4)):
        name = f"layers.0.self_attn.{part}_proj.weight"
        rows = 4 * tensors[name]  # sharper attention, so that places matter
        turned[name] = rows.view(heads, 2, -1, rows.shape[1]).transpose(1, 2).reshape(rows.shape)
        assert torch.equal(check_parts.halves(turned[name], heads), rows)
    rewrite(head, **turned)
    report = check.check_head(head, loaded)
    assert any("interleaved rotary layout" in line for line in report.lines()), report.lines()


def test_a_head_that_foresees_nothing_is_named(head: Path, loaded: LoadedModel) -> None:
    tensors = load_file(head / "model.safetensors")
    rewrite(head, **{"lm_head.weight": torch.randn(tensors["lm_head.weight"].shape)})
    assert any("foresees next to nothing" in line for line in check.check_head(head, loaded).lines())
