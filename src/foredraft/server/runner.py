"""The engine's thread: it alone steps the engine; requests come in by a queue, pieces go out to the event loop.

Nothing here waits for a reader, and the event loop never waits for a step.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import queue
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from foredraft.engine.engine import Engine
from foredraft.engine.loop import StepTimes
from foredraft.engine.request import Request
from foredraft.errors import ForedraftError
from foredraft.server.pieces import Piece
from foredraft.types import StepRecord

log = logging.getLogger("foredraft.server")


@dataclass(frozen=True, slots=True)
class Labels:
    """How a request is counted.

    Attributes:
        drafter: Name of its drafter; ``none`` where it asked for plain decoding.
        tenant_class: Class of its key.
        category: What its sender calls this kind of request; empty where it does not say.
    """

    drafter: str
    tenant_class: str = "default"
    category: str = ""


@dataclass(frozen=True, slots=True)
class Wait:
    """How long a reader waited for a delivery.

    Attributes:
        first: Since the request arrived; else since the delivery before.
        seconds: By the engine's clock.
    """

    first: bool
    seconds: float


class Observer(Protocol):
    """Who is told what the engine did, in the engine's thread."""

    def step(self, times: StepTimes, engine: Engine) -> None: ...

    def advanced(
        self, labels: Labels, request: Request, tokens: int, steps: Sequence[StepRecord], wait: Wait
    ) -> None: ...

    def finished(self, labels: Labels, request: Request) -> None: ...

    def event(self, kind: str, message: str, request_id: str = "") -> None: ...


@dataclass(slots=True)
class Followed:
    """A request that was handed over, and how much of it went out."""

    request: Request
    labels: Labels
    sink: Callable[[Piece], None]
    text: int = 0
    tokens: int = 0
    steps: int = 0
    delivered_at: float | None = None


class Runner:
    """Owns the engine's thread.

    Args:
        engine: Nobody else may step it from now on.
        observers: Told about every step and request.
    """

    def __init__(self, engine: Engine, observers: Sequence[Observer]) -> None:
        self.engine = engine
        self.observers = observers
        self._followed: dict[int, Followed] = {}
        self._held: list[Request] = []  # until what they come after has read the prompt that they share
        self._inbox: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._stopping = False
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread = threading.Thread(target=self._run, name="foredraft-engine", daemon=True)

    @property
    def alive(self) -> bool:
        return self._thread.is_alive()

    # --- called in the event loop's thread

    def start(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._thread.start()

    def submit(self, followed: Sequence[Followed]) -> None:
        """Hands requests over; their sinks are called in the event loop's thread, the last time with a result."""
        self._inbox.put(lambda: self._add(followed))

    def cancel(self, requests: Sequence[Request]) -> None:
        """Ends requests; their slots are free before the next step."""
        self._inbox.put(lambda: self._cancel(requests))

    async def call(self, function: Callable[[], None]) -> None:
        """Runs something in the engine's thread between two steps."""
        loop, done = asyncio.get_running_loop(), asyncio.Event()

        def run() -> None:
            try:
                function()
            finally:
                loop.call_soon_threadsafe(done.set)

        self._inbox.put(run)
        await done.wait()

    async def stop(self) -> None:
        """Cancels what still runs and ends the thread."""
        self._inbox.put(self._stop)
        await asyncio.to_thread(self._thread.join)

    # --- in the engine's thread

    def _run(self) -> None:
        while not (self._stopping and not self.engine.scheduler.busy and not self._held):
            self._take_commands()
            self._let_in()
            if self.engine.scheduler.busy:
                self._step()
            self._deliver()

    def _take_commands(self) -> None:
        """Runs the commands that are there; waits for one where there is nothing else to do."""
        with contextlib.suppress(queue.Empty):
            while True:
                idle = not self.engine.scheduler.busy and not self._stopping and not self._followed
                command = self._inbox.get(block=idle)
                try:
                    command()
                except Exception:
                    log.exception("a command to the engine failed")

    def _step(self) -> None:
        try:
            times = self.engine.step()
        except Exception as error:  # a bug; whoever comes next must not suffer from it
            log.exception("a step of the engine failed")
            problem = f"a step failed with {type(error).__name__}"
            self.engine.scheduler.fail_all(ForedraftError(problem))
            self._tell(lambda observer: observer.event("engine_error", problem))
            return
        if times is not None:
            self._tell(lambda observer: observer.step(times, self.engine))

    def _add(self, followed: Sequence[Followed]) -> None:
        for one in followed:
            self._followed[id(one.request)] = one
            if one.request.after is None:
                self.engine.add(one.request)
            else:
                self._held.append(one.request)

    def _let_in(self) -> None:
        """Queues what need not wait any longer for another request to read its prompt."""
        held, self._held = self._held, []
        for request in held:
            first = request.after
            if first is None or first.started or first.finished:
                self.engine.add(request)
            else:
                self._held.append(request)

    def _cancel(self, requests: Sequence[Request]) -> None:
        for request in requests:
            if request.finished_at is None:
                self.engine.cancel(request)
        self.engine.scheduler.reap()

    def _stop(self) -> None:
        self._stopping = True
        self._cancel([one.request for one in self._followed.values()])

    def _deliver(self) -> None:
        """Sends what is new, all of it with one call into the event loop."""
        batch: list[tuple[Callable[[Piece], None], Piece]] = []
        for key, one in list(self._followed.items()):
            request = one.request
            if not request.events and request.finished_at is None:
                continue
            piece = self._piece(one)
            if piece.result is not None:
                del self._followed[key]
                self._tell(lambda observer, one=one: observer.finished(one.labels, one.request))  # type: ignore[misc]
            batch.append((one.sink, piece))
        if batch and self._loop is not None:
            with contextlib.suppress(RuntimeError):  # the event loop is gone
                self._loop.call_soon_threadsafe(_hand_out, batch)

    def _piece(self, one: Followed) -> Piece:
        request = one.request
        tokens, request.events = request.events, []
        piece = Piece(request.stream.text[one.text :], tokens, request.logprobs[one.tokens :])
        steps = request.stats.trace[one.steps :]
        one.text, one.tokens, one.steps = (
            len(request.stream.text),
            one.tokens + len(tokens),
            len(request.stats.trace),
        )
        if tokens or steps:
            now, before = self.engine.clock(), one.delivered_at
            wait = Wait(before is None, now - (request.submitted_at if before is None else before))
            one.delivered_at = now
            self._tell(lambda observer: observer.advanced(one.labels, request, len(tokens), steps, wait))
        if request.finished_at is not None:
            piece.result = request.result(0.0)
        return piece

    def _tell(self, what: Callable[[Observer], None]) -> None:
        for observer in self.observers:
            try:
                what(observer)
            except Exception:
                log.exception("an observer failed")


def _hand_out(batch: Sequence[tuple[Callable[[Piece], None], Piece]]) -> None:
    for sink, piece in batch:
        sink(piece)
