"""Linears that keep a file's quantised blocks in memory and multiply with them as they are, on a CPU."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from foredraft.errors import ConfigError
from foredraft.kernels.formats import BFLOAT16, FLOAT32, GGUF, gguf_source
from foredraft.kernels.linear import Activations, Matrix, PackedLinear, pack_blocks
from foredraft.models.linear import LinearFactory
from foredraft.models.weights import Weight


def packed_linear(activations: Activations = "float32") -> LinearFactory:
    """A factory for :func:`foredraft.models.loading.load_model` (``make_linear=packed_linear()``).

    Blocks of the formats in :data:`foredraft.kernels.formats.GGUF` are packed unchanged; all other weights are packed
    in the model's dtype.

    Args:
        activations: How inputs enter the sums, see :data:`foredraft.kernels.linear.Activations`. Anything but
            ``"float32"`` rounds them, which changes the model a little, for plain decoding and speculation alike.
    """

    def make(weights: Sequence[Weight], bias: Tensor | None, dtype: torch.dtype, device: torch.device) -> PackedLinear:
        if device.type != "cpu" or dtype not in (torch.float32, torch.bfloat16):
            raise ConfigError(
                f"packed weights need a CPU and float32 or bfloat16 (got {device.type}, {dtype})", field="dtype"
            )
        return PackedLinear([_pack(weight, dtype) for weight in weights], bias, activations)

    return make


def _pack(weight: Weight, dtype: torch.dtype) -> Matrix:
    rows, width = weight.shape
    stored = weight.quantised()
    if stored is not None and stored.kind in GGUF:
        return pack_blocks(stored.blocks, gguf_source(stored.kind), rows, width)
    source = FLOAT32 if dtype == torch.float32 else BFLOAT16
    return pack_blocks(weight.dense(dtype).contiguous().view(torch.uint8), source, rows, width)
