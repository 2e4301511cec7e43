"""From quantised blocks to numbers."""

from __future__ import annotations

from collections.abc import Callable

import gguf
import torch
from torch import Tensor


def dequantise(kind: str, rows: Tensor) -> Tensor:
    """Dequantises rows of blocks.

    Args:
        kind: GGML's name of the format, e.g. ``"Q4_K"``.
        rows: ``[rows, bytes]`` uint8.

    Returns:
        ``[rows, numbers]`` float32.

    Raises:
        NotImplementedError: A format that the ``gguf`` package cannot read.
    """
    fast = _FAST.get(kind)
    if fast is None:
        return torch.from_numpy(gguf.quants.dequantize(rows.numpy(), gguf.GGMLQuantizationType[kind]))
    _, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
    return fast(rows.reshape(-1, size)).view(rows.shape[0], -1)


# The formats below are written out because numpy takes seconds for what torch does in a tenth.


def _half(blocks: Tensor, start: int) -> Tensor:
    """The float16 at byte ``start`` of each block, as a float32 column ``[blocks, 1]``."""
    return blocks[:, start : start + 2].contiguous().view(torch.float16).float()


def _nibbles(packed: Tensor) -> Tensor:
    """Low halves of all bytes, then high halves."""
    return torch.cat([packed & 15, packed >> 4], -1)


def _q8_0(blocks: Tensor) -> Tensor:
    return blocks[:, 2:].view(torch.int8).float().mul_(_half(blocks, 0))


def _q4_0(blocks: Tensor) -> Tensor:
    return _nibbles(blocks[:, 2:]).float().sub_(8).mul_(_half(blocks, 0))


def _q4_1(blocks: Tensor) -> Tensor:
    return _nibbles(blocks[:, 4:]).float().mul_(_half(blocks, 0)).add_(_half(blocks, 2))


_FAST: dict[str, Callable[[Tensor], Tensor]] = {"Q8_0": _q8_0, "Q4_0": _q4_0, "Q4_1": _q4_1}
