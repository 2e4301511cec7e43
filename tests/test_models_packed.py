"""Packed weights: the same model, and a verification whose bits do not depend on how many rows it has."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from models_gguf import write_gguf
from models_support import make_hf

from foredraft import kernels
from foredraft.errors import ConfigError
from foredraft.kernels.linear import PackedLinear
from foredraft.models.linear import DenseLinear, dense_linear
from foredraft.models.loading import load_model
from foredraft.models.packed import packed_linear


@pytest.fixture
def path(tmp_path: Path) -> Path:
    write_gguf(make_hf("llama_wide_heads"), "llama", tmp_path / "m.gguf", "Q4_1")
    return tmp_path / "m.gguf"


@pytest.mark.skipif(not kernels.available(), reason=str(kernels.why_unavailable()))
def test_the_default_keeps_the_files_blocks(path: Path) -> None:
    target = load_model(path, dtype="float32", device="cpu", cache_bytes=2**26).target
    qkv = target.layers[0].qkv  # type: ignore[attr-defined]
    assert isinstance(qkv, PackedLinear)
    assert [matrix.source.name for matrix in qkv.matrices] == ["Q4_1"] * 3
    dense = load_model(path, dtype="float32", device="cpu", cache_bytes=2**26, make_linear=dense_linear).target
    assert torch.equal(qkv.dequantize(), dense.layers[0].qkv.weight)  # type: ignore[attr-defined]
    assert qkv.bytes < 0.3 * dense.layers[0].qkv.weight.nbytes  # type: ignore[attr-defined]


def test_products_do_not_depend_on_the_number_of_rows(path: Path) -> None:
    target = load_model(path, dtype="float32", device="cpu", cache_bytes=2**26, make_linear=packed_linear()).target
    if not kernels.available():
        pytest.skip(str(kernels.why_unavailable()))
    x = torch.randn(9, 64, generator=torch.Generator().manual_seed(0))
    for linear in (target.layers[1].qkv, target.head):  # type: ignore[attr-defined]
        together = linear(x)
        for i in range(9):
            assert torch.equal(linear(x[i : i + 1])[0], together[i])


def test_packing_refuses_what_it_cannot_hold(path: Path) -> None:
    with pytest.raises(ConfigError, match="dtype: packed weights need a CPU"):
        load_model(path, dtype="float64", device="cpu", make_linear=packed_linear())
    assert isinstance(load_model(path, dtype="float64", device="cpu").target.head, DenseLinear)  # type: ignore[attr-defined]


def test_turned_products_are_the_same_products() -> None:
    for out, width in ((96, 64), (1000, 64), (64, 96)):
        weight, bias = torch.randn(out, width), torch.randn(out)
        for rows in range(12):
            x = torch.randn(rows, width)
            exact = torch.nn.functional.linear(x.double(), weight.double(), bias.double()).float()
            mine = DenseLinear(weight, bias)(x)
            assert mine.is_contiguous()
            torch.testing.assert_close(mine, exact, atol=1e-4, rtol=1e-4)


@pytest.mark.skipif(not kernels.available(), reason=str(kernels.why_unavailable()))
def test_inputs_are_rounded_only_when_asked_or_only_drafting(path: Path) -> None:
    def mode(**options: object) -> str:
        target = load_model(path, dtype="float32", device="cpu", cache_bytes=2**26, **options).target  # type: ignore[arg-type]
        return target.layers[0].qkv.activations  # type: ignore[attr-defined, no-any-return]

    assert mode() == "float32"
    assert mode(activations="int16") == "int16"
    assert mode(only_drafts=True) == "int8"
    with pytest.raises(ConfigError, match="activations: 'int4' is not supported; use float32, int16, int8"):
        mode(activations="int4")
    with pytest.raises(ConfigError, match="activations: int16 needs a CPU"):
        load_model(path, dtype="float64", device="cpu", activations="int16")
