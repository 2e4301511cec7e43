"""Live figures for people and the live page: what runs, how fast, and how often drafts are accepted."""

from __future__ import annotations

import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from foredraft.engine.engine import Engine
from foredraft.engine.loop import StepTimes
from foredraft.engine.request import Request
from foredraft.engine.stats import SpecStats
from foredraft.server.ceiling import Ceiling
from foredraft.server.history import History, Key, pooled
from foredraft.server.levels import Levels
from foredraft.server.runner import Labels, Wait
from foredraft.types import StepRecord

WINDOW = 30
"""Seconds of "recent"."""
RATE_WINDOW = 5
EVENTS = 100
LATENCIES = 1024
CATEGORIES = 16
"""Most categories that are told apart; later ones count as ``other``."""


@dataclass
class _Second:
    """What happened in one second."""

    at: int
    tokens: int = 0
    counts: dict[Key, Counter[StepRecord]] = field(default_factory=dict)


class LiveStats:
    """Figures since the start and of the last seconds; an :class:`~foredraft.server.runner.Observer`.

    It knows no tenant and no text, so that one client's traffic does not show more of itself than its speed.

    Args:
        engine: Whose queue, cache and costs are shown.
        clock: Monotonic seconds.
    """

    def __init__(self, engine: Engine, clock: Callable[[], float] = time.monotonic) -> None:
        self.engine = engine
        self.levels = Levels(engine)
        self.history = History(clock)
        self.ceiling: Ceiling | None = None
        self._clock = clock
        self._lock = threading.Lock()
        self._started = clock()
        self._seconds: deque[_Second] = deque(maxlen=WINDOW + 1)
        self._total: dict[Key, Counter[StepRecord]] = {}
        self._categories: set[str] = set()
        self._tokens = 0
        self._finished: Counter[str] = Counter()
        self._ttft: deque[float] = deque(maxlen=LATENCIES)
        self._itl: deque[float] = deque(maxlen=LATENCIES)
        self._events: deque[dict[str, Any]] = deque(maxlen=EVENTS)
        self._warned = False

    # --- what is told

    def step(self, times: StepTimes, engine: Engine) -> None:
        if engine.watch.message and not self._warned:
            self._warned = True
            self.event("speculation_does_not_pay", engine.watch.message)

    def advanced(self, labels: Labels, request: Request, tokens: int, steps: Sequence[StepRecord], wait: Wait) -> None:
        with self._lock:
            key = (labels.drafter, self._category(labels.category))
            second = self._second()
            second.tokens += tokens
            self._tokens += tokens
            self.history.add(key, tokens, steps)
            for counts in (self._total, second.counts):
                counts.setdefault(key, Counter()).update(steps)
            (self._ttft if wait.first else self._itl).append(wait.seconds)

    def finished(self, labels: Labels, request: Request) -> None:
        with self._lock:
            self._finished[request.finish_reason or "error"] += 1
        if request.error is not None:
            self.event("request_failed", type(request.error).__name__, request.id)

    def event(self, kind: str, message: str, request_id: str = "") -> None:
        """Notes something that an operator should see; ``message`` must hold no client's text."""
        with self._lock:
            self._events.append({"time": time.time(), "kind": kind, "message": message, "request_id": request_id})

    # --- what is shown

    def snapshot(self) -> dict[str, Any]:
        """Everything as plain data for JSON."""
        watch, costs = self.engine.watch, self.engine.controller
        with self._lock:
            now = int(self._clock())
            recent: dict[Key, Counter[StepRecord]] = {}
            for second in self._seconds:
                if second.at > now - WINDOW:
                    for key, counts in second.counts.items():
                        recent.setdefault(key, Counter()).update(counts)
            rate = sum(second.tokens for second in self._seconds if now - RATE_WINDOW <= second.at < now)
            shapes = dict(costs.passes.shape)
            return {
                "time": time.time(),
                "uptime_s": self._clock() - self._started,
                "requests": {
                    "running": self.levels.running,
                    "waiting": self.levels.waiting,
                    "max_batch": self.engine.config.max_batch,
                    "finished": dict(self._finished),
                },
                "tokens": {"total": self._tokens, "per_second": rate / RATE_WINDOW},
                "drafters": _by(self._total, 0),
                "all_drafters": _all(self._total),
                "recent": {
                    "seconds": WINDOW,
                    "drafters": _by(recent, 0),
                    "all_drafters": _all(recent),
                    "categories": _by(recent, 1),
                },
                "categories": _by(self._total, 1),
                "speculation": {"pays": watch.pays, "speedup": watch.speedup, "warning": watch.message},
                "costs": {
                    "pass_s_by_rows": {str(rows): costs.passes.level * shapes[rows] for rows in sorted(shapes)},
                    "draft_s_per_token": costs.drafts.per_token,
                },
                "ceiling": self.ceiling.figures(costs.passes) if self.ceiling is not None else None,
                "latency": {"first_token_s": _quantiles(self._ttft), "inter_token_s": _quantiles(self._itl)},
                "cache": {
                    "slots_in_use": self.levels.slots,
                    "slots_idle": self.levels.idle,
                    "bytes_in_use": self.levels.bytes,
                },
                "events": list(self._events),
            }

    def _second(self) -> _Second:
        now = int(self._clock())
        if not self._seconds or self._seconds[-1].at != now:
            self._seconds.append(_Second(now))
        return self._seconds[-1]

    def _category(self, category: str) -> str:
        if category and category not in self._categories:
            if len(self._categories) >= CATEGORIES:
                return "other"
            self._categories.add(category)
        return category


def _by(counts: dict[Key, Counter[StepRecord]], part: int) -> dict[str, Any]:
    """Pooled figures by drafter (part 0) or category (part 1)."""
    return {name: _figures(stats) for name, stats in pooled(counts, part).items()}


def _all(counts: dict[Key, Counter[StepRecord]]) -> dict[str, Any]:
    """Figures of all drafters together; what was decoded plainly because it was asked for is no drafter's."""
    stats = SpecStats()
    for name, drafted in pooled(counts, 0).items():
        if name != "none":
            stats.merge(drafted)
    return _figures(stats)


def _figures(stats: SpecStats) -> dict[str, Any]:
    chosen: Counter[int] = Counter()
    for step, n in stats.counts.items():
        chosen[step.drafted] += n
    return stats.to_dict() | {"k_chosen": {str(k): chosen[k] for k in sorted(chosen)}}


def _quantiles(values: Sequence[float]) -> dict[str, float | None]:
    ordered = sorted(values)
    at = {"p50": 0.5, "p90": 0.9, "p99": 0.99}
    return {name: ordered[int(q * (len(ordered) - 1))] if ordered else None for name, q in at.items()}
