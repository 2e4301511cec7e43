"""Attention of packed segments over their slots, and of whole sequences."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from foredraft.models.base import Segment
from foredraft.models.cache import KVCache
from foredraft.models.shape import DecoderShape

_FOLD_ROWS = 32
"""Up to so many rows the heads that share keys are folded into rows; beyond, the mask copies would cost more."""


def depths(segment: Segment) -> Sequence[int]:
    """Each token's distance from the last committed one, minus one: 0, 1, 2, … for a chain."""
    if segment.parents is None:
        return range(len(segment.tokens))
    result: list[int] = []
    for i, parent in enumerate(segment.parents):
        if not -1 <= parent < i:
            raise ValueError(f"parents[{i}] is {parent}, not an earlier token or -1")
        result.append(0 if parent < 0 else result[parent] + 1)
    if len(result) != len(segment.tokens):
        raise ValueError(f"parents has {len(result)} entries for {len(segment.tokens)} tokens")
    return result


def visible(segment: Segment, steps: Sequence[int], start: int, window: int | None) -> Tensor:
    """``[T, start + T]`` bool: which committed tokens and which of its own a segment's token attends to.

    Args:
        segment: The segment, ``T`` tokens.
        steps: Their depths.
        start: Committed tokens of its slot.
        window: A token attends to positions above its own minus this; None for all.
    """
    rows = len(steps)
    if segment.parents is None:
        mask = torch.ones(rows, start + rows, dtype=torch.bool).tril_(start)
        return mask if window is None else mask.triu_(start + 1 - window)
    own = torch.eye(rows, dtype=torch.bool)
    for i, parent in enumerate(segment.parents):
        if parent >= 0:
            own[i] |= own[parent]
    mask = torch.cat([torch.ones(rows, start, dtype=torch.bool), own], 1)
    if window is not None:
        at = torch.tensor(steps) + start
        mask &= torch.cat([torch.arange(start), at])[None, :] > at[:, None] - window
    return mask


@dataclass(frozen=True, slots=True)
class _View:
    """What one segment attends to in layers of one window: keys and values a layer, and the mask."""

    keys: Sequence[Tensor]
    values: Sequence[Tensor]
    mask: Tensor | None
    causal: bool


class SegmentAttention:
    """Attention of one pass: writes keys and values of its rows into their slots and reads the slots' views."""

    def __init__(self, shape: DecoderShape, cache: KVCache, segments: Sequence[Segment], steps: list[Sequence[int]]):
        self._shape = shape
        self._segments: list[tuple[int, int, Sequence[Tensor], dict[int | None, _View]]] = []
        first = 0
        for segment, step in zip(segments, steps, strict=True):
            data, start = cache.rows(segment.slot), cache.length(segment.slot)
            last = first + len(step)
            # [layers, 2, kv_heads, T, head_dim] -> one [2, T, kv_heads, head_dim] a layer
            target = data[:, :, :, start : start + len(step)].transpose(2, 3).unbind(0)
            views = {window: self._view(data, segment, step, start, window) for window in set(shape.windows)}
            self._segments.append((first, last, target, views))
            first = last

    def _view(self, data: Tensor, segment: Segment, step: Sequence[int], start: int, window: int | None) -> _View:
        rows = len(step)
        low = 0 if window is None else max(0, start + 1 - window)
        keys, values = data[:, :, :, low : start + rows].unbind(1)
        if rows == 1:
            return _View(keys.unbind(0), values.unbind(0), None, False)
        bounded = window is not None and window < start + rows
        if start == 0 and segment.parents is None and not bounded:
            return _View(keys.unbind(0), values.unbind(0), None, True)
        allowed = visible(segment, step, start, window)[:, low:]
        mask = torch.zeros(allowed.shape, dtype=data.dtype).masked_fill_(~allowed, -torch.inf).to(data.device)
        if rows <= _FOLD_ROWS:
            mask = mask.repeat(self._shape.heads // self._shape.kv_heads, 1)
        return _View(keys.unbind(0), values.unbind(0), mask, False)

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """``q [N, heads, head_dim]``, ``k`` and ``v`` ``[N, kv_heads, head_dim]`` -> ``[N, heads * head_dim]``."""
        window = self._shape.windows[layer]
        outputs = []
        for first, last, target, views in self._segments:
            keys, values = target[layer].unbind(0)
            keys.copy_(k[first:last])
            values.copy_(v[first:last])
            view = views[window]
            outputs.append(self._attend(q[first:last], view.keys[layer], view.values[layer], view))
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs)

    def _attend(self, q: Tensor, keys: Tensor, values: Tensor, view: _View) -> Tensor:
        shape = self._shape
        rows, group = q.shape[0], shape.heads // shape.kv_heads
        if view.causal or rows > _FOLD_ROWS:
            out = attend(q.transpose(0, 1)[None], keys[None], values[None], view.mask, view.causal, shape)
            return out[0].transpose(0, 1).reshape(rows, -1)
        # Heads that share keys become rows of one product: [kv_heads, group * T, head_dim].
        folded = (
            q.view(rows, shape.kv_heads, group, -1).permute(1, 2, 0, 3).reshape(1, shape.kv_heads, group * rows, -1)
        )
        out = attend(folded, keys[None], values[None], view.mask, False, shape)
        return out.view(shape.kv_heads, group, rows, -1).permute(2, 0, 1, 3).reshape(rows, -1)


def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool, shape: DecoderShape) -> Tensor:
    """Scaled dot-product attention ``[B, H, T, head_dim]`` over ``k``, ``v`` ``[B, KV, S, head_dim]``.

    Args:
        mask: ``[T, S]``, added to the scores; None for none.
        causal: Row i sees keys ``0 … i`` (``T == S``), without a mask.
    """
    if shape.attention_softcap is None:
        grouped = q.shape[1] != k.shape[1]
        return functional.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=causal, scale=shape.attention_scale, enable_gqa=grouped
        )
    group = q.shape[1] // k.shape[1]
    scores = (q.view(q.shape[0], -1, group, *q.shape[2:]) @ k[:, :, None].transpose(-1, -2)) * shape.attention_scale
    scores = (scores / shape.attention_softcap).tanh() * shape.attention_softcap
    if causal:
        future = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu_(1)
        scores = scores.masked_fill(future, -torch.inf)
    elif mask is not None:
        scores = scores + mask
    exact = torch.promote_types(q.dtype, torch.float32)
    mixed: Tensor = scores.softmax(-1, dtype=exact).to(q.dtype) @ v[:, :, None]
    return mixed.flatten(1, 2)
