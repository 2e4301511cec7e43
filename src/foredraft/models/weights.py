"""Weights as a file stores them, read one at a time, under one set of names whatever the format.

The names are GGUF's (``blk.3.attn_q.weight``); a source of another format translates.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from foredraft.errors import ModelLoadError


@dataclass(frozen=True, slots=True)
class Quantised:
    """Rows of quantised blocks, byte for byte as the file holds them (rows perhaps reordered).

    Attributes:
        kind: GGML's name of the format, e.g. ``"Q4_1"``.
        blocks: ``[out, bytes per row]`` uint8.
    """

    kind: str
    blocks: Tensor


@dataclass(frozen=True, slots=True)
class Weight:
    """One tensor of a file, not yet read.

    Attributes:
        name: Its name in the file.
        shape: Its shape, output rows first.
        read: Reads it, dequantised.
        read_quantised: Reads its blocks, or None if the file holds it as plain numbers.
        order: Output rows are taken in this order, or as they are if None.
    """

    name: str
    shape: tuple[int, ...]
    read: Callable[[], Tensor]
    read_quantised: Callable[[], Quantised] | None = None
    order: Tensor | None = None

    def dense(self, dtype: torch.dtype) -> Tensor:
        """``shape`` numbers in ``dtype``."""
        values = self.read().to(dtype)
        return values if self.order is None else values[self.order]

    def quantised(self) -> Quantised | None:
        if self.read_quantised is None:
            return None
        stored = self.read_quantised()
        return stored if self.order is None else replace(stored, blocks=stored.blocks[self.order])

    def rows(self, which: Tensor) -> Weight:
        """Some of its output rows."""
        order = which if self.order is None else self.order[which]
        return replace(self, shape=(len(which), *self.shape[1:]), order=order)

    def reordered(self, order: Tensor) -> Weight:
        return replace(self, order=order)


class TensorSource(Protocol):
    """A file or folder of weights."""

    @property
    def path(self) -> Path: ...

    def find(self, name: str) -> Weight | None:
        """The weight of that (GGUF) name, or None. ``blk.3.ffn_up_exps.7`` is expert 7 of layer 3."""


def require(source: TensorSource, name: str, shape: tuple[int, ...]) -> Weight:
    """The weight of that name and shape.

    Raises:
        ModelLoadError: It is missing or has another shape.
    """
    weight = source.find(name)
    if weight is None:
        raise ModelLoadError(
            f"tensor {name!r} is missing", field=str(source.path), remedy="download the model again or convert it anew"
        )
    if weight.shape != shape:
        raise ModelLoadError(
            f"tensor {weight.name!r} has shape {list(weight.shape)}, its configuration asks for {list(shape)}",
            field=str(source.path),
            remedy="check that configuration and weights belong to one model",
        )
    return weight
