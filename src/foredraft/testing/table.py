"""Public fakes: a target given by a function of the prefix, and a drafter that proposes what it is told.

They satisfy the real contracts and keep the real caches' invariants, so code that passes with them has met
every rule of the engine; float64 throughout, so laws can be compared exactly.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
from torch import Tensor

from foredraft.drafters.base import Drafter, DraftRequest
from foredraft.errors import CacheFullError, ConfigError, ContextLengthError
from foredraft.models.base import ForwardOutput, Segment
from foredraft.types import NO_DRAFT, Draft

Numbers: TypeAlias = "Sequence[float] | Tensor"


@dataclass(slots=True)
class _Slot:
    committed: list[int] = field(default_factory=list)
    pending: list[int] | None = None


class TableCache:
    """A slot cache that remembers token ids and refuses every misuse of the contract."""

    def __init__(self, max_slots: int | None = None) -> None:
        self.max_slots = max_slots
        self._slots: dict[int, _Slot] = {}
        self._next = 0

    def allocate(self) -> int:
        if self.max_slots is not None and len(self._slots) >= self.max_slots:
            raise CacheFullError(f"all {self.max_slots} slots are in use", field="max_slots")
        slot, self._next = self._next, self._next + 1
        self._slots[slot] = _Slot()
        return slot

    def copy(self, slot: int, length: int) -> int:
        """Takes another slot that holds the first ``length`` committed ids of this one."""
        other = self.allocate()
        self._slots[other].committed = self._slots[slot].committed[:length]
        return other

    def free(self, slot: int) -> None:
        del self._slots[slot]

    def length(self, slot: int) -> int:
        return len(self._slots[slot].committed)

    def commit(self, slot: int, keep: int | Sequence[int]) -> None:
        state = self._slots[slot]
        if state.pending is None:
            raise ConfigError("nothing is pending", field=f"slot {slot}")
        rows = range(keep) if isinstance(keep, int) else keep
        state.committed += [state.pending[row] for row in rows]
        state.pending = None

    def rollback(self, slot: int, length: int) -> None:
        state = self._slots[slot]
        if state.pending is not None or not 0 <= length <= len(state.committed):
            raise ConfigError(f"cannot roll back to {length}", field=f"slot {slot}")
        del state.committed[length:]

    def tokens(self, slot: int) -> list[int]:
        """The committed ids of a slot."""
        return list(self._slots[slot].committed)

    def append(self, segments: Sequence[Segment], limit: int | None) -> None:
        """Makes the segments' tokens pending, all or none."""
        for segment in segments:
            state = self._slots[segment.slot]
            if state.pending is not None:
                raise ConfigError("a pass over it was not committed", field=f"slot {segment.slot}")
            if limit is not None and len(state.committed) + len(segment.tokens) > limit:
                raise ContextLengthError(f"{len(state.committed) + len(segment.tokens)} tokens exceed {limit}")
        for segment in segments:
            self._slots[segment.slot].pending = list(segment.tokens)

    @property
    def slots_in_use(self) -> int:
        return len(self._slots)

    @property
    def bytes_in_use(self) -> int:
        return 8 * sum(len(slot.committed) + len(slot.pending or ()) for slot in self._slots.values())


