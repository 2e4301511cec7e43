"""One drafter among several: what it costs, how it did in a request, and its share of the target's states."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from torch import Tensor

from foredraft.drafters.base import Drafter, DraftRequest
from foredraft.drafters.outlook import Outlook, StepPrice
from foredraft.drafters.rate import Rate
from foredraft.drafters.timing import DraftTimes, median
from foredraft.types import Draft

PRIOR_RATE = 0.7
PRIOR_WEIGHT = 2.0  # plain steps
MEMORY = 0.99  # of speeds, a drafted step
HOPE = 0.5
RECENT = 9
ENOUGH = 3


@dataclass(slots=True)
class Record:
    """Acceptance of one drafter in one request.

    Attributes:
        acceptance: Of drafted tokens behind accepted ones.
        ended: Length of the text after its latest step; what was written since it has yet to read.
        tokens: What its steps wrote, in tokens of plain steps, and
        seconds: what they took, in seconds of plain steps.
    """

    acceptance: Rate = field(default_factory=lambda: Rate(PRIOR_RATE))
    ended: int = 0
    tokens: float = 0.0
    seconds: float = 0.0

    def promise(self, expected: Callable[[], float]) -> float:
        """Speed over plain decoding that its next step may well have; ``expected()`` before it has drafted."""
        if not self.seconds:
            self.tokens, self.seconds = PRIOR_WEIGHT * expected(), PRIOR_WEIGHT
        return self.tokens / self.seconds * (1 + HOPE / math.sqrt(self.seconds))

    def fade(self) -> None:
        """Believes its speed a little less."""
        self.tokens *= MEMORY
        self.seconds *= MEMORY

    def update(self, drafted: int, accepted: int) -> None:
        if drafted:
            self.acceptance.see(accepted, accepted + (accepted < drafted))


class Costs:
    """Seconds of a drafter, and of reading a token that others wrote, from the latest measurements."""

    def __init__(self) -> None:
        self._drafts = DraftTimes()
        self._first: deque[float] = deque(maxlen=RECENT)  # a token of drafts that had to read first: a bound
        self._read: deque[float] = deque(maxlen=RECENT)

    def observe(self, depth: int, backlog: int, seconds: float) -> None:
        """Takes in one draft of ``depth`` tokens before which ``backlog`` had to be read."""
        if backlog <= 0:
            self._drafts.observe(depth, seconds)
            return
        self._first.append(seconds / depth)
        if self._drafts:  # else nobody knows which part of it was reading
            self._read.append(max(seconds - self.setup - depth * self.draft, 0.0) / backlog)

    @property
    def draft(self) -> float:
        """Of one token; 0.0 before anything is known, so that it is tried."""
        if self._drafts:
            return self._drafts.each
        return min(self._first) if len(self._first) >= ENOUGH else 0.0

    @property
    def setup(self) -> float:
        """Before the first token."""
        return self._drafts.setup

    @property
    def read(self) -> float:
        return median(self._read)

    def price(self, record: Record, length: int, price: StepPrice) -> StepPrice:
        """The step's price with this drafter's own costs, behind a text of ``length``."""
        backlog = length - record.ended if record.ended else 0
        return StepPrice(
            price.tokens, price.seconds, lambda: (self.setup + self.read * backlog, self.draft), price.elastic
        )


@dataclass(slots=True)
class Part:
    """One of several drafters of an engine.

    Attributes:
        costs: Of its drafts, whoever they are for.
        columns: Its taps among all that are wanted; None for all of them as they are.
        clock: Monotonic seconds.
    """

    drafter: Drafter
    costs: Costs = field(default_factory=Costs)
    columns: list[int] | None = None
    clock: Callable[[], float] = time.perf_counter

    def find_taps(self, taps: Sequence[int]) -> None:
        """Notes where its own taps are among ``taps``."""
        columns = [taps.index(tap) for tap in self.drafter.taps]
        self.columns = None if columns == list(range(len(taps))) else columns

    def taken(self, taps: Tensor | None) -> Tensor | None:
        """Its own taps of all, for :meth:`~foredraft.drafters.base.Drafter.observe`."""
        if taps is None or not self.drafter.taps:
            return None
        return taps if self.columns is None else taps[:, self.columns]

    def outlook(self, request: DraftRequest, record: Record, limit: int, price: StepPrice) -> Outlook:
        """The drafter's own outlook at its own price; of one that has none, what its record lets expect."""
        mine = self.costs.price(record, len(request.ids), price)
        own = self.drafter.outlook(request, limit, mine)
        if own is None:
            rate = record.acceptance.value
            own = Outlook(tuple(rate**j for j in range(1, limit + 1)), watched=False)
        if own.seconds is not None:
            return own
        setup, each = mine.line()
        return replace(own, seconds=each, setup=own.setup + setup)

    def propose(self, requests: Sequence[DraftRequest], records: Sequence[Record], ks: Sequence[int]) -> list[Draft]:
        """Lets it draft, and measures what that takes."""
        backlog = sum(len(request.ids) - record.ended for request, record in zip(requests, records, strict=True))
        started = self.clock()
        drafts = self.drafter.propose_batch(requests, ks)
        if depth := max((draft.k for draft in drafts), default=0):
            self.costs.observe(depth, backlog, self.clock() - started)
        for request, record in zip(requests, records, strict=True):
            record.ended = len(request.ids)
        return drafts


def all_taps(parts: Sequence[Part]) -> tuple[int, ...]:
    """The taps that any of them wants; each learns where its own are."""
    taps = tuple(sorted({tap for part in parts for tap in part.drafter.taps}))
    for part in parts:
        part.find_taps(taps)
    return taps
