"""Weights as four bits keep them, for training that expects it (Jacob 2018, arXiv 1712.05877)."""

from __future__ import annotations

from torch import Tensor

BLOCK = 32


def rounded4(weight: Tensor) -> Tensor:
    """``[out, in]`` float32 after a round trip through GGUF's Q4_1: 16 steps between the least and the largest of every
    32 inputs; both ends are float16.
    """
    blocks = weight.view(weight.shape[0], -1, BLOCK)
    low, high = blocks.amin(-1, keepdim=True), blocks.amax(-1, keepdim=True)
    step = (high - low) / 15
    steps = ((blocks - low) / step.where(step > 0, 1.0) + 0.5).floor().clamp(0, 15)
    return (steps * step.half().float() + low.half().float()).view_as(weight)
