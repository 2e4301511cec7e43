"""Which nodes a tree should have when only the rank of a child is known, not its token.

The chance that the target takes the i-th child of a node, its elder siblings having failed, is learnt within each
request. From it follows the value of every node of the endless tree: the chance that it is accepted. The m most
valuable nodes are the best tree of m nodes (Sequoia, arXiv 2402.12374, without its limit on depth).
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass, field
from functools import lru_cache

from foredraft.types import Draft, Verdict

PRIOR = (0.6, 0.3, 0.2, 0.15)
PRIOR_WEIGHT = 3.0
DECAY = 0.97


@dataclass(slots=True)
class RankRates:
    """Acceptance of the 1st, 2nd, … child of a node whose elder siblings failed, learnt within one request."""

    accepted: list[float] = field(default_factory=list)
    seen: list[float] = field(default_factory=list)

    def rates(self, branch: int) -> tuple[float, ...]:
        """For ranks ``0 … branch - 1``, rounded to hundredths so that shapes can be kept."""
        return tuple(round(self._rate(rank), 2) for rank in range(branch))

    def _rate(self, rank: int) -> float:
        prior = PRIOR[min(rank, len(PRIOR) - 1)]
        if rank >= len(self.seen):
            return prior
        return (PRIOR_WEIGHT * prior + self.accepted[rank]) / (PRIOR_WEIGHT + self.seen[rank])

    def learn(self, draft: Draft, verdict: Verdict) -> None:
        """Takes in what became of one tree or chain."""
        parents = range(-1, draft.k - 1) if draft.parents is None else draft.parents
        self.accepted = [DECAY * value for value in self.accepted]
        self.seen = [DECAY * value for value in self.seen]
        for parent, taken in zip((-1, *verdict.path), (*verdict.path, None), strict=True):
            siblings = [node for node, own in enumerate(parents) if own == parent]
            for rank, node in enumerate(siblings):
                if rank == len(self.seen):
                    self.seen.append(0.0)
                    self.accepted.append(0.0)
                self.seen[rank] += 1.0
                if node == taken:
                    self.accepted[rank] += 1.0
                    break


@dataclass(frozen=True, slots=True)
class Shape:
    """The most valuable nodes, best first: so the first n of them are the best tree of n nodes.

    Attributes:
        parents: As in :class:`~foredraft.types.Draft`.
        values: Chance that each is accepted, not increasing.
        depths: 1 for a child of the committed text.
    """

    parents: tuple[int, ...]
    values: tuple[float, ...]
    depths: tuple[int, ...]

    def levels(self, n: int) -> int:
        """Depth of the first ``n`` nodes."""
        return max(self.depths[:n], default=0)

    def counts(self, n: int) -> list[int]:
        """How many children each of the first ``n`` nodes has among them; the root's come first."""
        children = [0] * (n + 1)
        for parent in self.parents[:n]:
            children[parent + 1] += 1
        return children


@lru_cache(maxsize=512)
def best_shape(rates: tuple[float, ...], nodes: int, depth: int, spine: bool = False) -> Shape:
    """The best tree for these rates of the children by rank.

    Args:
        rates: As :meth:`RankRates.rates` gives them; no node has more children than there are rates.
        nodes: Most nodes.
        depth: Longest path.
        spine: Only eldest children may have children.
    """
    chances, left = [], 1.0  # of a child by its rank, given its parent
    for rate in rates:
        chances.append(left * rate)
        left *= 1.0 - rate
    parents: list[int] = []
    values: list[float] = []
    depths: list[int] = []
    # Of each node only the next younger sibling and the eldest child need to wait: nothing else can be better.
    waiting = [(-chances[0], 1, 0, -1, 1.0)]  # value, depth, rank, parent, value of the parent
    while waiting and len(parents) < nodes:
        minus_value, level, rank, parent, above = heapq.heappop(waiting)
        node = len(parents)
        parents.append(parent)
        values.append(-minus_value)
        depths.append(level)
        if rank + 1 < len(chances):
            value = min(above * chances[rank + 1], -minus_value)  # a younger sibling comes after its elder in any case
            heapq.heappush(waiting, (-value, level, rank + 1, parent, above))
        if level < depth and not (spine and rank):
            heapq.heappush(waiting, (minus_value * chances[0], level + 1, 0, node, -minus_value))
    return Shape(tuple(parents), tuple(values), tuple(depths))
