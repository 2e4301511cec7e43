"""Packed linears: the numbers of every format, and bits that depend on nothing but the row."""

from __future__ import annotations

import pytest
import torch
from kernels_support import FLOATS, QUANTISED, blocks, inputs, make, reference, weights

from foredraft.errors import ConfigError
from foredraft.kernels import Activations, PackedLinear, available, library
from foredraft.kernels.formats import GGUF
from foredraft.kernels.linear import pack_blocks

SHAPES = [(1, 256), (3, 512), (17, 256), (64, 768)]
ODD = [(1, 1), (3, 7), (17, 33), (9, 100), (40, 95)]


def cases() -> list[tuple[str, int, int]]:
    plain = [(kind, out, width) for kind in FLOATS for out, width in SHAPES + ODD]
    return plain + [(kind, out, width) for kind in QUANTISED for out, width in SHAPES]


@pytest.mark.parametrize("kind", QUANTISED)
def test_weights_are_what_the_file_says(kind: str) -> None:
    raw = blocks(kind, 19, 512)
    assert torch.equal(make(kind, 19, 512).dequantize(), reference(kind, raw))


@pytest.mark.parametrize(("kind", "out", "width"), cases())
def test_against_float64(kind: str, out: int, width: int) -> None:
    linear, x = make(kind, out, width, bias=True), inputs(5, width)
    assert linear.bias is not None
    w = linear.dequantize().double()
    exact = x.double() @ w.T + linear.bias.double()
    # A running float32 sum of n terms errs by less than n * 2^-24 times the sum of magnitudes.
    bound = (x.double().abs() @ w.T.abs() + linear.bias.abs()) * (width + 2) * 2.0**-24
    assert ((linear(x).double() - exact).abs() <= bound).all()


@pytest.mark.parametrize(("activations", "bits"), [("int16", 16), ("int8", 8)])
@pytest.mark.parametrize("kind", QUANTISED)
def test_integer_activations_err_by_their_step_only(kind: str, activations: Activations, bits: int) -> None:
    linear, x = make(kind, 24, 512, activations), inputs(5, 512)
    w = linear.dequantize().double()
    exact = x.double() @ w.T
    bits = bits if kind.startswith("Q4") else 16  # int8 is for 4-bit weights only
    largest = x.view(5, -1, 32).abs().amax(-1, keepdim=True).expand(5, -1, 32).reshape(5, -1).double()
    step = largest / (2**bits - 2) * (1 + 1e-6)
    slack = x.double().abs() @ w.T.abs() * 4 * (512 / 16) * 2.0**-24
    if kind in ("Q4_1", "Q4_K"):  # scale and minimum enter as two sums that may cancel
        slack = slack * 16
    assert ((linear(x).double() - exact).abs() <= step @ w.T.abs() + slack).all()
    assert not torch.equal(linear(x), make(kind, 24, 512)(x))


@pytest.mark.parametrize("kind", FLOATS + QUANTISED)
@pytest.mark.parametrize("activations", ["float32", "int16", "int8"])
def test_a_row_does_not_depend_on_its_company(kind: str, activations: Activations) -> None:
    linear, x = make(kind, 75, 512, activations, bias=True), inputs(33, 512)
    torch.set_num_threads(1)
    alone = torch.cat([linear(x[i : i + 1]) for i in range(33)])
    for n in range(1, 34):
        assert torch.equal(linear(x[:n]), alone[:n]), n
    torch.set_num_threads(2)
    for n in (1, 2, 8, 33):
        assert torch.equal(linear(x[:n]), alone[:n]), n
    assert torch.equal(linear(x.flip(0)), alone.flip(0))
    torch.set_num_threads(1)


@pytest.mark.skipif(not available(), reason="no compiled kernels")
@pytest.mark.parametrize("activations", ["float32", "int16", "int8"])
@pytest.mark.parametrize(("kind", "out", "width"), cases())
def test_every_instruction_set_gives_the_same_bits(
    kind: str, out: int, width: int, activations: Activations, monkeypatch: pytest.MonkeyPatch
) -> None:
    linear, x = make(kind, out, width, activations, bias=True), inputs(11, width)
    fast = [linear(x[:n]) for n in range(1, 12)]
    for lesser in range(library.isa()):
        monkeypatch.setattr(library, "isa", lambda lesser=lesser: lesser)
        assert all(torch.equal(linear(x[:n]), fast[n - 1]) for n in range(1, 12)), lesser


