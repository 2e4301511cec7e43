"""Requests that wait for a slot: the urgent first, then tenants in turn, then in order of arrival."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Iterator

from foredraft.engine.request import Request


class WaitingQueue:
    """A queue a priority and tenant, so that one tenant's backlog does not stand before another's only request.

    Choosing costs time in the number of such queues, not of requests.
    """

    def __init__(self) -> None:
        self._queues: dict[tuple[int, str], deque[Request]] = {}

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
        requests in ``active``; among equals, the one whose wait began first.
        """
        served = Counter(request.tenant for request in active)
        key = min(self._queues, key=lambda key: (key[0], served[key[1]], self._queues[key][0].submitted_at))
        return self._queues[key][0]

    def remove(self, ended: Iterable[Request]) -> None:
        """Takes requests out, wherever they stand."""
        for request in ended:
            key = (request.priority, request.tenant)
            self._queues[key].remove(request)
            if not self._queues[key]:
                del self._queues[key]
