"""Random weights in every format that the kernels know."""

from __future__ import annotations

import gguf
import numpy as np
import torch
from torch import Tensor

from foredraft.kernels import Activations, PackedLinear
from foredraft.kernels.formats import GGUF

FLOATS = ("float32", "bfloat16")
QUANTISED = tuple(GGUF)


def blocks(kind: str, out: int, width: int, seed: int = 0) -> np.ndarray:
    """Random bytes of a GGUF tensor ``[out, width]`` whose scales are ordinary numbers."""
    source, random = GGUF[kind], np.random.default_rng(seed)
    count = out * width // source.block
    raw = random.integers(0, 256, (count, source.block_bytes), dtype=np.uint8)
    halves = {"Q8_0": (0,), "Q4_0": (0,), "Q5_0": (0,), "Q4_1": (0, 2), "Q4_K": (0, 2), "Q6_K": (208,)}[kind]
    for at in halves:
        scale = (random.standard_normal(count) * 0.01).astype(np.float16)
        raw[:, at : at + 2] = scale.view(np.uint8).reshape(-1, 2)
    return raw.reshape(out, -1)


def reference(kind: str, raw: np.ndarray) -> Tensor:
    """What the ``gguf`` package makes of the same bytes, float32."""
    return torch.from_numpy(gguf.quants.dequantize(raw, gguf.GGMLQuantizationType[kind])).float()


def make(kind: str, out: int, width: int, activations: Activations = "float32", bias: bool = False) -> PackedLinear:
    """A linear of any format, quantised or not."""
    vector = torch.randn(out, generator=torch.Generator().manual_seed(3)) if bias else None
    if kind == "float32":
        return PackedLinear.from_float(weights(out, width), vector, "float32")
    if kind == "bfloat16":
        return PackedLinear.from_float(weights(out, width), vector, "bfloat16")
    return PackedLinear.from_gguf_blocks(blocks(kind, out, width), kind, (out, width), vector, activations)


def weights(out: int, width: int) -> Tensor:
    return torch.randn(out, width, generator=torch.Generator().manual_seed(1)) / width**0.5


def inputs(rows: int, width: int, seed: int = 2) -> Tensor:
    return torch.randn(rows, width, generator=torch.Generator().manual_seed(seed))
