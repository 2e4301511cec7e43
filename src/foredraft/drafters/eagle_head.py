"""The block that EAGLE drafters share: one decoder layer over token embeddings and the target's hidden states.

Row t of the head joins the feature of position t with the embedding of token t+1 and foresees token t+2. The feature
is made from the target's own layers where the target has been (:meth:`EagleHead.fuse`), and is the head's own output
further on (EAGLE, Li 2024, arXiv 2401.15077; EAGLE-3, Li 2025, arXiv 2503.01840).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from foredraft.models.linear import Linear
from foredraft.models.norm import RMSNorm
from foredraft.models.rope import RopeTable, rotate
from foredraft.models.shape import Rope

ALONE = 32
"""Rows up to which a step is left to one thread: sharing its many small products out takes longer than doing them."""


@dataclass(frozen=True, slots=True)
class HeadShape:
    """Sizes and switches of a head.

    Attributes:
        taps: Target layers that the features are made of, low to high (0 = embedding, i = output of layer i).
        target_hidden: Width of the target's hidden states.
        hidden: ``d``, width of the head.
        vocab: ``V``, the target's vocabulary.
        draft_vocab: ``D <= V`` tokens that the head can propose.
        norm_before_residual: The residual sum starts from the normed feature, not from the feature itself.
        max_positions: Longest text that it was made for.
    """

    taps: tuple[int, ...]
    target_hidden: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    draft_vocab: int
    norm_eps: float
    rope: Rope
    max_positions: int
    norm_before_residual: bool = False


@dataclass(frozen=True, slots=True)
class HeadWeights:
    """The head's products and norms; every product maps float32 rows to float32 rows.

    Attributes:
        fc: ``len(taps) * target_hidden -> d``.
        input_norm, hidden_norm, final_norm: None in a head that has none (EAGLE-1).
        qkv: ``2 d -> (heads + 2 kv_heads) * head_dim``.
        gate_up: ``d -> 2 * intermediate``, gate first.
        lm_head: ``d -> D``.
        token_ids: ``[D]`` int64, increasing: the target's id of each draft token.
    """

    fc: Linear
    input_norm: RMSNorm | None
    hidden_norm: RMSNorm | None
    qkv: Linear
    out: Linear
    mlp_norm: RMSNorm
    gate_up: Linear
    down: Linear
    final_norm: RMSNorm | None
    lm_head: Linear
    token_ids: Tensor


class HeadState:
    """Keys and values of one text inside the head: committed rows, then pending ones that may be dropped.

    Attributes:
        length: Committed rows.
        position: Position of the feature of the next committed row; counts rows that were skipped, too.
    """

    def __init__(self, shape: HeadShape, capacity: int = 256) -> None:
        self.length = 0
        self.position = 0
        self._pending: list[tuple[int, int]] = []  # parent and depth of each pending row
        self._kv = torch.empty(2, shape.kv_heads, capacity, shape.head_dim)

    @property
    def pending(self) -> int:
        """Rows that :meth:`EagleHead.step` has added since the last :meth:`commit` or :meth:`drop`."""
        return len(self._pending)

    def commit(self, rows: int) -> None:
        """Keeps the first ``rows`` pending rows, which must be a chain, and drops the others."""
        self.length += rows
        self.position += rows
        self._pending.clear()

    def drop(self) -> None:
        """Drops all pending rows."""
        self._pending.clear()

    def skip(self, rows: int) -> None:
        """Goes ``rows`` positions on without keys: the target's states there are not known."""
        self.position += rows

    def copy(self, length: int, shape: HeadShape) -> HeadState:
        """A new state with the first ``length`` committed rows of this one. Only for states that skipped nothing."""
        state = HeadState(shape, max(256, length + 64))
        state._kv[:, :, :length] = self._kv[:, :, :length]
        state.length = state.position = length
        return state

    def add(self, keys: Tensor, values: Tensor, parents: Sequence[int], depths: Sequence[int]) -> Tensor:
        """Stores new pending rows; returns ``[2, kv_heads, length + pending, head_dim]``."""
        start = self.length + len(self._pending)
        end = start + keys.shape[0]
        if end > self._kv.shape[2]:
            grown = self._kv.new_empty(2, self._kv.shape[1], max(2 * self._kv.shape[2], end), self._kv.shape[3])
            grown[:, :, :start] = self._kv[:, :, :start]
            self._kv = grown
        self._kv[0, :, start:end] = keys.transpose(0, 1)
        self._kv[1, :, start:end] = values.transpose(0, 1)
        self._pending.extend(zip(parents, depths, strict=True))
        return self._kv[:, :, :end]

    def depth(self, parent: int) -> int:
        """Depth of a row under pending row ``parent`` (-1: the last committed row)."""
        return 0 if parent < 0 else self._pending[parent][1] + 1

    def mask(self, rows: int) -> Tensor | None:
        """``[rows, length + pending]``: what the last ``rows`` pending rows see. None if each sees all of it."""
        first, total = len(self._pending) - rows, self.length + len(self._pending)
        if all(parent == i - 1 for i, (parent, _) in enumerate(self._pending)):
            return None if rows == 1 else torch.ones(rows, total, dtype=torch.bool).tril(total - rows)
        visible = torch.zeros(rows, total, dtype=torch.bool)
        visible[:, : self.length] = True
        for row in range(rows):
            node = first + row
            while node >= 0:
                visible[row, self.length + node] = True
                node = self._pending[node][0]
        return visible


