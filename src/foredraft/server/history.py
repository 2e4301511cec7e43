"""What the last minutes looked like, for charts: a point every few seconds."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from foredraft.engine.stats import SpecStats
from foredraft.types import StepRecord

POINT = 5
"""Seconds of one point."""
POINTS = 120
"""Points that are kept: ten minutes."""

Key = tuple[str, str]


class History:
    """Tokens, α and τ of the last ten minutes, by drafter and by category.

    Args:
        clock: Monotonic seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._first = self._now()
        self._lock = threading.Lock()
        self._tokens: Counter[int] = Counter()
        self._steps: dict[int, dict[Key, Counter[StepRecord]]] = {}

    def add(self, key: Key, tokens: int, steps: Sequence[StepRecord]) -> None:
        """Takes in what one request wrote; ``key`` is its drafter and category."""
        now = self._now()
        with self._lock:
            self._tokens[now] += tokens
            if now not in self._steps:
                self._steps = {at: kept for at, kept in self._steps.items() if at > now - POINTS} | {now: {}}
                self._tokens = Counter({at: n for at, n in self._tokens.items() if at > now - POINTS})
            self._steps[now].setdefault(key, Counter()).update(steps)

    def since(self, last: int) -> list[dict[str, Any]]:
        """Finished points after the one with the number ``last``, oldest first; -1 gives all that are kept."""
        now = self._now()
        with self._lock:
            return [self._point(at) for at in range(max(last + 1, self._first, now - POINTS), now)]

    def _point(self, at: int) -> dict[str, Any]:
        steps = self._steps.get(at, {})
        return {
            "number": at,
            "seconds": POINT,
            "tokens_per_second": self._tokens[at] / POINT,
            "drafters": _acceptance(steps, 0),
            "categories": _acceptance(steps, 1),
        }

    def _now(self) -> int:
        return int(self._clock()) // POINT


def pooled(counts: Mapping[Key, Counter[StepRecord]], part: int) -> dict[str, SpecStats]:
    """Statistics by drafter (part 0) or category (part 1); requests without a category are in none."""
    found: dict[str, SpecStats] = {}
    for key, steps in counts.items():
        if key[part]:
            found.setdefault(key[part], SpecStats()).counts.update(steps)
    return found


def _acceptance(counts: Mapping[Key, Counter[StepRecord]], part: int) -> dict[str, Any]:
    """α and τ, where something was drafted."""
    return {
        name: {"alpha": stats.draft_acceptance_rate, "tau": stats.mean_acceptance_length}
        for name, stats in pooled(counts, part).items()
        if stats.num_draft_tokens
    }
