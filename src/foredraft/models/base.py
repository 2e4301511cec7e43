"""The contract of a model that verifies (or drafts): one forward pass over packed segments, and a slot cache.

A pass takes a list of segments, one per request, each with its own number of tokens. Nothing is padded:
prefill chunks, verifications of k+1 rows and plain single tokens share a pass at the cost of their own rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

from torch import Tensor


@dataclass(frozen=True, slots=True)
class Segment:
    """The part of a pass that belongs to one slot.

    Attributes:
        slot: The cache slot; its committed tokens are the context of these.
        tokens: ``T >= 1`` token ids that follow the committed ones.
        logits_from: Logits are computed for rows ``logits_from … T-1`` only; ``T`` means none (a prefill chunk).
        parents: ``None`` for a chain. Else ``parents[i] < i`` is the index, within this segment, of the token
            that token i follows, and ``-1`` the last committed token of the slot. A token attends to the
            committed tokens, to itself and to its ancestors; its position is committed length + depth.
    """

    slot: int
    tokens: Sequence[int]
    logits_from: int = 0
    parents: Sequence[int] | None = None


@dataclass(frozen=True, slots=True)
class ForwardOutput:
    """What a pass returns, one entry a segment.

    Attributes:
        logits: ``[T - logits_from, V]`` each, float32 (float64 if the model computes in float64).
        taps: ``[T, len(taps), d]`` each: hidden states after the named layers, in the model's dtype; empty
            if no tap was asked for.
        likeliest: For each row of logits the lowest id of the largest, -1 where one is NaN or that is not finite; empty
            if the model does not tell.
    """

    logits: list[Tensor]
    taps: list[Tensor]
    likeliest: list[list[int]] = field(default_factory=list)


class SlotCache(Protocol):
    """Keys and values (or any other state) of many requests, each in its own slot.

    A pass appends a segment's rows to its slot as *pending*. ``commit`` keeps some of them and drops the
    rest; until then the slot's committed length does not change. Every pass over a slot must be followed
    by ``commit`` before the next one over that slot.
    """

    def allocate(self) -> int:
        """Takes a free slot, empty. Raises CacheFullError if none fits the budget."""

    def free(self, slot: int) -> None:
        """Gives the slot and its memory back."""

    def length(self, slot: int) -> int:
        """Committed tokens in the slot."""

    def commit(self, slot: int, keep: int | Sequence[int]) -> None:
        """Keeps the first ``keep`` pending rows, or the named pending rows in that order (a tree's path)."""

    def rollback(self, slot: int, length: int) -> None:
        """Cuts the slot back to ``length`` committed tokens (0 <= length <= committed)."""

    @property
    def slots_in_use(self) -> int: ...

    @property
    def bytes_in_use(self) -> int: ...


@runtime_checkable
class Target(Protocol):
    """A causal language model with a slot cache. Drafter models satisfy the same contract.

    Attributes:
        vocab_size: ``V``, the width of the logits.
        max_context: Most tokens that a slot can hold, or ``None`` for no limit.
        cache: Its slot cache.
    """

    @property
    def vocab_size(self) -> int: ...

    @property
    def max_context(self) -> int | None: ...

    @property
    def cache(self) -> SlotCache: ...

    def forward(self, segments: Sequence[Segment], taps: Sequence[int] = ()) -> ForwardOutput:
        """Runs one pass.

        Args:
            segments: At most one a slot.
            taps: Layer numbers (0 = embedding output, i = output of layer i) whose hidden states are wanted.

        Raises:
            CacheFullError: A slot cannot grow. No slot has changed.
            ContextLengthError: A slot would exceed ``max_context``. No slot has changed.
        """
