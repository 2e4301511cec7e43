"""Slots of finished requests, kept so that a later prompt with the same beginning need not be read again."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass

from foredraft.errors import CacheFullError
from foredraft.models.base import SlotCache


@dataclass(slots=True)
class _Kept:
    slot: int
    ids: list[int]
    tenant: str


def common_prefix(a: Sequence[int], b: Sequence[int]) -> int:
    """How many leading ids two sequences share."""
    n = min(len(a), len(b))
    for i in range(n):
        if a[i] != b[i]:
            return i
    return n


class PrefixPool:
    """Hands out slots of one cache, reusing the longest shared prefix of the same tenant.

    A kept slot belongs to its tenant until it is evicted: another tenant's prompt never meets it, so neither
    its text nor the time that reuse saves can leak.

    Args:
        cache: The cache whose slots are handed out.
        keep: Most idle slots to hold, least recently used out first; 0 holds none.
    """

    def __init__(self, cache: SlotCache, keep: int) -> None:
        self.cache = cache
        self.keep = keep
        self._kept: list[_Kept] = []  # oldest first

    def take(self, ids: Sequence[int], tenant: str) -> tuple[int, int]:
        """A slot for a request that begins with ``ids``, and how many of them it already holds.

        At least one id is always left to read, since its pass gives the first logits.

        Raises:
            CacheFullError: No slot is free and none is idle.
        """
        best, shared = None, 0
        for kept in self._kept:
            n = min(common_prefix(kept.ids, ids), len(ids) - 1) if kept.tenant == tenant else 0
            if n > shared:
                best, shared = kept, n
        if best is not None:
            self._kept.remove(best)
            self.cache.rollback(best.slot, shared)
            return best.slot, shared
        while True:
            try:
                return self.cache.allocate(), 0
            except CacheFullError:
                if not self.evict():
                    raise

    def copy(self, source: int, source_ids: Sequence[int], ids: Sequence[int], tenant: str) -> tuple[int, int]:
        """:meth:`take`, where ``source``, a slot in use by the same tenant, may hold more of ``ids`` than idle ones.

        Only for caches that can copy a slot; others, and where there is no room, are as without ``source``.
        """
        held = min(common_prefix(source_ids[: self.cache.length(source)], ids), len(ids) - 1)
        best = max((common_prefix(kept.ids, ids) for kept in self._kept if kept.tenant == tenant), default=0)
        # Only a method of the cache's own class: one that keeps more than its parent must copy that, too.
        duplicate = vars(type(self.cache)).get("copy")
        if duplicate is not None and held > best:
            with contextlib.suppress(CacheFullError):
                return duplicate(self.cache, source, held), held
        return self.take(ids, tenant)

    def give(self, slot: int, ids: Sequence[int], tenant: str) -> None:
        """Takes a slot back; ``ids`` are the tokens of the request, of which the slot holds a prefix."""
        length = self.cache.length(slot)
        if not self.keep or not length:
            self.cache.free(slot)
            return
        self._kept.append(_Kept(slot, list(ids[:length]), tenant))
        if len(self._kept) > self.keep:
            self.evict()

    def evict(self) -> bool:
        """Frees the idle slot that was used longest ago; False if there is none."""
        if not self._kept:
            return False
        self.cache.free(self._kept.pop(0).slot)
        return True

    def clear(self) -> None:
        """Frees every idle slot."""
        while self.evict():
            pass

    @property
    def idle(self) -> int:
        """Idle slots held."""
        return len(self._kept)
