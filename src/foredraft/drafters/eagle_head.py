"""The block that EAGLE drafters share: one decoder layer over token embeddings and the target's hidden states.

Row t of the head joins the feature of position t with the embedding of token t+1 and foresees token t+2. The feature
is made from the target's own layers where the target has been (:meth:`EagleHead.fuse`), and is the head's own output
further on (EAGLE, Li 2024, arXiv 2401.15077; EAGLE-3, Li 2025, arXiv 2503.01840).
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate, pairwise

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from foredraft.drafters.eagle_parts import HeadSegment, HeadShape, HeadState, HeadWeights
from foredraft.drafters.eagle_step import CompiledStep, Table
from foredraft.drafters.foresight import grade
from foredraft.drafters.timing import Team
from foredraft.kernels.head_pass import HeadDraft
from foredraft.kernels.law import Draws
from foredraft.models.norm import RMSNorm
from foredraft.models.rope import RopeTable, rotate

__all__ = ["ALONE", "EagleHead", "HeadSegment", "HeadShape", "HeadState", "HeadWeights"]

ALONE = 32
"""Rows up to which a step is left to one thread, since sharing its many small products out may take longer than doing
them, and a draft to one or all, whichever has been quicker (:class:`~foredraft.drafters.timing.Team`)."""


class EagleHead:
    """A head ready to draft.

    A step is one call of the compiled kernels where all products are packed for them, else many calls of torch.

    Args:
        embed: The target's ``[n]`` int64 ids -> ``[n, d]`` embeddings.
        table: The same as packed rows and a factor, if there are such; whole drafts are then one call.
    """

    def __init__(
        self,
        shape: HeadShape,
        weights: HeadWeights,
        embed: Callable[[Tensor], Tensor],
        table: Table | None = None,
    ) -> None:
        self.shape = shape
        self.weights = weights
        self.embed = embed
        self._rope = RopeTable(shape.rope, torch.float32, torch.device("cpu"))
        self._compiled = CompiledStep.make(shape, weights, table)
        self._team = Team()

    def new_state(self) -> HeadState:
        """The state of an empty text."""
        return HeadState(self.shape)

    @torch.inference_mode()
    def fuse(self, taps: Tensor) -> Tensor:
        """``[n, len(taps), target_hidden]`` hidden states of the target -> ``[n, d]`` features, float32."""
        with _threads(taps.shape[0]):
            return self.weights.fc(taps.float().flatten(1))

    @torch.inference_mode()
    def step(self, segments: Sequence[HeadSegment]) -> tuple[list[Tensor], list[Tensor]]:
        """Runs the layer over the new rows of all ``segments``.

        Returns:
            For each segment logits ``[n - logits_from, D]`` over the draft vocabulary, and hidden
            ``[n - logits_from, d]``, which is the feature of each row's children; both float32.
        """
        rows = sum(len(segment.tokens) for segment in segments)
        if self._compiled is not None:
            return self._compiled.step(segments, self.embed, 1 if rows <= ALONE else torch.get_num_threads())
        with _threads(rows):
            return self._step(segments)

    @property
    def draws(self) -> bool:
        """Whether :meth:`draft` can draw tokens and tell siblings, too."""
        return self._compiled is not None and self._compiled.draws

    @torch.inference_mode()
    def draft(self, segments: Sequence[HeadSegment], draws: Sequence[Draws], branch: int = 1) -> list[HeadDraft]:
        """A step, and a chain behind the last row of each segment.

        Only the segments' own rows stay pending.

        Args:
            segments: Their texts have no trees.
            draws: How each chain's tokens are chosen, and how many; other than the likeliest only if :attr:`draws`.
            branch: Siblings to tell of each likeliest token, itself counted; more than one only if :attr:`draws`.

        Returns:
            For each segment up to ``count`` tokens, of those that the head can propose; fewer where logits are not
            finite, or ``least`` ends the draft.
        """
        if self._compiled is not None and self._compiled.drafts:
            compiled, threads = self._compiled, torch.get_num_threads()
            if sum(len(segment.tokens) for segment in segments) > ALONE:
                return compiled.draft(segments, draws, threads, branch)
            return self._team.run(threads, lambda n: compiled.draft(segments, draws, n, branch), _steps)
        drafted: list[list[int]] = [[] for _ in segments]
        chances: list[list[float]] = [[] for _ in segments]
        sure = [1.0] * len(segments)
        own = [segment.state.pending + len(segment.tokens) for segment in segments]
        writing = list(enumerate(segments))
        while writing:
            following = []
            steps = zip(writing, *self.step([segment for _, segment in writing]), strict=True)
            for (i, segment), logits, hidden in steps:
                row = logits[-1].numpy()  # torch's argmax is nine times slower on a CPU
                best = int(row.argmax())
                if not math.isfinite(row[best]):
                    continue
                drafted[i].append(int(self.weights.token_ids[best]))
                if (trust := draws[i].trust) is not None:
                    chances[i].append(1.0 / float(np.exp(row - row[best]).sum()))
                    sure[i] *= trust[grade(chances[i][-1])]
                if len(drafted[i]) < draws[i].count and sure[i] >= draws[i].least:
                    following.append((i, HeadSegment(segment.state, drafted[i][-1:], hidden[-1:])))
            writing = following
        for segment, pending in zip(segments, own, strict=True):
            segment.state.shorten(pending)
        return [HeadDraft(tokens, chances=each) for tokens, each in zip(drafted, chances, strict=True)]

    def _step(self, segments: Sequence[HeadSegment]) -> tuple[list[Tensor], list[Tensor]]:
        w, shape = self.weights, self.shape
        tokens = torch.tensor([token for segment in segments for token in segment.tokens])
        features = [self.fuse(s.features) if s.features.dim() == 3 else s.features for s in segments]
        feature = features[0] if len(features) == 1 else torch.cat(features)
        parents = [segment.above() for segment in segments]
        places = [
            s.state.position + depth for s, own in zip(segments, parents, strict=True) for depth in s.state.depths(own)
        ]
        joined, rest = self._join(self.embed(tokens).float(), feature)
        keys, values = w.kv(joined).view(-1, 2, shape.kv_heads, shape.head_dim).unbind(1)
        cos, sin = self._rope(torch.tensor(places), max(places))
        keys = rotate(keys, cos, sin)
        starts = list(accumulate((len(own) for own in parents), initial=0))
        sizes = [len(own) - segment.logits_from for segment, own in zip(segments, parents, strict=True)]
        known = [
            segment.state.add(keys[first:last], values[first:last], own)
            for segment, own, (first, last) in zip(segments, parents, pairwise(starts), strict=True)
        ]
        if not any(sizes):
            return [keys.new_empty(0, shape.draft_vocab)] * len(sizes), [keys.new_empty(0, shape.hidden)] * len(sizes)
        wanted = [row for last, size in zip(starts[1:], sizes, strict=True) for row in range(last - size, last)]
        q = rotate(w.q(joined[wanted]).view(-1, shape.heads, shape.head_dim), cos[wanted], sin[wanted])
        mixed = [
            _attend(rows, seen, segment.state.mask(len(rows)), shape)
            for segment, seen, rows in zip(segments, known, torch.split(q, sizes), strict=True)
            if len(rows)
        ]
        x = rest[wanted] + w.out(mixed[0] if len(mixed) == 1 else torch.cat(mixed))
        gate, up = w.gate_up(_norm(x, w.mlp_norm)).chunk(2, -1)
        x = x + w.down(functional.silu(gate) * up)
        return list(torch.split(self._logits(x), sizes)), list(torch.split(x, sizes))

    def _join(self, embedded: Tensor, feature: Tensor) -> tuple[Tensor, Tensor]:
        """Embeddings and features ``[n, d]`` -> what enters ``q`` and ``kv``, and where the residual sum starts."""
        w = self.weights
        assert w.input_norm is not None
        assert w.hidden_norm is not None
        normed = _norm(feature, w.hidden_norm)
        rest = normed if self.shape.norm_before_residual else feature
        return torch.cat([_norm(embedded, w.input_norm), normed], -1), rest

    def _logits(self, hidden: Tensor) -> Tensor:
        """The layer's outputs ``[n, d]`` -> ``[n, D]``."""
        assert self.weights.final_norm is not None
        return self.weights.lm_head(_norm(hidden, self.weights.final_norm))


