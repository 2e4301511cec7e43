"""Slots made of transformers' own caches, one cache a slot, kept whole so that they can be cut back to any length."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from foredraft.errors import CacheFullError, ConfigError, UnsupportedModelError
from foredraft.models.cache_checks import check_cut, kept_rows

CacheFactory = Callable[[], Any]
"""Makes an empty transformers cache."""


def cache_factory(config: Any) -> CacheFactory:
    """How to make a cache for a model that can be cut back to any length without a trace.

    The cache that transformers would build is examined layer by layer. Full attention stays as it is. A sliding window
    is replaced by a layer that keeps every key and value: the model's mask hides what lies outside the window, so
    logits are the same, and nothing is overwritten that a roll back would need. Anything else is a running state
    (recurrent, convolutional, compressed, quantised) from which tokens cannot be taken out again.

    Raises:
        UnsupportedModelError: A layer keeps such a state.
    """
    for index, layer in enumerate(DynamicCache(config=config).layers):
        if kind(layer) is None:
            raise UnsupportedModelError(
                f"layer {index} keeps its past in a {type(layer).__name__}, a running state that cannot be cut back "
                "to an earlier token as a rejected draft requires",
                field="model",
                remedy="run it with RecurrentTarget (foredraft.models.hf_recurrent), which replays running states",
            )

    return lambda: whole_cache(config)


def whole_cache(config: Any) -> Any:
    """An empty cache whose windowed layers keep the whole text; the others as the model makes them."""
    cache = DynamicCache(config=config)
    cache.layers = [DynamicLayer() if kind(layer) == "window" else layer for layer in cache.layers]
    return cache


def kind(layer: Any) -> str | None:
    # Exact types: a subclass adds state of its own that cutting keys and values would leave behind.
    if type(layer) is DynamicLayer or type(layer).__name__ == "DummyLayer":
        return "full"
    return "window" if type(layer) is DynamicSlidingWindowLayer else None


def windows(config: Any) -> list[int]:
    """The lengths of the model's sliding, chunked or local windows, in tokens; empty if every layer sees everything."""
    layers = DynamicCache(config=config).layers
    found = [layer.sliding_window for layer in layers if type(layer) is DynamicSlidingWindowLayer]
    if "local" in getattr(config, "attention_layers", ()):  # GPT-Neo masks without telling its cache
        found.append(config.window_size)
    return found


@dataclass(slots=True)
class Slot:
    cache: Any
    length: int = 0
    depths: Sequence[int] = field(default=())


class HfCache:
    """The slot cache of :class:`foredraft.models.hf.HfTarget` (see :class:`foredraft.models.base.SlotCache`).

    Args:
        make: Makes the transformers cache of one slot.
        budget: Most bytes of all slots together.
    """

    def __init__(self, make: CacheFactory, budget: int) -> None:
        if budget <= 0:
            raise ConfigError(f"must be positive (got {budget})", field="cache_bytes")
        self._make = make
        self.budget = budget
        self.bytes_per_token = 0
        """Measured on the first pass: until then nothing is known about the model's heads."""
        self._slots: dict[int, Slot] = {}
        self._next = 0

    @property
    def slots_in_use(self) -> int:
        return len(self._slots)

    @property
    def bytes_in_use(self) -> int:
        return self.bytes_per_token * sum(slot.length + len(slot.depths) for slot in self._slots.values())

    def allocate(self) -> int:
        """Takes an empty slot. Raises CacheFullError if the budget has no room for a single token."""
        if self.bytes_in_use + self._bytes_for(1) > self.budget:
            raise self._full(1)
        slot, self._next = self._next, self._next + 1
        self._slots[slot] = self._new_slot()
        return slot

    def _bytes_for(self, rows: int) -> int:
        """What a slot takes for so many more rows."""
        return rows * self.bytes_per_token

    def _new_slot(self) -> Slot:
        return Slot(self._make())

    def free(self, slot: int) -> None:
        self._get(slot)
        del self._slots[slot]

    def length(self, slot: int) -> int:
        return self._get(slot).length

    def commit(self, slot: int, keep: int | Sequence[int]) -> None:
        """Keeps the first ``keep`` pending rows, or the named ones in that order, and drops the rest.

        Raises:
            ValueError: More rows than are pending, or rows that are no path: the i-th must have depth i.
        """
        entry = self._get(slot)
        rows = kept_rows(keep, entry.depths)
        if any(row != i for i, row in enumerate(rows)):
            _select(entry.cache, [*range(entry.length), *(entry.length + row for row in rows)])
        entry.length += len(rows)
        entry.depths = ()
        cut(entry.cache, entry.length)

    def rollback(self, slot: int, length: int) -> None:
        """Cuts the slot back to ``length`` committed tokens and drops pending rows."""
        entry = self._get(slot)
        check_cut(length, entry.length)
        entry.length = length
        entry.depths = ()
        cut(entry.cache, length)

    def reserve(self, rows: Mapping[int, int]) -> None:
        """Checks that ``rows[slot]`` more rows fit in every slot. Changes nothing."""
        for slot in rows:
            if self._get(slot).depths:
                raise ValueError(f"slot {slot} has uncommitted rows; commit or roll back before the next pass")
        if self.bytes_in_use + sum(map(self._bytes_for, rows.values())) > self.budget:
            raise self._full(sum(rows.values()))

    def store(self, slot: int) -> Any:
        """The transformers cache of a slot, to hand to the model."""
        return self._get(slot).cache

    def set_pending(self, slot: int, depths: Sequence[int]) -> None:
        """Declares what the model has just appended pending; ``depths[i]`` is row i's distance from the committed."""
        entry = self._get(slot)
        entry.depths = depths
        if not self.bytes_per_token:
            self.bytes_per_token = nbytes(entry.cache) // (entry.length + len(depths))

    def undo(self, slot: int) -> None:
        """Drops whatever a pass that failed half-way may have left in some layers."""
        entry = self._get(slot)
        entry.depths = ()
        cut(entry.cache, entry.length)

    def _get(self, slot: int) -> Slot:
        try:
            return self._slots[slot]
        except KeyError:
            raise ValueError(f"slot {slot} is not allocated") from None

    def _full(self, rows: int) -> CacheFullError:
        return CacheFullError(
            f"no room for {rows} more tokens: {self.bytes_in_use:,} of {self.budget:,} bytes are in use",
            field="cache_bytes",
            remedy="raise cache_bytes, shorten the prompts or run fewer requests at once",
        )


def stored(cache: Any) -> list[Any]:
    """The layers that hold anything."""
    return [layer for layer in cache.layers if getattr(layer, "keys", None) is not None and layer.keys.numel()]


def cut(cache: Any, length: int) -> None:
    for layer in stored(cache):
        if layer.keys.shape[-2] > length:
            layer.keys, layer.values = layer.keys[..., :length, :], layer.values[..., :length, :]


def _select(cache: Any, rows: list[int]) -> None:
    for layer in stored(cache):
        index = torch.tensor(rows, device=layer.keys.device)
        layer.keys, layer.values = layer.keys.index_select(-2, index), layer.values.index_select(-2, index)


def nbytes(cache: Any) -> int:
    return int(sum(layer.keys.nbytes + layer.values.nbytes for layer in stored(cache)))
