"""Slots with running states: what was read since which copy, so that any earlier length can be reached again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor
from transformers import DynamicCache
from transformers.cache_utils import (
    LinearAttentionAndFullAttentionLayer,
    LinearAttentionLayer,
)

from foredraft.errors import UnsupportedModelError
from foredraft.models.cache_checks import check_cut, kept_rows
from foredraft.models.hf_cache import CacheFactory, HfCache, Slot, cut, kind, nbytes, whole_cache

_STATES = (LinearAttentionLayer, LinearAttentionAndFullAttentionLayer)

Copy = list[dict[str, Any]]
"""The running states of a cache, one entry a layer that has any."""


def has_state(layer: Any) -> bool:
    return kind(layer) is None


def state_cache_factory(config: Any) -> CacheFactory:
    """How to make a cache whose states can be copied (see :func:`foredraft.models.hf_cache.cache_factory`).

    Raises:
        UnsupportedModelError: A layer keeps a state of a kind that is not known here.
    """
    for index, layer in enumerate(DynamicCache(config=config).layers):
        if has_state(layer) and type(layer) not in _STATES:
            raise UnsupportedModelError(
                f"layer {index} keeps its past in a {type(layer).__name__}, which cannot be copied and put back",
                field="model",
                remedy="use a model with attention, convolution or recurrent layers of the usual kinds",
            )

    return lambda: whole_cache(config)


@dataclass(slots=True)
class StateSlot(Slot):
    """One request.

    Attributes:
        make: Makes an empty cache.
        ids: Committed tokens.
        pending: Tokens of the last pass.
        at: How many tokens the live cache has read; -1 once it is of no use.
        saved: Copies of the running states, by the number of tokens read.
    """

    make: CacheFactory = field(kw_only=True)
    ids: list[int] = field(default_factory=list)
    pending: list[int] = field(default_factory=list)
    at: int = 0
    saved: dict[int, Copy] = field(default_factory=dict)

    def save(self) -> None:
        """Copies the live states. Nothing is copied where nothing was read."""
        if self.at > 0:
            self.saved[self.at] = [_copied(layer) for layer in _layers(self.cache)]

    def read(self, tokens: Sequence[int]) -> None:
        self.at += len(tokens)

    def restore(self) -> list[int]:
        """Brings the live cache to a committed length; returns the committed tokens that it has not read."""
        if not 0 <= self.at <= self.length or (self.at < self.length and max(self.saved, default=0) > self.at):
            self._return_to(max((at for at in self.saved if at <= self.length), default=0))
        return self.ids[self.at : self.length]

    def settle(self) -> None:
        """After a commit or roll back: goes to the committed length if it can, and forgets what is not needed."""
        if self.at != self.length:
            if self.length in self.saved:
                self._return_to(self.length)
            elif self.at > self.length:
                self.at = -1
        useful = max((at for at in self.saved if at <= self.length), default=0)
        self.saved = {at: copy for at, copy in self.saved.items() if at == useful}

    def _return_to(self, length: int) -> None:
        self.at = length
        if length == 0:
            self.cache = self.make()
            return
        cut(self.cache, length)
        for layer, copy in zip(_layers(self.cache), self.saved[length], strict=True):
            for name, value in _cloned(copy).items():
                setattr(layer, name, value)


class StateCache(HfCache):
    """The slot cache of :class:`foredraft.models.hf_recurrent.RecurrentTarget`."""

    bytes_per_state = 0
    """Of one copy of all running states; measured on the first pass."""

    def entry(self, slot: int) -> StateSlot:
        found = self._get(slot)
        assert isinstance(found, StateSlot)
        return found

    @staticmethod
    def holds_anything(store: Any) -> bool:
        """Whether a cache has read a token."""
        return bool(nbytes(store)) or any(any(layer.has_previous_state.values()) for layer in _layers(store))

    @property
    def bytes_in_use(self) -> int:
        return sum(self._bytes(self.entry(slot)) for slot in self._slots)

    def _bytes(self, entry: StateSlot) -> int:
        copies = [_copied_view(layer) for layer in _layers(entry.cache)]
        states = sum(_size(copy) for saved in (copies, *entry.saved.values()) for copy in saved)
        return states + self.bytes_per_token * (entry.length + len(entry.depths))

    def _bytes_for(self, rows: int) -> int:
        return rows * self.bytes_per_token + self.bytes_per_state  # the copy that is made before the pass

    def _new_slot(self) -> Slot:
        return StateSlot(self._make(), make=self._make)

    def commit(self, slot: int, keep: int | Sequence[int]) -> None:
        """Keeps the first ``keep`` pending rows (of a chain there are no others to name) and drops the rest."""
        entry = self.entry(slot)
        rows = kept_rows(keep, entry.depths)
        entry.ids += entry.pending[: len(rows)]
        self._settle(entry, len(entry.ids))

    def rollback(self, slot: int, length: int) -> None:
        """Cuts the slot back to ``length`` committed tokens; what no copy covers is read again before the next pass."""
        entry = self.entry(slot)
        check_cut(length, entry.length)
        del entry.ids[length:]
        self._settle(entry, length)

    def set_pending(self, slot: int, depths: Sequence[int]) -> None:
        entry = self.entry(slot)
        entry.depths = depths
        if not self.bytes_per_state:
            self.bytes_per_token = nbytes(entry.cache) // max(entry.at, 1)
            self.bytes_per_state = sum(map(_size, map(_copied_view, _layers(entry.cache))))

    def undo(self, slot: int) -> None:
        """Drops a pass that failed half-way: some layers may have read what others have not."""
        entry = self.entry(slot)
        entry.at = -1
        self._settle(entry, entry.length)

    def _settle(self, entry: StateSlot, length: int) -> None:
        entry.length, entry.depths, entry.pending = length, (), []
        entry.settle()


def _layers(cache: Any) -> list[Any]:
    return [layer for layer in cache.layers if isinstance(layer, LinearAttentionLayer)]


def _copied_view(layer: Any) -> dict[str, Any]:
    """Everything that reading tokens changes in a layer's running states."""
    names = "conv_states", "recurrent_states", "has_previous_state"
    flags = "is_conv_states_initialized", "is_recurrent_states_initialized"
    return {name: getattr(layer, name) for name in (*names, *flags)}


def _copied(layer: Any) -> dict[str, Any]:
    return _cloned(_copied_view(layer))


def _cloned(copy: dict[str, Any]) -> dict[str, Any]:
    def clone(value: Any) -> Any:
        return value.clone() if isinstance(value, Tensor) else value

    return {name: {i: clone(value) for i, value in entries.items()} for name, entries in copy.items()}


def _size(copy: dict[str, Any]) -> int:
    return sum(value.nbytes for entries in copy.values() for value in entries.values() if isinstance(value, Tensor))
