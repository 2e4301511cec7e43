"""Between HTTP and the engine: who may start how much, and one object for each HTTP request that decodes."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from foredraft.engine.engine import Engine
from foredraft.engine.guard import GuardEvent
from foredraft.engine.request import Request
from foredraft.server.config import ServerConfig
from foredraft.server.errors import ApiError
from foredraft.server.keys import Client, KeyRing
from foredraft.server.limits import Quota
from foredraft.server.pieces import Channel, Piece
from foredraft.server.runner import Followed, Labels, Observer, Runner

T = TypeVar("T")

PREPARING_THREADS = 2


class Job:
    """The answers of one HTTP request while they are decoded.

    Attributes:
        requests: One an answer, in order.
    """

    def __init__(self, service: Service, requests: Sequence[Request], buffer: int | None) -> None:
        self.requests = requests
        self._service = service
        self._open = set(range(len(requests)))
        limit = buffer if buffer is not None else sum(request.budget for request in requests)
        self._channel = Channel(limit, self.cancel)

    def sink(self, choice: int) -> Callable[[Piece], None]:
        return lambda piece: self._channel.put(choice, piece)

    def cancel(self) -> None:
        """Ends what still runs."""
        self._service.runner.cancel([self.requests[choice] for choice in self._open])

    async def pieces(self) -> AsyncIterator[tuple[int, Piece]]:
        """Pieces with the number of their answer, until every answer has its result.

        Raises:
            ApiError: The reader was too slow.
        """
        while self._open:
            choice, piece = await self._channel.get()
            if self._channel.overflowed:
                message = "the reader was too slow: more tokens wait than the server's stream_buffer holds"
                raise ApiError(408, message, code="slow_reader")
            if piece.result is not None:
                self._open.discard(choice)
            yield choice, piece


class Service:
    """One engine behind a door.

    Args:
        engine: Its thread belongs to the service from :meth:`start` on.
        config: The operator's limits.
        keys: Who may come in.
        name: The model's name in the API.
        observers: Told what the engine does.
    """

    def __init__(
        self, engine: Engine, config: ServerConfig, keys: KeyRing, name: str, observers: Sequence[Observer]
    ) -> None:
        self.engine, self.config, self.keys, self.name = engine, config, keys, name
        self.observers = observers
        self.runner = Runner(engine, observers)
        self.draining = False
        self.started_at = time.time()
        self.in_flight = 0
        self._quotas: dict[str, Quota] = {}
        self._seconds_each = 1.0  # a running mean of how long a request holds a slot
        engine.guard.listeners.append(self._guarded)
        self._workers = ThreadPoolExecutor(PREPARING_THREADS, "foredraft-prepare")

    def start(self) -> None:
        self.runner.start()

    async def stop(self) -> None:
        await self.runner.stop()
        self._workers.shutdown(wait=False, cancel_futures=True)

    @property
    def capacity(self) -> int:
        """Most requests that may be in here, waiting or running."""
        return self.engine.config.max_batch + self.config.max_queue

    def event(self, kind: str, message: str, request_id: str = "") -> None:
        """Tells the observers that something happened."""
        for observer in self.observers:
            observer.event(kind, message, request_id)

    def _guarded(self, event: GuardEvent) -> None:
        self.event(f"guard_{event.scope}_{event.kind}", event.message, event.request_id)

    async def aside(self, function: Callable[[], T]) -> T:
        """Runs work that takes time (templates, tokenizing) where it does not hold up other streams."""
        return await asyncio.get_running_loop().run_in_executor(self._workers, function)

    @contextlib.asynccontextmanager
    async def job(
        self,
        client: Client,
        answers: int,
        prepare: Callable[[], Sequence[tuple[Request, Labels]]],
        *,
        streamed: bool,
    ) -> AsyncIterator[Job]:
        """Admits one HTTP request; whatever ends the block ends its decoding and frees its slots.

        Args:
            client: Whose it is.
            answers: How many answers it asks for.
            prepare: Makes the requests, one an answer; runs aside.
            streamed: Whether a reader takes the pieces as they come.

        Raises:
            ApiError: 429 or 503 where there is no room; whatever ``prepare`` raises.
        """
        quota = self._quotas.setdefault(client.name, Quota(client))
        self._check_room(answers)
        quota.enter(answers)
        self.in_flight += answers
        job, taken, prompts = None, 0, 0
        try:
            prepared = await self.aside(prepare)
            requests = [request for request, _ in prepared]
            prompts = sum(request.prompt_length for request in requests if request.after is None)
            cost = prompts + sum(request.budget for request in requests)
            quota.take(cost)
            taken = cost
            job = Job(self, requests, self.config.stream_buffer if streamed else None)
            self.runner.submit([Followed(request, labels, job.sink(n)) for n, (request, labels) in enumerate(prepared)])
            yield job
        finally:
            self.in_flight -= answers
            quota.leave(answers)
            if job is not None:
                job.cancel()
                quota.give_back(taken - prompts - sum(request.written for request in job.requests))
                self._learn(job.requests)

    def _check_room(self, answers: int) -> None:
        if self.draining:
            raise ApiError(503, "the server is shutting down", code="draining", retry_after=5)
        if answers > self.capacity:
            raise ApiError(400, f"{answers} answers are more than the {self.capacity} that the server has room for")
        waiting = self.in_flight + answers - self.engine.config.max_batch
        if waiting > self.config.max_queue:
            wait = min(max(self._seconds_each * waiting / self.engine.config.max_batch, 1.0), 60.0)
            self.event("queue_full", f"{self.in_flight} requests in flight")
            message = f"the queue is full: {self.in_flight} requests are in flight"
            raise ApiError(429, message, code="queue_full", retry_after=wait)

    def _learn(self, requests: Sequence[Request]) -> None:
        """How long requests hold a slot, for Retry-After."""
        for request in requests:
            if request.admitted_at is not None:
                held = self.engine.clock() - request.admitted_at
                self._seconds_each += 0.1 * (held - self._seconds_each)
