"""How full the engine is, read from outside its thread."""

from __future__ import annotations

from collections.abc import Callable

from foredraft.engine.engine import Engine


class Levels:
    """Running and waiting requests, slots and bytes of one engine."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    @property
    def running(self) -> int:
        return len(self._engine.scheduler.active)

    @property
    def waiting(self) -> int:
        return _steady(lambda: len(self._engine.scheduler.waiting))

    @property
    def slots(self) -> int:
        """Slots in use, those included that only hold a prefix."""
        return _steady(lambda: self._engine.target.cache.slots_in_use)

    @property
    def idle(self) -> int:
        """Slots that only hold a prefix."""
        return self._engine.scheduler.pool.idle

    @property
    def bytes(self) -> int:
        return _steady(lambda: self._engine.target.cache.bytes_in_use)


def _steady(read: Callable[[], int]) -> int:
    """Reads a sum over something that the engine's thread may be changing; 0 where it never holds still."""
    for _ in range(8):
        try:
            return read()
        except RuntimeError:  # a dictionary changed its size on the way
            continue
    return 0
