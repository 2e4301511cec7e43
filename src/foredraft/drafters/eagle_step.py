"""Steps of an EAGLE-3 head in the compiled kernels: rows of texts in, logits and features or whole drafts out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Self

import torch
from torch import Tensor

from foredraft.drafters.eagle_parts import HeadSegment, HeadShape, HeadWeights
from foredraft.kernels import PackedLinear
from foredraft.kernels.head_pass import HeadDraft, HeadParts, HeadPass, HeadRows
from foredraft.kernels.law import Draws
from foredraft.models.rope import half_angles

Table = tuple[PackedLinear, float]
"""Embeddings as rows of a packed matrix, and the factor that they are multiplied with."""


class CompiledStep:
    """What :class:`~foredraft.drafters.eagle_head.EagleHead` computes, in one call.

    Attributes:
        drafts: Whether whole drafts can be made in one call, too, and
        draws: also drawn ones.
    """

    def __init__(self, shape: HeadShape, head: HeadPass) -> None:
        table = head.parts.table
        self.drafts = table is not None
        self.draws = table is not None and table.out_features == shape.vocab
        self._rope = shape.rope
        self._head = head
        self._angles = half_angles(shape.rope, 256)

    @classmethod
    def make(cls, shape: HeadShape, weights: HeadWeights, table: Table | None) -> Self | None:
        """None where the kernels have no such head: products not packed or not alike, or no norms (EAGLE-1)."""
        names = ("fc", "q", "kv", "out", "gate_up", "down", "lm_head")
        products = {name: getattr(weights, name) for name in names}
        packed = [product for product in products.values() if isinstance(product, PackedLinear)]
        alike = len({product.mode for product in packed}) == 1
        if len(packed) < len(names) or not alike or not all(product.matrices[0].packed for product in packed):
            return None
        input_norm, hidden_norm, final_norm = weights.input_norm, weights.hidden_norm, weights.final_norm
        if shape.head_dim % 8 or input_norm is None or hidden_norm is None or final_norm is None:
            return None
        rows, scale = (None, 1.0) if table is None or not table[0].matrices[0].packed else table
        parts = HeadParts(
            heads=shape.heads,
            kv_heads=shape.kv_heads,
            head_dim=shape.head_dim,
            norm_eps=shape.norm_eps,
            norm_before_residual=shape.norm_before_residual,
            input_norm=input_norm.weight,
            hidden_norm=hidden_norm.weight,
            mlp_norm=weights.mlp_norm.weight,
            final_norm=final_norm.weight,
            token_ids=weights.token_ids,
            table=rows,
            table_scale=scale,
            **products,
        )
        return cls(shape, HeadPass(parts))

    def step(
        self, segments: Sequence[HeadSegment], embed: Callable[[Tensor], Tensor], threads: int
    ) -> tuple[list[Tensor], list[Tensor]]:
        """See :meth:`foredraft.drafters.eagle_head.EagleHead.step`."""
        embedded = None
        if not self.drafts:
            tokens = torch.tensor([token for segment in segments for token in segment.tokens])
            embedded = embed(tokens).to("cpu", torch.float32)
        texts = [self._rows(segment) for segment in segments]
        logits, hidden = self._head(texts, _features(segments), self._table(texts), embedded, threads)
        for segment in segments:
            segment.state.extend(segment.above())
        if len(segments) == 1:
            return [logits], [hidden]
        wanted = [len(segment.tokens) - segment.logits_from for segment in segments]
        return list(torch.split(logits, wanted)), list(torch.split(hidden, wanted))

    def draft(
        self, segments: Sequence[HeadSegment], draws: Sequence[Draws], threads: int, branch: int = 1
    ) -> list[HeadDraft]:
        """See :meth:`foredraft.drafters.eagle_head.EagleHead.draft`."""
        texts = [self._rows(segment, each) for segment, each in zip(segments, draws, strict=True)]
        drafted = self._head.draft(texts, _features(segments), self._table(texts), threads, branch)
        for segment in segments:
            segment.state.extend(segment.above())
        return drafted

    def _rows(self, segment: HeadSegment, draws: Draws | None = None) -> HeadRows:
        state, n = segment.state, len(segment.tokens)
        cache = state.room(n if draws is None else n + draws.count - 1)
        parents = state.tree(segment.above())
        return HeadRows(
            segment.tokens, state.length, state.pending, state.position, cache, parents, segment.logits_from, draws
        )

    def _table(self, texts: Sequence[HeadRows]) -> tuple[Tensor, Tensor]:
        longest = max(text.position + text.pending + len(text.tokens) + text.drafts for text in texts)
        if longest > self._angles[0].shape[0]:
            self._angles = half_angles(self._rope, 2 * longest)
        return self._angles


def _features(segments: Sequence[HeadSegment]) -> Tensor:
    """``[N, d]`` or ``[N, taps, target_hidden]`` float32 on the CPU."""
    features = [segment.features for segment in segments]
    return (features[0] if len(features) == 1 else torch.cat(features)).to("cpu", torch.float32)