@pytest.mark.parametrize("kind", FLOATS + QUANTISED)
def test_without_the_library_torch_agrees(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    x = inputs(4, 512)
    fast = make(kind, 20, 512, bias=True)(x)
    monkeypatch.setattr(library, "available", lambda: False)
    slow = make(kind, 20, 512, bias=True)
    assert not slow.matrices[0].packed
    assert slow.bias is not None
    assert ((slow(x) - fast).abs() <= (x.abs() @ slow.dequantize().abs().T + slow.bias.abs()) * 2.0**-18).all()
    assert torch.equal(slow(x)[2:3], slow(x[2:3]))
    assert torch.equal(slow.rows(torch.tensor([3, 1])), slow.dequantize()[[3, 1]])


@pytest.mark.parametrize("activations", ["float32", "int16", "int8"])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_nan_and_infinity_stay_in_their_row(bad: float, activations: Activations) -> None:
    linear, x = make("Q4_0", 9, 256, activations), inputs(3, 256)
    clean = linear(x)
    x[1, 77] = bad
    spoiled = linear(x)
    assert not spoiled[1].isfinite().any()
    assert torch.equal(spoiled[[0, 2]], clean[[0, 2]])


def test_zero_and_tiny_rows() -> None:
    linear = make("Q8_0", 9, 256, "int16")
    assert torch.equal(linear(torch.zeros(2, 256)), torch.zeros(2, 9))
    assert linear(torch.full((1, 256), 1e-42)).isfinite().all()


def test_bfloat16_inputs_and_outputs() -> None:
    linear, x = make("bfloat16", 12, 64), inputs(3, 64).bfloat16()
    assert linear(x).dtype == torch.bfloat16
    assert torch.equal(linear(x), linear(x.float()).bfloat16())


def test_stacked_matrices_of_different_formats() -> None:
    parts = [pack_blocks(blocks(kind, out, 256), GGUF[kind], out, 256) for kind, out in (("Q4_K", 24), ("Q6_K", 7))]
    x, bias = inputs(6, 256), torch.arange(31.0)
    whole = PackedLinear(parts, bias)(x)
    alone = torch.cat([PackedLinear([part])(x) for part in parts], 1) + bias
    assert torch.equal(whole, alone)


def test_rows_are_embeddings() -> None:
    linear = make("Q8_0", 50, 64)
    ids = torch.tensor([[0, 49], [7, 7]])
    assert torch.equal(linear.rows(ids), linear.dequantize()[ids])
    with pytest.raises(ConfigError, match="ids"):
        linear.rows(torch.tensor([50]))


def test_inputs_that_are_views() -> None:
    linear, wide = make("float32", 10, 40), inputs(6, 80)
    assert torch.equal(linear(wide[:, 40:]), linear(wide[:, 40:].contiguous()))
    assert torch.equal(linear(wide[:, ::2]), linear(wide[:, ::2].contiguous()))
    assert linear(wide[:0, :40]).shape == (0, 10)


def test_bytes_are_those_of_the_file() -> None:
    if available():
        assert make("Q4_0", 64, 256).bytes == 64 * 256 * 18 // 32
        assert make("bfloat16", 64, 256).bytes == 64 * 256 * 2


@pytest.mark.parametrize(
    ("x", "message"),
    [
        (torch.zeros(3, 41), "x: must be"),
        (torch.zeros(40), "x: must be"),
        (torch.zeros(3, 40, dtype=torch.float64), "x: must be"),
    ],
)
def test_garbage_inputs_are_refused(x: torch.Tensor, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make("float32", 10, 40)(x)


def test_garbage_weights_are_refused() -> None:
    with pytest.raises(ConfigError, match="whole blocks of 32"):
        PackedLinear.from_gguf_blocks(blocks("Q4_0", 2, 64), "Q4_0", (2, 65))
    with pytest.raises(ConfigError, match="raw: "):
        PackedLinear.from_gguf_blocks(blocks("Q4_0", 2, 64), "Q4_0", (3, 64))
    with pytest.raises(ConfigError, match="kind: no kernel"):
        PackedLinear.from_gguf_blocks(blocks("Q4_0", 2, 64), "IQ2_XS", (2, 64))
    with pytest.raises(ConfigError, match="bias: has shape"):
        PackedLinear.from_float(weights(4, 8), torch.zeros(3))
    with pytest.raises(ConfigError, match="weight: must be"):
        PackedLinear.from_float(torch.zeros(4))
    with pytest.raises(ConfigError, match="equal width"):
        PackedLinear([])
