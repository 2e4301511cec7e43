"""Finding and opening models: every way it can go wrong is one clear error."""

from __future__ import annotations

import json
import socket
from pathlib import Path
from typing import Any

import pytest
import torch
from models_support import fresh, make_hf, random_tokens, reference
from safetensors.torch import load_file, save_file

from foredraft.errors import ConfigError, ModelLoadError, UnsupportedModelError
from foredraft.models.loading import load_model
from foredraft.models.shape_config import shape_from_config


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    make_hf("llama").save_pretrained(tmp_path / "tiny")
    return tmp_path / "tiny"


def load(path: Any, **options: Any) -> Any:
    return load_model(path, **({"dtype": "float32", "device": "cpu", "cache_bytes": 2**26} | options))


def config_of(folder: Path, **changes: Any) -> dict[str, Any]:
    return json.loads((folder / "config.json").read_text()) | changes


def test_sharded_folder(tmp_path: Path) -> None:
    model = make_hf("qwen3")
    model.save_pretrained(tmp_path, max_shard_size="60KB")
    shards = sorted(tmp_path.glob("*.safetensors"))
    assert len(shards) > 2
    loaded = load(tmp_path)
    torch.testing.assert_close(
        fresh(loaded.target, random_tokens(9)), reference(model, random_tokens(9)), atol=1e-4, rtol=1e-4
    )
    assert loaded.tokenizer is None
    assert loaded.info.parameters == sum(p.numel() for p in model.parameters())
    assert loaded.info.file_bytes == sum(s.stat().st_size for s in shards)
    shards[1].unlink()
    with pytest.raises(ModelLoadError, match=rf"{shards[1].name}: shard is missing; download"):
        load(tmp_path)


@pytest.mark.parametrize("share", [0.0, 0.001, 0.3, 0.99])
def test_truncated_safetensors(folder: Path, share: float) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[: int(file.stat().st_size * share)])
    with pytest.raises(ModelLoadError, match=r"model\.safetensors: is cut short or damaged"):
        load(folder)


def test_missing_tensor_and_wrong_shape_are_named(folder: Path) -> None:
    file = folder / "model.safetensors"
    tensors = load_file(file)
    gone = tensors.pop("model.layers.2.mlp.up_proj.weight")
    save_file(tensors, file)
    with pytest.raises(ModelLoadError, match=r"tiny: tensor 'blk\.2\.ffn_up\.weight' is missing"):
        load(folder)
    save_file(tensors | {"model.layers.2.mlp.up_proj.weight": gone[:-1].contiguous()}, file)
    with pytest.raises(
        ModelLoadError, match=r"'model\.layers\.2\.mlp\.up_proj\.weight' has shape \[95, 64\].*\[96, 64\]"
    ):
        load(folder)


def test_pickles_are_refused_unread(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(ModelLoadError, match=r"pytorch_model\.bin: is a pickle.*convert the model to safetensors"):
        load(folder)
    with pytest.raises(ModelLoadError, match="is a pickle"):
        load(folder / "pytorch_model.bin")


@pytest.mark.parametrize("text", ["{", "[]", "\xff"])
def test_damaged_config(folder: Path, text: str) -> None:
    (folder / "config.json").write_text(text, "latin-1")
    with pytest.raises(ModelLoadError, match=r"config\.json: is not"):
        load(folder)


def test_nothing_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ModelLoadError, match=r"nowhere.gguf: there is no such file.*smollm2-135m"):
        load(tmp_path / "nowhere.gguf")
    with pytest.raises(ModelLoadError, match=r"folder has no config\.json"):
        load(tmp_path)
    (tmp_path / "notes.txt").write_text("x")
    with pytest.raises(ModelLoadError, match=r"is not a \.gguf file"):
        load(tmp_path / "notes.txt")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(ModelLoadError, match=r"nobody/nothing: .*HF_HUB_OFFLINE is set; unset"):
        load("nobody/nothing")


