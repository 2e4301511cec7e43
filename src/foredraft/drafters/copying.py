"""What drafters that copy from text have in common: a match, what it is worth, and learning that from every step.

The longer the match, the likelier it goes on; how much so differs from text to text. Each request learns it for
itself, also from steps that drafted nothing: what would have been copied is compared with what was written.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate

from foredraft.drafters.base import Drafter, DraftRequest
from foredraft.drafters.outlook import Outlook, StepPrice
from foredraft.types import NO_DRAFT, Draft, Verdict

MATCH_FROM = (1, 2, 3, 4, 6, 9, 17)  # classes of match lengths, by their shortest
PRIOR = (0.25, 0.5, 0.55, 0.65, 0.8, 0.9, 0.97)  # acceptance of a copied token by class, before anything was seen
PRIOR_WEIGHT = 4.0
LEVEL_WEIGHT = 6.0
DECAY = 0.97
CEILING = 0.99


@dataclass(frozen=True, slots=True)
class Copy:
    """Tokens that could be copied.

    Attributes:
        match: Length of the context that was found again.
        shares: For each token, which share of its context's occurrences it followed; empty where unknown.
        parents: As in :class:`~foredraft.types.Draft`; None for a chain.
    """

    tokens: tuple[int, ...]
    match: int
    shares: tuple[float, ...] = ()
    parents: tuple[int, ...] | None = None

    def nodes(self) -> Iterator[tuple[int, float]]:
        """The parent and the share of every token."""
        parents = range(-1, len(self.tokens) - 1) if self.parents is None else self.parents
        return zip(parents, self.shares or (1.0,) * len(self.tokens), strict=True)


class Calibration:
    """Acceptance rates of copied tokens by match length, learnt within one request.

    The rate of a class starts from a prior scaled by how the request does as a whole, so that a text in which short
    matches fail is soon expected to disappoint with longer ones, too.
    """

    def __init__(self) -> None:
        self._accepted = [0.0] * len(PRIOR)
        self._seen = [0.0] * len(PRIOR)  # shares of the tokens that were tried
        self._total = (LEVEL_WEIGHT, LEVEL_WEIGHT)  # accepted, and expected by the prior

    def rate(self, match: int, share: float = 1.0) -> float:
        """Probability that a token is accepted which follows a match of ``match >= 1`` tokens."""
        i = bisect_right(MATCH_FROM, match) - 1
        prior = min(PRIOR[i] * self._total[0] / self._total[1], 1.0)
        rate = (PRIOR_WEIGHT * prior + self._accepted[i]) / (PRIOR_WEIGHT + self._seen[i])
        return min(rate * share, CEILING)

    def reach(self, copy: Copy) -> tuple[float, ...]:
        """Probability of each token that it is accepted with all before it: every accepted token lengthens the match.

        Made not to increase along a tree's nodes, which are ordered by shares alone.
        """
        reach: list[float] = []
        depths: list[int] = []
        for parent, share in copy.nodes():
            depths.append(depths[parent] + 1 if parent >= 0 else 0)
            here = self.rate(copy.match + depths[-1], share)
            reach.append(here * reach[parent] if parent >= 0 else here)
        return tuple(accumulate(reach, min))

    def learn(self, copy: Copy, written: Sequence[int]) -> None:
        """Compares what would have been copied with what was written."""
        depth_of = {-1: 0}  # of the nodes that were right
        for j, (parent, share) in enumerate(copy.nodes()):
            depth = depth_of.get(parent)
            if depth is None or depth >= len(written):
                continue
            hit = copy.tokens[j] == written[depth]
            if hit:
                depth_of[j] = depth + 1
            self._count(bisect_right(MATCH_FROM, copy.match + depth) - 1, share, hit)

    def _count(self, i: int, share: float, hit: bool) -> None:
        self._accepted[i] = DECAY * self._accepted[i] + hit
        self._seen[i] = DECAY * self._seen[i] + share
        accepted, expected = self._total
        self._total = (
            LEVEL_WEIGHT + DECAY * (accepted - LEVEL_WEIGHT) + hit,
            LEVEL_WEIGHT + DECAY * (expected - LEVEL_WEIGHT) + PRIOR[i] * share,
        )


@dataclass(slots=True)
class Copying:
    """One request of a :class:`CopyDrafter`.

    Attributes:
        find: ``find(ids, limit)``: at most ``limit`` tokens to copy after ``ids``.
        copy: What was found after the first ``base`` ids.
    """

    find: Callable[[Sequence[int], int], Copy | None]
    calibration: Calibration = field(default_factory=Calibration)
    copy: Copy | None = None
    base: int = 0
    limit: int = 0

    def at(self, ids: Sequence[int], limit: int) -> Copy | None:
        """What can be copied now; searched once a step."""
        if self.base != len(ids) or self.limit < limit:
            self.copy, self.base, self.limit = self.find(ids, limit), len(ids), limit
        return self.copy


class CopyDrafter(Drafter):
    """A drafter that finds text to copy; subclasses say how a request's text is searched."""

    def __init__(self) -> None:
        self._copying: dict[str, Copying] = {}

    def finder(self, request: DraftRequest) -> Callable[[Sequence[int], int], Copy | None]:
        """Makes the function that searches for one request: see :attr:`Copying.find`."""
        raise NotImplementedError

    def start(self, request: DraftRequest) -> None:
        self._copying[request.id] = Copying(self.finder(request))

    def outlook(self, request: DraftRequest, limit: int, price: StepPrice) -> Outlook:
        state = self._copying[request.id]
        copy = state.at(request.ids, limit)
        return Outlook(() if copy is None else state.calibration.reach(copy)[:limit], seconds=0.0)

    def propose(self, request: DraftRequest, k: int) -> Draft:
        copy = self._copying[request.id].at(request.ids, k)
        if copy is None:
            return NO_DRAFT
        return Draft(copy.tokens[:k], None, copy.parents and copy.parents[:k])

    def observe(self, request: DraftRequest, verdict: Verdict | None, taps: object) -> None:
        state = self._copying.get(request.id)
        if state is not None and state.copy is not None and 0 < state.base < len(request.ids):
            state.calibration.learn(state.copy, request.ids[state.base :])
            state.copy, state.base = None, 0

    def stop(self, request: DraftRequest) -> None:
        self._copying.pop(request.id, None)
