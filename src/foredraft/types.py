"""The nouns of the project: what a drafter proposes, what verification answers, what a step records."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

from torch import Tensor

TokenKind = Literal["plain", "accepted", "correction", "bonus"]
"""How a committed token came to be: drafted and accepted, drawn after a rejection, drawn after a fully
accepted draft, or decoded in a step that drafted nothing."""

FinishReason = Literal["stop", "length", "cancelled", "error"]

RuleName = Literal["exact", "rejection", "block", "coupled"]
"""Verification rules. ``exact`` is the greedy case: a draft is accepted while it is the target's argmax."""


@dataclass(frozen=True, slots=True)
class Draft:
    """k tokens that a drafter proposes to follow the committed text of one request.

    Attributes:
        tokens: ``k`` token ids, ``0 <= id < V``. Empty means "no proposal", which is ordinary.
        q: ``[k, V]`` float32 or float64: the post-filter law that each token was really sampled from; in a tree, that
            of node i given its path and its earlier siblings (zero at them if it was drawn without replacement).
            ``None`` means that the tokens were not sampled (argmax, lookup): q is one-hot at each token.
        parents: For a tree, ``parents[i] < i`` is the index of node i's parent, ``-1`` the last committed
            token. ``None`` means a chain.
    """

    tokens: tuple[int, ...] = ()
    q: Tensor | None = None
    parents: tuple[int, ...] | None = None

    @property
    def k(self) -> int:
        return len(self.tokens)

    @property
    def depth(self) -> int:
        """Tokens of the longest path; ``k`` for a chain."""
        if self.parents is None:
            return self.k
        depths: list[int] = []
        for parent in self.parents:
            depths.append(depths[parent] + 1 if parent >= 0 else 1)
        return max(depths, default=0)

    def path(self, row: int) -> tuple[int, ...]:
        """The drafted tokens that precede row ``row`` of the target's pass (row 0 has none)."""
        if self.parents is None:
            return self.tokens[:row]
        path: list[int] = []
        node = row - 1
        while node >= 0:
            path.append(self.tokens[node])
            node = self.parents[node]
        return tuple(reversed(path))


NO_DRAFT = Draft()


@dataclass(frozen=True, slots=True)
class Verdict:
    """What verification says about one draft.

    Attributes:
        accepted: How many drafted tokens are committed, ``0 <= accepted <= k``.
        next_token: The token committed after them: the bonus token if the whole draft (or a whole path of
            a tree) was accepted, else the correction.
        bonus: Whether ``next_token`` is the bonus token.
        path: The accepted nodes of a tree, root first; for a chain ``(0, …, accepted-1)``.
    """

    accepted: int
    next_token: int
    bonus: bool
    path: tuple[int, ...] = ()

    @classmethod
    def chain(cls, accepted: int, next_token: int, k: int) -> Verdict:
        return cls(accepted, next_token, accepted == k, tuple(range(accepted)))


class StepRecord(NamedTuple):
    """One step of one request, for statistics: a tuple, since every step counts one.

    Attributes:
        drafted: Tokens drafted; of a tree, its nodes.
        accepted: Drafted tokens committed.
        depth: Positions drafted for: length of the longest path of a tree; -1 for a chain, where it is ``drafted``.
    """

    drafted: int
    accepted: int
    depth: int = -1

    @property
    def positions(self) -> int:
        return self.drafted if self.depth < 0 else self.depth