def test_no_network_is_one_clear_error(monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub.constants

    def refuse(*_: Any, **__: Any) -> None:
        raise OSError("Name or service not known")

    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    with pytest.raises(ModelLoadError, match=r"nobody/nothing: cannot be downloaded .*; check the network"):
        load("nobody/nothing")


def test_arguments_out_of_range(folder: Path) -> None:
    for options, message in [
        ({"dtype": "int4"}, "dtype: 'int4' is not supported; use auto"),
        ({"device": "toaster"}, "device: 'toaster' is not a device"),
        ({"device": "meta"}, "device: 'meta' is not available"),
        ({"layers": 0}, "layers: must be between 1 and 4"),
        ({"layers": 5}, "layers: must be between 1 and 4"),
        ({"max_context": 0}, "max_context: must be at least 1"),
        ({"cache_bytes": 0}, "cache_bytes: must be positive"),
    ]:
        with pytest.raises(ConfigError, match=message):
            load(folder, **options)
    assert load(folder).target.max_context == 256
    assert load(folder, max_context=10_000).target.max_context == 256
    assert load(folder, max_context=10).target.max_context == 10
    assert load(folder, dtype="auto").info.dtype in {"float32", "bfloat16"}


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"brand_new_feature": True}, "brand_new_feature"),
        ({"quantization_config": {"bits": 4}}, "quantization_config"),
        ({"hidden_act": "relu"}, "hidden_act"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}}, "rope_parameters"),
        ({"rope_parameters": {"rope_type": "llama3", "factor": 2.0, "rope_theta": 1e4}}, "rope_parameters"),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "twist": 3}}, "rope_parameters"),
        ({"rope_parameters": {"full_attention": {"rope_theta": 1e4}}}, "rope_parameters"),
        ({"sliding_window": 7}, "sliding_window"),
        ({"layer_types": ["linear_attention"] * 4}, "layer_types"),
        ({"model_type": "mamba"}, "model_type"),
        ({"model_type": None}, "model_type"),
        ({"attn_logit_softcapping": 30.0}, "attn_logit_softcapping"),
    ],
)
def test_what_is_not_understood_is_refused(folder: Path, changes: dict[str, Any], field: str) -> None:
    with pytest.raises(UnsupportedModelError, match=field):
        shape_from_config(config_of(folder, **changes))


@pytest.mark.parametrize(
    "changes",
    [
        {"hidden_size": "many"},
        {"num_attention_heads": 0},
        {"num_attention_heads": 3, "head_dim": 16},
        {"num_hidden_layers": 0},
        {"head_dim": 7},
        {"vocab_size": -1},
        {"rope_parameters": [1]},
        {"rope_parameters": {"rope_type": "linear", "factor": "x", "rope_theta": 1e4}},
    ],
)
def test_nonsense_is_a_load_error(folder: Path, changes: dict[str, Any]) -> None:
    with pytest.raises(UnsupportedModelError):
        shape_from_config(config_of(folder, **changes))


def test_features_that_are_off_do_no_harm(folder: Path) -> None:
    expected = shape_from_config(config_of(folder))
    off = {"brand_new_feature": False, "quantization_config": None, "_private": 3, "use_cache": False}
    assert shape_from_config(config_of(folder, **off)) == expected


def test_missing_key_is_named(folder: Path) -> None:
    config = config_of(folder)
    del config["hidden_size"]
    with pytest.raises(UnsupportedModelError, match=r"hidden_size: is missing from config\.json"):
        shape_from_config(config)


def test_other_architectures_go_to_the_adapter(tmp_path: Path) -> None:
    from transformers import GPT2Config, GPT2LMHeadModel

    model = GPT2LMHeadModel(GPT2Config(vocab_size=50, n_positions=32, n_embd=16, n_layer=2, n_head=2)).eval()
    model.save_pretrained(tmp_path)
    loaded = load(tmp_path)
    assert (loaded.info.architecture, loaded.info.layers, loaded.target.vocab_size) == ("gpt2", 2, 50)
    assert loaded.info.parameters == sum(p.numel() for p in model.parameters())
    tokens = random_tokens(9, vocab=50)
    torch.testing.assert_close(fresh(loaded.target, tokens), reference(model, tokens), atol=1e-4, rtol=1e-4)
    with pytest.raises(UnsupportedModelError, match="layers: cannot drop layers"):
        load(tmp_path, layers=1)


def test_a_multimodal_folder_loads_as_text(tmp_path: Path) -> None:
    model = make_hf("gemma3")
    model.save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    save_file({"language_model." + name: tensor for name, tensor in load_file(file).items()}, file)
    text = config_of(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gemma3", "text_config": text}))
    target = load(tmp_path).target
    torch.testing.assert_close(
        fresh(target, random_tokens(20)), reference(model, random_tokens(20)), atol=1e-4, rtol=1e-4
    )
