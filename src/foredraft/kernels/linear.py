"""Matrix products with weights packed in memory, in the bits that the file holds.

Each weight is decoded once and used for every row of the pass, so that verifying k+1 rows costs little more than
decoding one. The output row of an input row does not depend, to the bit, on how many rows share the pass, on its place
among them or on the number of threads: every output element is one running sum along ``in``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from foredraft.errors import ConfigError
from foredraft.kernels import library
from foredraft.kernels.formats import BFLOAT16, FLOAT32, Source, gguf_source

Activations = Literal["float32", "int16", "int8"]
"""How inputs enter the sums with quantised weights; float weights always use float32.

- ``"float32"``: as they are.
- ``"int16"``: rounded to 16 bits relative to the largest of each 32 inputs of a row, so that the products are exact
  integers. An input errs by at most ``2**-16`` of the largest of its 32, seven bits finer than bfloat16.
- ``"int8"``: rounded to 8 bits in the same way (error up to ``2**-8``), for 4-bit weights; others use int16.
"""

_NUMBERS: dict[Activations, int] = {"float32": 0, "int16": 1, "int8": 2}


@dataclass(frozen=True, slots=True)
class Matrix:
    """``[out, in]`` weights packed by the library, or dense float32 where there is no library."""

    source: Source
    out_features: int
    in_features: int
    data: Tensor

    @property
    def packed(self) -> bool:
        return self.data.dtype == torch.uint8

    @property
    def bytes(self) -> int:
        return self.data.numel() * self.data.element_size()

    def rows(self, ids: Tensor) -> Tensor:
        """Rows ``ids`` ``[n]`` int64 as float32 ``[n, in]``, exactly the numbers that the products use."""
        if not self.packed:
            return self.data[ids]
        if ids.numel() and not (int(ids.min()) >= 0 and int(ids.max()) < self.out_features):
            raise ConfigError(f"a row number lies outside 0 … {self.out_features - 1}", field="ids")
        ids = ids.contiguous()
        result = torch.empty(ids.numel(), self.in_features)
        lib = library.library()
        number = lib.fd_format(self.source.number)
        lib.fd_rows(number, self.data.data_ptr(), self.in_features, ids.data_ptr(), ids.numel(), result.data_ptr())
        return result


def pack_blocks(raw: np.ndarray | Tensor, source: Source, out_features: int, in_features: int) -> Matrix:
    """Packs ``out`` rows of a file's bytes. Raises ConfigError if their number is not what the shape asks for."""
    stored = torch.from_numpy(np.ascontiguousarray(raw)) if isinstance(raw, np.ndarray) else raw.contiguous()
    if out_features < 1 or stored.numel() * stored.element_size() != out_features * source.row_bytes(in_features):
        raise ConfigError(
            f"{stored.numel() * stored.element_size()} bytes are not {out_features} x {in_features} weights of "
            f"{source.name}",
            field="raw",
            remedy="pass the tensor's bytes and its shape [out, in] as the file states them",
        )
    if not library.available():
        return Matrix(source, out_features, in_features, _dense(stored, source, out_features, in_features))
    lib = library.library()
    size = lib.fd_packed_bytes(source.number, out_features, in_features)
    with torch.inference_mode(False):
        data = torch.empty(size, dtype=torch.uint8)
    lib.fd_pack(source.number, stored.data_ptr(), out_features, in_features, data.data_ptr())
    return Matrix(source, out_features, in_features, data)


def _dense(stored: Tensor, source: Source, out_features: int, in_features: int) -> Tensor:
    if source in (FLOAT32, BFLOAT16):
        dtype = torch.float32 if source is FLOAT32 else torch.bfloat16
        return stored.view(dtype).view(out_features, in_features).to(torch.float32, copy=True)
    import gguf

    rows = stored.view(torch.uint8).view(out_features, -1).numpy()
    return torch.from_numpy(gguf.quants.dequantize(rows, gguf.GGMLQuantizationType[source.name])).float()


