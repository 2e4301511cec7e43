"""Keys and values of many requests, each in a slot of its own that grows within a byte budget."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from foredraft.errors import CacheFullError, ConfigError
from foredraft.models.cache_checks import check_cut, kept_rows

_SMALLEST = 64
"""Tokens in the first buffer of a slot, at least."""


@dataclass(slots=True)
class _Slot:
    data: Tensor
    length: int = 0
    depths: Sequence[int] = field(default=())  # of the pending rows: depth i belongs to position length + i


class KVCache:
    """The slot cache of a decoder (see :class:`foredraft.models.base.SlotCache`).

    Each slot is one tensor ``[layers, 2, kv_heads, capacity, head_dim]`` (keys, then values), so attention reads a
    view of it without copying. The first buffer is a quarter larger than the prompt, so that a short answer does not
    move it; capacity doubles when needed, or grows only as far as the budget allows.

    Layers with a sliding window keep the keys and values of the whole text and mask them. That costs memory, and buys
    that a roll back is right at any length: nothing that it could need was ever overwritten.

    Args:
        layers: Number of layers.
        kv_heads: Key and value heads of one layer.
        head_dim: Width of one head.
        dtype: Of the stored numbers.
        device: Where they lie.
        budget: Most bytes of all slots together.
    """

    def __init__(
        self, layers: int, kv_heads: int, head_dim: int, dtype: torch.dtype, device: torch.device, budget: int
    ) -> None:
        if budget <= 0:
            raise ConfigError(f"must be positive (got {budget})", field="cache_bytes")
        self._layers, self._kv_heads, self._head_dim = layers, kv_heads, head_dim
        self._dtype, self._device = dtype, device
        self.budget = budget
        self.bytes_per_token = 2 * layers * kv_heads * head_dim * dtype.itemsize
        self._slots: dict[int, _Slot] = {}
        self._next = 0

    @property
    def slots_in_use(self) -> int:
        return len(self._slots)

    @property
    def bytes_in_use(self) -> int:
        return sum(slot.data.shape[3] for slot in self._slots.values()) * self.bytes_per_token

    def allocate(self) -> int:
        """Takes an empty slot. Raises CacheFullError if the budget has no room for a single token."""
        if self.bytes_in_use + self.bytes_per_token > self.budget:
            raise self._full(1)
        slot = self._next
        self._next += 1
        self._slots[slot] = _Slot(self._empty(0))
        return slot

    def copy(self, slot: int, length: int) -> int:
        """Takes another slot that holds the first ``length`` committed tokens of this one.

        Raises:
            CacheFullError: The budget has no room for them. Nothing has changed.
        """
        entry = self._get(slot)
        check_cut(length, entry.length)
        if self.bytes_in_use + length * self.bytes_per_token > self.budget:
            raise self._full(length)
        other = self.allocate()
        try:
            self.reserve({other: length})
        except CacheFullError:
            self.free(other)
            raise
        made = self._slots[other]
        made.data[:, :, :, :length] = entry.data[:, :, :, :length]
        made.length = length
        return other

    def free(self, slot: int) -> None:
        self._get(slot)
        del self._slots[slot]

    def length(self, slot: int) -> int:
        return self._get(slot).length

    def pending(self, slot: int) -> int:
        """Rows that the last pass added and nobody committed yet."""
        return len(self._get(slot).depths)

    def commit(self, slot: int, keep: int | Sequence[int]) -> None:
        """Keeps the first ``keep`` pending rows, or the named ones in that order, and drops the rest.

        Raises:
            ValueError: More rows than are pending, or rows that are no path: the i-th must have depth i.
        """
        entry = self._get(slot)
        rows = kept_rows(keep, entry.depths)
        if any(row != i for i, row in enumerate(rows)):
            index = torch.tensor(rows, device=self._device) + entry.length
            entry.data[:, :, :, entry.length : entry.length + len(rows)] = entry.data[:, :, :, index]
        entry.length += len(rows)
        entry.depths = ()

    def rollback(self, slot: int, length: int) -> None:
        """Cuts the slot back to ``length`` committed tokens and drops pending rows."""
        entry = self._get(slot)
        check_cut(length, entry.length)
        entry.length = length
        entry.depths = ()

    def reserve(self, rows: Mapping[int, int]) -> None:
        """Makes room for ``rows[slot]`` more rows in every slot, or changes nothing and raises CacheFullError."""
        wanted: dict[int, int] = {}
        for slot, extra in rows.items():
            entry = self._get(slot)
            if entry.depths:
                raise ValueError(f"slot {slot} has uncommitted rows; commit or roll back before the next pass")
            if entry.length + extra > entry.data.shape[3]:
                wanted[slot] = entry.length + extra
        if not wanted:
            return
        capacity = sum(slot.data.shape[3] for slot in self._slots.values())
        need = capacity + sum(size - self._slots[slot].data.shape[3] for slot, size in wanted.items())
        spare = self.budget // self.bytes_per_token - need
        if spare < 0:
            raise self._full(sum(rows.values()))
        grown: dict[int, Tensor] = {}
        try:
            for slot, size in wanted.items():
                ample = max(2 * self._slots[slot].data.shape[3], _SMALLEST, size + size // 4)
                extra = min(ample - size, spare // len(wanted))
                grown[slot] = self._empty(size + extra)
        except RuntimeError:  # the machine has less memory than the budget says
            raise self._full(sum(rows.values())) from None
        for slot, data in grown.items():
            entry = self._slots[slot]
            data[:, :, :, : entry.length] = entry.data[:, :, :, : entry.length]
            entry.data = data

    def rows(self, slot: int) -> Tensor:
        """The slot's buffer ``[layers, 2, kv_heads, capacity, head_dim]``; a pass writes after the committed rows."""
        return self._get(slot).data

    def set_pending(self, slot: int, depths: Sequence[int]) -> None:
        """Declares the rows after the committed ones pending; ``depths[i]`` is row i's distance from them."""
        self._get(slot).depths = depths

    def _get(self, slot: int) -> _Slot:
        try:
            return self._slots[slot]
        except KeyError:
            raise ValueError(f"slot {slot} is not allocated") from None

    def _empty(self, capacity: int) -> Tensor:
        with torch.inference_mode(False):
            shape = (self._layers, 2, self._kv_heads, capacity, self._head_dim)
            return torch.empty(shape, dtype=self._dtype, device=self._device)

    def _full(self, rows: int) -> CacheFullError:
        return CacheFullError(
            f"no room for {rows} more tokens: {self.bytes_in_use:,} of {self.budget:,} bytes are in use",
            field="cache_bytes",
            remedy="raise cache_bytes, shorten the prompts or run fewer requests at once",
        )
