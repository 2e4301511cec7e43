"""Who is decoded now: admission into slots as they come free, prefix reuse, preemption when memory runs out."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable

from foredraft.drafters.base import Drafter
from foredraft.engine.loop import Loop, StepTimes
from foredraft.engine.request import Request
from foredraft.engine.scoring import unscored
from foredraft.engine.stats import SpecStats
from foredraft.engine.waiting import WaitingQueue
from foredraft.errors import CacheFullError, ForedraftError, RequestTimeoutError
from foredraft.models.prefix import PrefixPool
from foredraft.types import FinishReason

log = logging.getLogger("foredraft")


class Scheduler:
    """Admits requests continuously and runs steps over those admitted.

    Args:
        loop: Runs the steps.
        max_batch: Most requests decoded together.
        keep: Most idle slots kept for prefix reuse.
        clock: Monotonic seconds.
        stats: Where the acceptance of finished requests is pooled.
    """

    def __init__(self, loop: Loop, max_batch: int, keep: int, clock: Callable[[], float], stats: SpecStats) -> None:
        self.loop = loop
        self.max_batch = max_batch
        self.clock = clock
        self.stats = stats
        self.pool = PrefixPool(loop.target.cache, keep)
        self.waiting = WaitingQueue()
        self.active: list[Request] = []
        self._unqueue = False  # somebody in the queue need not wait any longer
        self._full = False  # memory ran out: nobody is admitted before somebody leaves
        self._alarm = math.inf  # when the first of all deadlines passes

    @property
    def drafter(self) -> Drafter | None:
        return self.loop.drafter

    @property
    def busy(self) -> bool:
        return bool(self.waiting or self.active)

    def add(self, request: Request) -> None:
        if request.remaining <= 0 and not unscored(request):
            request.finish_reason = "length"
            self._unqueue = True
        self._alarm = min([self._alarm, *_limits(request)])
        self.waiting.append(request)

    def cancel(self, request: Request) -> None:
        """Ends a request at the next :meth:`step` or :meth:`reap`."""
        request.cancelled = self._unqueue = True

    def step(self) -> StepTimes | None:
        """Admits, runs one step, retires. None if there was nothing to run."""
        self.reap()
        self._admit()
        if not self.active:
            return None
        while True:
            try:
                times = self.loop.step(self.active)
                break
            except CacheFullError as error:
                self._retire()  # who failed in the same pass
                if not self.active or not self._make_room(error):
                    return None
        now = self.clock()
        for request in self.active:
            if request.first_token_at is None and request.written:
                request.first_token_at = now
        self._retire()
        return times

    def reap(self) -> None:
        """Retires what was cancelled since the last step, and what is out of time."""
        if self.clock() >= self._alarm:
            self._expire()
        self._retire()

    def fail_all(self, error: ForedraftError) -> None:
        """Ends every request, waiting or not, with ``error``."""
        for request in (*self.waiting, *self.active):
            if not request.finished:
                request.finish_reason, request.error = "error", error
        self._unqueue = True
        self._retire()

    def _expire(self) -> None:
        """Fails what is out of time; sets the alarm for the next."""
        now = self.clock()
        for request in self.waiting:
            if request.admit_by is not None and request.admitted_at is None and now >= request.admit_by:
                _time_out(request, "queue_timeout", "no slot came free in the time that it may wait")
                self._unqueue = True
        for request in (*self.waiting, *self.active):
            if request.deadline is not None and now >= request.deadline:
                _time_out(request, "timeout", "it did not finish in the time that it has")
                self._unqueue = True
        alive = (request for request in (*self.waiting, *self.active) if not request.finished)
        self._alarm = min((limit for request in alive for limit in _limits(request)), default=math.inf)

    def _admit(self) -> None:
        while self.waiting and len(self.active) < self.max_batch and not (self._full and self.active):
            request = self.waiting.first(self.active)
            try:
                request.slot, cached = self._take(request)
            except CacheFullError as error:
                if not self.active:  # nothing will ever come free
                    self.waiting.remove([request])
                    self._end(request, "error", error)
                    continue
                return
            self.waiting.serve(request)
            if request.admitted_at is None:
                request.admitted_at = self.clock()
                request.cached_tokens = cached
            self.active.append(request)
            if self.drafter is not None and request.drafting:
                self._start_drafter(self.drafter, request)

    def _take(self, request: Request) -> tuple[int, int]:
        """A slot, and how many of the request's tokens it holds already."""
        if unscored(request):
            return self.pool.take([], request.tenant)
        first = request.after
        if first is not None and first.slot is not None and self.pool.keep and first.tenant == request.tenant:
            return self.pool.copy(first.slot, first.ids, request.ids, request.tenant)
        return self.pool.take(request.ids, request.tenant)

    def _start_drafter(self, drafter: Drafter, request: Request) -> None:
        request.asked_at = None
        try:
            drafter.start(request)
        except Exception as error:
            request.drafting = False
            log.warning("request %s goes on without its drafter: %s", request.id, error)

    def _make_room(self, error: CacheFullError) -> bool:
        """Gives up an idle slot, else sends the youngest request back to the queue; False if none can go."""
        if self.pool.evict():
            return True
        if len(self.active) > 1:
            youngest = self.active.pop()
            self._release(youngest, keep=False)
            youngest.started, self._full = False, True
            self.waiting.put_back(youngest)
            return True
        self._end(self.active.pop(), "error", error)
        return False

    def _retire(self) -> None:
        self.active, ended = _split(self.active)
        if self._unqueue:  # the queue may be long, so it is searched only when there is something to find
            self._unqueue = False
            _, unqueued = _split(self.waiting)
            self.waiting.remove(unqueued)
            ended += unqueued
        for request in ended:
            self._end(request)

    def _end(self, request: Request, reason: FinishReason | None = None, error: CacheFullError | None = None) -> None:
        if reason is not None:
            request.finish_reason, request.error = reason, error
        self._release(request, keep=request.finish_reason != "error")
        self._full = False
        try:
            request.stream.finish()
        except Exception as failure:  # a tokenizer that cannot decode what was written
            if request.error is None:
                self.loop.fail(request, failure)
        request.finished_at = self.clock()
        self.stats.merge(request.stats)

    def _release(self, request: Request, keep: bool) -> None:
        """Gives back the slot and whatever the drafter holds."""
        if request.slot is None:
            return
        if self.drafter is not None and request.drafting:
            try:
                self.drafter.stop(request)
            except Exception:
                log.exception("the drafter failed to stop request %s", request.id)
        if keep:
            self.pool.give(request.slot, request.ids, request.tenant)
        else:
            self.loop.target.cache.free(request.slot)
        request.slot = None


def _limits(request: Request) -> list[float]:
    """The times that it must not pass."""
    queue = request.admit_by if request.admitted_at is None else None
    return [limit for limit in (queue, request.deadline) if limit is not None]


def _time_out(request: Request, field: str, problem: str) -> None:
    if not request.finished:
        request.finish_reason = "error"
        request.error = RequestTimeoutError(problem, field=field, remedy="ask for less, or try again later")


def _split(requests: Iterable[Request]) -> tuple[list[Request], list[Request]]:
    """Those that go on, and those that are finished or cancelled."""
    on: list[Request] = []
    ended: list[Request] = []
    for request in requests:
        if request.cancelled and not request.finished:
            request.finish_reason = "cancelled"
        (ended if request.finished else on).append(request)
    return on, ended