class PackedLinear:
    """``y [N, out] = x [N, in] W^T + bias`` for packed ``W``, stacked from one or more matrices along ``out``.

    Args:
        matrices: Matrices of equal ``in``, e.g. q, k and v; their formats may differ.
        bias: ``[out]`` in all, or None.
        activations: See :data:`Activations`.

    Raises:
        ConfigError: Widths differ, or the bias has another length.
    """

    def __init__(
        self, matrices: Sequence[Matrix], bias: Tensor | None = None, activations: Activations = "float32"
    ) -> None:
        if not matrices or any(matrix.in_features != matrices[0].in_features for matrix in matrices):
            raise ConfigError("stacked matrices must be one or more of equal width", field="matrices")
        if activations not in _NUMBERS:
            raise ConfigError(
                f"unknown value {activations!r}", field="activations", remedy=f"use {', '.join(_NUMBERS)}"
            )
        self.matrices = tuple(matrices)
        self.in_features = matrices[0].in_features
        self.out_features = sum(matrix.out_features for matrix in matrices)
        if bias is not None and bias.shape != (self.out_features,):
            raise ConfigError(f"has shape {list(bias.shape)}, [{self.out_features}] is wanted", field="bias")
        self.bias = None if bias is None else bias.detach().to("cpu", torch.float32).contiguous()
        self.activations: Activations = activations
        self.mode = _NUMBERS[activations]
        self._parts = self.plan() if self.matrices[0].packed else []

    @classmethod
    def from_float(
        cls,
        weight: Tensor,
        bias: Tensor | None = None,
        dtype: Literal["float32", "bfloat16"] = "float32",
    ) -> PackedLinear:
        """Packs ``weight`` ``[out, in]``, rounded to ``dtype``."""
        if weight.dim() != 2 or not weight.is_floating_point() or 0 in weight.shape:
            raise ConfigError(f"must be a float matrix [out, in] (got {list(weight.shape)})", field="weight")
        if dtype not in ("float32", "bfloat16"):
            raise ConfigError(f"unknown value {dtype!r}", field="dtype", remedy="use float32 or bfloat16")
        source = FLOAT32 if dtype == "float32" else BFLOAT16
        values = weight.detach().to("cpu", torch.float32 if dtype == "float32" else torch.bfloat16).contiguous()
        return cls([pack_blocks(values.view(torch.uint8), source, weight.shape[0], weight.shape[1])], bias)

    @classmethod
    def from_gguf_blocks(
        cls,
        raw: np.ndarray | Tensor,
        kind: str,
        shape: tuple[int, int],
        bias: Tensor | None = None,
        activations: Activations = "float32",
    ) -> PackedLinear:
        """Packs the bytes of a GGUF tensor without changing a weight.

        Args:
            raw: Its bytes, any shape, uint8.
            kind: GGML's name of the format, e.g. ``"Q4_1"``; see :data:`foredraft.kernels.formats.GGUF`.
            shape: ``(out, in)``.
            bias: ``[out]`` or None.
            activations: See :data:`Activations`.
        """
        return cls([pack_blocks(raw, gguf_source(kind), shape[0], shape[1])], bias, activations)

    @property
    def bytes(self) -> int:
        """Memory of the weights, padding included, and of the bias."""
        return sum(matrix.bytes for matrix in self.matrices) + (0 if self.bias is None else 4 * self.bias.numel())

    def dequantize(self) -> Tensor:
        """``[out, in]`` float32: exactly the numbers that the products use."""
        return torch.cat([matrix.rows(torch.arange(matrix.out_features)) for matrix in self.matrices])

    def rows(self, ids: Tensor) -> Tensor:
        """Rows of the matrix ``[..., in]`` float32 for ``ids`` ``[...]``: an embedding look-up in tied weights."""
        if len(self.matrices) != 1:
            raise ConfigError("rows are only read from a single matrix", field="matrices")
        return self.matrices[0].rows(ids.to(torch.int64).flatten()).view(*ids.shape, self.in_features)

    def parameters(self) -> list[Tensor]:
        """None: packed weights are not trained."""
        return []

    def __call__(self, x: Tensor) -> Tensor:
        """``x`` ``[N, in]`` float32 or bfloat16 -> ``[N, out]`` in the same dtype; sums are float32."""
        if x.dim() != 2 or x.shape[1] != self.in_features or x.dtype not in (torch.float32, torch.bfloat16):
            raise ConfigError(
                f"must be [N, {self.in_features}] float32 or bfloat16 (got {list(x.shape)} {x.dtype})", field="x"
            )
        y = self._multiply(x if x.dtype == torch.float32 else x.float())
        return y if x.dtype == torch.float32 else y.to(x.dtype)

    def _multiply(self, x: Tensor) -> Tensor:
        if not self._parts:
            return self._torch(x)
        if x.stride(1) != 1:
            x = x.contiguous()
        n, width = x.shape[0], self.out_features
        y = torch.empty(n, width)
        if n:
            call, threads, isa = library.library().fd_linear, torch.get_num_threads(), library.isa()
            pointer, step, target = x.data_ptr(), x.stride(0) if n > 1 else self.in_features, y.data_ptr()
            for number, weights, out, bias, first in self._parts:
                call(
                    number, weights, out, self.in_features, pointer, step, n, bias, target + first, width, threads,
                    self.mode, isa,
                )  # fmt: skip
        return y

    def plan(self) -> list[tuple[int, int, int, int | None, int]]:
        """The constant arguments of each matrix's call: format, address, outputs, address of its bias, and the byte
        at which its outputs start in a row of the result.
        """
        plan, start = [], 0
        for matrix in self.matrices:
            bias = None if self.bias is None else self.bias.data_ptr() + 4 * start
            number = library.library().fd_format(matrix.source.number)
            plan.append((number, matrix.data.data_ptr(), matrix.out_features, bias, 4 * start))
            start += matrix.out_features
        return plan

    def _torch(self, x: Tensor) -> Tensor:
        """The same sums by torch, one row at a time so that a row's bits do not depend on its company."""
        weight = self.matrices[0].data if len(self.matrices) == 1 else torch.cat([m.data for m in self.matrices])
        y = torch.empty(x.shape[0], self.out_features)
        for i in range(x.shape[0]):
            y[i] = functional.linear(x[i : i + 1], weight, self.bias)[0]
        return y