class TableModel:
    """A target (or a model drafter) whose logits are any function of the prefix.

    Args:
        logits_fn: ``logits_fn(prefix) -> V numbers``: the logits of the token that follows ``prefix``, a tuple
            of the ids of prompt and output so far.
        vocab_size: ``V``.
        max_context: Most tokens a slot can hold; None for no limit.
        max_slots: Most slots at once; None for no limit.

    Example:
        >>> model = TableModel(lambda prefix: [0.0, 1.0, float(len(prefix) % 2)], vocab_size=3)
        >>> slot = model.cache.allocate()
        >>> model.forward([Segment(slot, [0, 1])]).logits[0].tolist()
        [[0.0, 1.0, 1.0], [0.0, 1.0, 0.0]]
    """

    def __init__(
        self,
        logits_fn: Callable[[tuple[int, ...]], Numbers],
        vocab_size: int,
        max_context: int | None = None,
        max_slots: int | None = None,
    ) -> None:
        self.logits_fn = logits_fn
        self._vocab_size = vocab_size
        self._max_context = max_context
        self._cache = TableCache(max_slots)

    @property
    def vocab_size(self) -> int:
        return self._vocab_size

    @property
    def max_context(self) -> int | None:
        return self._max_context

    @property
    def cache(self) -> TableCache:
        return self._cache

    def forward(self, segments: Sequence[Segment], taps: Sequence[int] = ()) -> ForwardOutput:
        if taps:
            raise ConfigError("a table has no hidden states", field="taps")
        self._cache.append(segments, self._max_context)
        return ForwardOutput([self._rows(segment) for segment in segments], [])

    def _rows(self, segment: Segment) -> Tensor:
        context = tuple(self._cache.tokens(segment.slot))
        first = segment.logits_from
        rows = torch.empty(len(segment.tokens) - first, self._vocab_size, dtype=torch.float64)
        for row in range(first, len(segment.tokens)):
            values = torch.as_tensor(self.logits_fn(context + _path(segment, row)), dtype=torch.float64)
            if values.shape != (self._vocab_size,):
                raise ConfigError(
                    f"returned {tuple(values.shape)} numbers, not {self._vocab_size}", field="TableModel.logits_fn"
                )
            rows[row - first] = values.detach()  # copied: the function may fill one buffer again and again
        return rows


def _path(segment: Segment, row: int) -> tuple[int, ...]:
    """The tokens of a segment that row ``row`` attends to, itself last."""
    if segment.parents is None:
        return tuple(segment.tokens[: row + 1])
    path: list[int] = []
    while row >= 0:
        path.append(segment.tokens[row])
        row = segment.parents[row]
    return tuple(reversed(path))


class ScriptedDrafter(Drafter):
    """A drafter that proposes what a function of the prefix says.

    Args:
        propose_fn: ``propose_fn(prefix, k)`` returns at most k token ids, or a tuple ``(ids, q)`` with ``q`` of shape
            ``[n, V]`` where each id was really drawn from its row of q. Lists, tuples, arrays and tensors will do;
            ``q = None`` says that the ids were not drawn.
        max_context: Longer prefixes get no proposal; None for no limit.
    """

    name = "scripted"

    def __init__(
        self,
        propose_fn: Callable[
            [tuple[int, ...], int], Sequence[int] | tuple[Sequence[int], Numbers | Sequence[Numbers] | None]
        ],
        max_context: int | None = None,
    ) -> None:
        self.propose_fn = propose_fn
        self.max_context = max_context

    def propose(self, request: DraftRequest, k: int) -> Draft:
        prefix = tuple(request.ids)
        if self.max_context is not None and len(prefix) >= self.max_context:
            return NO_DRAFT
        tokens, q = _tokens_and_law(self.propose_fn(prefix, k))
        ids = tuple(operator.index(token) for token in tokens)
        return Draft(ids, None if q is None or not ids else _rows_of(q, len(ids)))


def _tokens_and_law(answer: Any) -> tuple[Any, Any]:
    """Tells ``(ids, q)`` from a plain sequence of ids, which may be a tuple of two."""
    if not isinstance(answer, tuple) or len(answer) != 2:
        return answer, None
    first = answer[0]
    is_id = first.ndim == 0 if hasattr(first, "ndim") else hasattr(first, "__index__")
    return (answer, None) if is_id else answer


def _rows_of(q: Any, n: int) -> Tensor:
    """Rows of probabilities in any container -> ``[n, V]`` float64; one row may come without its outer list."""
    if not hasattr(q, "ndim"):
        q = torch.stack([torch.as_tensor(row, dtype=torch.float64) for row in q])
    rows = torch.as_tensor(q, dtype=torch.float64).detach()
    return rows.reshape(n, -1) if rows.ndim == 1 else rows
