"""What a draft takes by its length, learnt from drafts that were made."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import TypeVar

KEEP = 9

T = TypeVar("T")


class DraftTimes:
    """Seconds of a draft: so much to begin with, and so much a token.

    A drafter that reads the last step's tokens first, or whose call costs something, takes longer for the first token
    of a draft than for each further one. With one price a token, a request whose drafts are short would find long ones
    too dear, and never learn better.

    The price of a token is the slope of least squares through the medians of the latest drafts of each length, but no
    more than a token's share of any of them, and the beginning is the least that is left of any: a disturbed
    measurement of one length cannot make drafts look dear for good. With a single length there is no beginning.
    """

    def __init__(self) -> None:
        self._latest: dict[int, deque[float]] = {}
        self._points: dict[int, tuple[int, float, int]] = {}  # of each length: itself, the median, how many
        self._line: tuple[float, float] | None = None

    def __bool__(self) -> bool:
        return bool(self._latest)

    def observe(self, tokens: int, seconds: float) -> None:
        """Takes in one draft of ``tokens >= 1``."""
        latest = self._latest.setdefault(tokens, deque(maxlen=KEEP))
        latest.append(seconds)
        self._points[tokens] = tokens, median(latest), len(latest)
        self._line = None

    @property
    def setup(self) -> float:
        """Seconds before the first token."""
        return self._fitted()[0]

    @property
    def each(self) -> float:
        """Seconds a token; 0.0 before anything was measured."""
        return self._fitted()[1]

    def _fitted(self) -> tuple[float, float]:
        if self._line is None:
            self._line = self._fit()
        return self._line

    def _fit(self) -> tuple[float, float]:
        points = self._points.values()
        if not points:
            return 0.0, 0.0
        if len(points) == 1:
            [(n, t, _)] = points
            return 0.0, t / n
        weight = sum(w for _, _, w in points)
        x, y = sum(n * w for n, _, w in points) / weight, sum(t * w for _, t, w in points) / weight
        spread = sum(w * (n - x) ** 2 for n, _, w in points)
        slope = sum(w * (n - x) * (t - y) for n, t, w in points) / spread
        each = min(max(slope, 0.0), min(t / n for n, t, _ in points))
        return max(min(t - n * each for n, t, _ in points), 0.0), each


class Team:
    """One thread or several, whichever has been quicker of late.

    Several share the reading of weights, and lose more than that where another program holds a core: then each of the
    many small products of a draft waits for it.

    Args:
        clock: Monotonic seconds.
    """

    LATEST = 5
    AGAIN = 32  # calls until the slower one is tried again

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self.clock = clock
        self._calls = 0
        self._latest: dict[bool, deque[float]] = {several: deque(maxlen=self.LATEST) for several in (True, False)}

    def run(self, threads: int, call: Callable[[int], T], work: Callable[[T], int]) -> T:
        """``call(1)`` or ``call(threads)``; ``work`` says how much its result was, to compare one with another."""
        if threads == 1:
            return call(1)
        self._calls += 1
        alone, together = self._latest[False], self._latest[True]
        several = len(together) <= len(alone) if len(alone) < self.LATEST else median(together) <= median(alone)
        if self._calls % self.AGAIN == 0:
            several = not several
        started = self.clock()
        result = call(threads if several else 1)
        self._latest[several].append((self.clock() - started) / work(result))
        return result


def median(values: deque[float]) -> float:
    """The lower one of two."""
    return sorted(values)[(len(values) - 1) // 2] if values else 0.0