def _steps(drafts: Sequence[HeadDraft]) -> int:
    """Rows that the head ran one after the other for the longest draft."""
    return max([len(draft.tokens) for draft in drafts], default=0) or 1


@contextlib.contextmanager
def _threads(rows: int) -> Iterator[None]:
    """One thread for a few rows, as many as there are for more."""
    before = torch.get_num_threads()
    if rows > ALONE or before == 1:
        yield
        return
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _norm(x: Tensor, norm: RMSNorm) -> Tensor:
    """The same as ``norm(x)`` in a third of the time for the few rows of a draft."""
    scale = x.square().mean(-1, keepdim=True).add_(norm.eps).rsqrt_()
    return (x * scale).mul_(norm.weight)


def _attend(q: Tensor, known: Tensor, mask: Tensor | None, shape: HeadShape) -> Tensor:
    """``q [n, heads, head_dim]`` over ``known [2, kv_heads, L, head_dim]`` -> ``[n, heads * head_dim]``."""
    n, groups = q.shape[0], shape.heads // shape.kv_heads
    keys, values = known
    # [kv_heads, n * groups, head_dim]: the queries of one key head lie together, so nothing is repeated
    grouped = q.view(n, shape.kv_heads, groups, shape.head_dim).transpose(0, 1).reshape(shape.kv_heads, n * groups, -1)
    scores = torch.matmul(grouped, keys.transpose(1, 2)) * shape.head_dim**-0.5
    if mask is not None:
        hidden = ~mask.repeat_interleave(groups, 0)
        scores = scores.masked_fill(hidden, -torch.inf)
    mixed = torch.matmul(scores.softmax(-1), values).view(shape.kv_heads, n, groups, shape.head_dim)
    return mixed.transpose(0, 1).reshape(n, shape.heads * shape.head_dim)
