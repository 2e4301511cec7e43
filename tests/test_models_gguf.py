"""GGUF files: every family, every common format, and what happens when they are damaged."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from models_gguf import ARCHITECTURES, write_gguf
from models_support import fresh, make_hf, random_tokens, reference
from transformers.integrations.gguf.dequant import dequantize as their_dequantise

from foredraft.errors import ModelLoadError, UnsupportedModelError
from foredraft.models.gguf_blocks import dequantise
from foredraft.models.gguf_file import GGUFFile
from foredraft.models.linear import dense_linear
from foredraft.models.loading import load_model
from foredraft.models.packed import packed_linear


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    path = tmp_path / "tiny.gguf"
    write_gguf(make_hf("llama"), "llama", path)
    return path


@pytest.mark.parametrize("family", list(ARCHITECTURES))
def test_logits_equal_transformers(family: str, tmp_path: Path) -> None:
    model = make_hf(family)
    path = tmp_path / "m.gguf"
    write_gguf(model, ARCHITECTURES[family], path)
    loaded = load_model(path, dtype="float32", device="cpu", cache_bytes=2**28)
    tokens = random_tokens(30)
    torch.testing.assert_close(fresh(loaded.target, tokens), reference(model, tokens), atol=1e-4, rtol=1e-4)
    assert (loaded.info.name, loaded.info.licence) == ("tiny", "apache-2.0")
    assert loaded.info.parameters == sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize("kind", ["F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1"])
def test_formats(kind: str, tmp_path: Path) -> None:
    model = make_hf("llama_wide_heads")
    path = tmp_path / "m.gguf"
    before = reference(model, random_tokens(20))
    write_gguf(model, "llama", path, kind)
    expected = reference(model, random_tokens(20))
    for make_linear in (dense_linear, packed_linear()):
        options: Any = {"dtype": "float32", "device": "cpu", "cache_bytes": 2**28, "make_linear": make_linear}
        target = load_model(path, **options).target
        torch.testing.assert_close(fresh(target, random_tokens(20)), expected, atol=1e-4, rtol=1e-4)
    assert (before - expected).abs().max() > 1e-4  # the rounding is really there


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_0", "Q4_1", "Q4_K", "Q5_K", "Q6_K", "Q2_K", "Q3_K", "IQ4_NL"])
def test_blocks_mean_what_transformers_says(kind: str) -> None:
    number = gguf.GGMLQuantizationType[kind]
    width, size = gguf.GGML_QUANT_SIZES[number]
    blocks = torch.randint(0, 120, (6, 2 * size), generator=torch.Generator().manual_seed(1), dtype=torch.uint8)
    mine = dequantise(kind, blocks)
    assert mine.shape == (6, 2 * width)
    theirs = their_dequantise(blocks, int(number)).view(6, 2 * width)
    torch.testing.assert_close(mine, theirs.float(), atol=0, rtol=1e-6)


def test_raw_blocks_stay_reachable_in_our_row_order(tmp_path: Path) -> None:
    model = make_hf("llama")
    path = tmp_path / "m.gguf"
    write_gguf(model, "llama", path, "Q8_0")
    weight = GGUFFile(path).find("blk.1.attn_q.weight")
    assert weight is not None
    quantised = weight.quantised()
    assert quantised is not None
    assert quantised.kind == "Q8_0"
    rows = torch.from_numpy(gguf.quants.dequantize(quantised.blocks.numpy(), gguf.GGMLQuantizationType.Q8_0))
    assert torch.equal(rows, weight.dense(torch.float32))
    assert torch.equal(rows, model.model.layers[1].self_attn.q_proj.weight)


def cut(path: Path, keep: Callable[[bytes], bytes]) -> None:
    path.write_bytes(keep(path.read_bytes()))


@pytest.mark.parametrize("share", [0.0, 0.0001, 0.001, 0.01, 0.1, 0.5, 0.9, 0.9999])
def test_truncation_is_named(tiny: Path, share: float) -> None:
    cut(tiny, lambda data: data[: int(len(data) * share)])
    with pytest.raises(ModelLoadError, match=r"tiny\.gguf: .*(cut short|ends at byte|cannot be read|magic)"):
        load_model(tiny)


def test_any_damage_to_the_header_is_a_load_error(tiny: Path) -> None:
    data = tiny.read_bytes()
    header = data.index(b"blk.3.ffn_down")
    generator = np.random.default_rng(0)
    for _ in range(int(os.environ.get("DAMAGE", "150"))):
        broken = bytearray(data)
        for at in generator.integers(0, header, 3):
            broken[at] = generator.integers(0, 256)
        tiny.write_bytes(broken)
        with contextlib.suppress(ModelLoadError):  # anything else is a traceback that a user would see
            load_model(tiny, dtype="float32", device="cpu", cache_bytes=2**24)
    tiny.write_bytes(data)
    load_model(tiny, dtype="float32", device="cpu", cache_bytes=2**24)


def test_missing_tensor_and_wrong_shape_are_named(tmp_path: Path) -> None:
    model = make_hf("llama")
    path = tmp_path / "m.gguf"
    write_gguf(model, "llama", path)
    data = path.read_bytes()
    path.write_bytes(data.replace(b"blk.2.ffn_up.weight", b"blk.2.ffn_xx.weight"))
    with pytest.raises(ModelLoadError, match=r"m\.gguf: tensor 'blk\.2\.ffn_up\.weight' is missing; download"):
        load_model(path)
    path.write_bytes(data)
    model.config.intermediate_size = 128
    write_gguf(model, "llama", path)
    with pytest.raises(ModelLoadError, match=r"tensor 'blk\.0\.ffn_gate\.weight' has shape \[96, 64\].*\[128, 64\]"):
        load_model(path)


def test_features_of_other_families_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_logit_scale(0.5)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    from foredraft.models.shape_gguf import shape_from_gguf

    with pytest.raises(UnsupportedModelError, match=r"llama\.logit_scale"):
        shape_from_gguf(GGUFFile(path))
