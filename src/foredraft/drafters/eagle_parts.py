"""What an EAGLE head is made of and works on: sizes, weights, the keys and values of a text, rows to read."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from foredraft.models.linear import Linear
from foredraft.models.norm import RMSNorm
from foredraft.models.shape import Rope


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
        q: ``2 d -> heads * head_dim``.
        kv: ``2 d -> 2 kv_heads * head_dim``, keys before values.
        gate_up: ``d -> 2 * intermediate``, gate first.
        lm_head: ``d -> D``.
        token_ids: ``[D]`` int64, increasing: the target's id of each draft token.
    """

    fc: Linear
    input_norm: RMSNorm | None
    hidden_norm: RMSNorm | None
    q: Linear
    kv: Linear
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
        position: Position of the feature of the next committed row.
    """

    def __init__(self, shape: HeadShape, capacity: int = 256) -> None:
        self.position = 0
        self._places: list[int] = []  # position of each committed row; rows may have been skipped or forgotten
        self._pending: list[tuple[int, int]] = []  # parent and depth of each pending row
        self._kv = torch.empty(2, shape.kv_heads, capacity, shape.head_dim)

    @property
    def length(self) -> int:
        """Committed rows."""
        return len(self._places)

    @property
    def pending(self) -> int:
        """Rows that :meth:`EagleHead.step` has added since the last :meth:`commit` or :meth:`drop`."""
        return len(self._pending)

    def commit(self, rows: int) -> None:
        """Keeps the first ``rows`` pending rows, which must be a chain, and drops the others."""
        self._places.extend(range(self.position, self.position + rows))
        self.position += rows
        self._pending.clear()

    def drop(self) -> None:
        """Drops all pending rows."""
        self._pending.clear()

    def skip(self, rows: int) -> None:
        """Goes ``rows`` positions on without keys: the target's states there are not known, or not worth reading."""
        self.position += rows

    def forget(self, keep: int) -> None:
        """Drops all but the last ``keep`` committed rows; there are no pending ones."""
        extra = self.length - keep
        if extra > 0:
            self._kv[:, :, :keep] = self._kv[:, :, extra : extra + keep].clone()
            del self._places[:extra]

    def before(self, position: int) -> int:
        """How many committed rows lie before ``position``."""
        return bisect_left(self._places, position)

    def copy(self, rows: int, shape: HeadShape) -> HeadState:
        """A new state with the first ``rows >= 1`` committed rows of this one, as if the text ended with them."""
        state = HeadState(shape, max(256, rows + 64))
        state._kv[:, :, :rows] = self._kv[:, :, :rows]
        state._places = self._places[:rows]
        state.position = state._places[-1] + 1
        return state

    def room(self, rows: int) -> Tensor:
        """The buffer ``[2, kv_heads, capacity, head_dim]``, with room for ``rows`` more behind the pending ones."""
        start = self.length + len(self._pending)
        if start + rows > self._kv.shape[2]:
            capacity = max(2 * self._kv.shape[2], start + rows)
            grown = self._kv.new_empty(2, self._kv.shape[1], capacity, self._kv.shape[3])
            grown[:, :, :start] = self._kv[:, :, :start]
            self._kv = grown
        return self._kv

    def extend(self, parents: Sequence[int]) -> None:
        """Notes new pending rows, whose keys and values are in the buffer."""
        for parent in parents:
            self._pending.append((parent, 0 if parent < 0 else self._pending[parent][1] + 1))

    def shorten(self, pending: int) -> None:
        """Drops all but the first ``pending`` pending rows."""
        del self._pending[pending:]

    def add(self, keys: Tensor, values: Tensor, parents: Sequence[int]) -> Tensor:
        """Stores new pending rows; returns ``[2, kv_heads, length + pending, head_dim]``."""
        start = self.length + len(self._pending)
        end = start + keys.shape[0]
        kv = self.room(keys.shape[0])
        kv[0, :, start:end] = keys.transpose(0, 1)
        kv[1, :, start:end] = values.transpose(0, 1)
        self.extend(parents)
        return kv[:, :, :end]

    def depths(self, parents: Sequence[int]) -> list[int]:
        """Depth of each new row, 0 behind the last committed one; a parent may be among the new rows themselves."""
        known = len(self._pending)
        depths: list[int] = []
        for parent in parents:
            above = -1 if parent < 0 else self._pending[parent][1] if parent < known else depths[parent - known]
            depths.append(above + 1)
        return depths

    def tree(self, new: Sequence[int]) -> list[int] | None:
        """Parents of the pending rows and of ``new`` ones; None if each follows the row before it."""
        parents = [parent for parent, _ in self._pending]
        parents += new
        return None if parents == list(range(-1, len(parents) - 1)) else parents

    def mask(self, rows: int) -> Tensor | None:
        """``[rows, length + pending]``: what the last ``rows`` pending rows see. None if each sees all of it."""
        first, total = len(self._pending) - rows, self.length + len(self._pending)
        if self.tree(()) is None:
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
        features: ``[n, d]`` float32: fused taps, or the ``hidden`` row of the node's parent. Or the taps
            ``[n, taps, target_hidden]`` themselves, which are fused on the way; then so in all segments of a call.
        parents: For each row the pending row that it follows, counted from the state's first pending row, ``-1``
            for the last committed row. None: each follows the row before it.
        logits_from: Wanted are rows from this one on; the others only leave their keys and values.
    """

    state: HeadState
    tokens: Sequence[int]
    features: Tensor
    parents: Sequence[int] | None = None
    logits_from: int = 0

    def above(self) -> Sequence[int]:
        """The parent of each row."""
        if self.parents is not None:
            return self.parents
        first = self.state.pending - 1
        return range(first, first + len(self.tokens))
