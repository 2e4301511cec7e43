"""Requests that wait for a slot: the urgent first, then tenants in turn, then in order of arrival."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Iterator

from foredraft.engine.request import Request

MOST_TENANTS = 4096
"""Tenants whose last turn is remembered."""


class WaitingQueue:
    """A queue a priority and tenant, so that one tenant's backlog does not stand before another's only request.

    Choosing costs time in the number of such queues, not of requests.
    """

    def __init__(self) -> None:
        self._queues: dict[tuple[int, str], deque[Request]] = {}
        self._turns: dict[str, int] = {}  # when a tenant was last served, counted in requests
        self._served = 0

    def __len__(self) -> int:
        return sum(map(len, self._queues.values()))

    def __bool__(self) -> bool:
        return bool(self._queues)

    def __iter__(self) -> Iterator[Request]:
        for queue in self._queues.values():
            yield from queue

    def append(self, request: Request) -> None:
        self._queues.setdefault((request.priority, request.tenant), deque()).append(request)

    def put_back(self, request: Request) -> None:
        """For a request that was admitted and lost its slot: the first of its queue."""
        self._queues.setdefault((request.priority, request.tenant), deque()).appendleft(request)

    def first(self, active: Iterable[Request]) -> Request:
        """The request to admit next: of the lowest priority number; among equals, of the tenant with the fewest
        requests in ``active``; among equals, of the tenant whose last turn is longest ago; then in order of arrival.
        """
        served = Counter(request.tenant for request in active)

        def rank(key: tuple[int, str]) -> tuple[float, ...]:
            priority, tenant = key
            return priority, served[tenant], self._turns.get(tenant, 0), self._queues[key][0].submitted_at

        return self._queues[min(self._queues, key=rank)][0]

    def serve(self, request: Request) -> None:
        """Takes out a request that got its slot."""
        self.remove([request])
        self._served += 1
        if len(self._turns) > MOST_TENANTS:
            self._turns.clear()
        self._turns[request.tenant] = self._served

    def remove(self, ended: Iterable[Request]) -> None:
        """Takes requests out, wherever they stand."""
        for request in ended:
            key = (request.priority, request.tenant)
            self._queues[key].remove(request)
            if not self._queues[key]:
                del self._queues[key]