@dataclass(frozen=True, slots=True)
class HeadSegment:
    """The rows of one text in one call of :meth:`EagleHead.step`.

    Attributes:
        state: Its keys and values; the rows are added to its pending ones.
        tokens: ``n >= 1`` ids (the target's): row i joins ``features[i]`` with ``tokens[i]``.
        features: ``[n, d]`` float32: fused taps, or the ``hidden`` row of the node's parent.
        parents: For each row the pending row that it follows, counted from the state's first pending row, ``-1``
            for the last committed row. None: each follows the row before it.
        logits_from: Logits are wanted from this row on.
    """

    state: HeadState
    tokens: Sequence[int]
    features: Tensor
    parents: Sequence[int] | None = None
    logits_from: int = 0


class EagleHead:
    """A head ready to draft.

    Args:
        embed: The target's ``[n]`` int64 ids -> ``[n, d]`` embeddings.
    """

    def __init__(self, shape: HeadShape, weights: HeadWeights, embed: Callable[[Tensor], Tensor]) -> None:
        self.shape = shape
        self.weights = weights
        self.embed = embed
        self._rope = RopeTable(shape.rope, torch.float32, torch.device("cpu"))

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
            For each segment logits ``[n - logits_from, D]`` over the draft vocabulary, and hidden ``[n, d]``, which
            is the feature of each row's children; both float32.
        """
        with _threads(sum(len(segment.tokens) for segment in segments)):
            return self._step(segments)

    def _step(self, segments: Sequence[HeadSegment]) -> tuple[list[Tensor], list[Tensor]]:
        w, shape = self.weights, self.shape
        tokens = torch.tensor([token for segment in segments for token in segment.tokens])
        features = [segment.features for segment in segments]
        feature = features[0] if len(features) == 1 else torch.cat(features)
        parents = [_parents(segment) for segment in segments]
        depths = [_depths(segment.state, own) for segment, own in zip(segments, parents, strict=True)]
        places = [s.state.position + depth for s, own in zip(segments, depths, strict=True) for depth in own]
        heads, kv = shape.heads, shape.kv_heads
        joined, rest = self._join(self.embed(tokens).float(), feature)
        qkv = w.qkv(joined).view(-1, heads + 2 * kv, shape.head_dim)
        qk = rotate(qkv[:, : heads + kv], *self._rope(torch.tensor(places), max(places)))
        sizes = [len(own) for own in parents]
        mixed, first = [], 0
        for segment, own, deep, size in zip(segments, parents, depths, sizes, strict=True):
            rows = slice(first, first + size)
            known = segment.state.add(qk[rows, heads:], qkv[rows, heads + kv :], own, deep)
            mixed.append(_attend(qk[rows, :heads], known, segment.state.mask(size), shape))
            first += size
        x = rest + w.out(torch.cat(mixed) if len(mixed) > 1 else mixed[0])
        gate, up = w.gate_up(_norm(x, w.mlp_norm)).chunk(2, -1)
        x = x + w.down(functional.silu(gate) * up)
        hidden = list(torch.split(x, sizes))
        wanted = [own[segment.logits_from :] for segment, own in zip(segments, hidden, strict=True)]
        logits = self._logits(torch.cat(wanted) if len(wanted) > 1 else wanted[0])
        return list(torch.split(logits, [part.shape[0] for part in wanted])), hidden

    def _join(self, embedded: Tensor, feature: Tensor) -> tuple[Tensor, Tensor]:
        """Embeddings and features ``[n, d]`` -> what enters ``qkv``, and where the residual sum starts."""
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


def _parents(segment: HeadSegment) -> Sequence[int]:
    if segment.parents is not None:
        return segment.parents
    first = segment.state.pending - 1
    return range(first, first + len(segment.tokens))


def _depths(state: HeadState, parents: Sequence[int]) -> list[int]:
    """Depth of each new row; a parent may be among the new rows themselves."""
    known = state.pending
    depths: list[int] = []
    for parent in parents:
        depths.append(state.depth(parent) if parent < known else depths[parent - known] + 1)
    return depths


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
