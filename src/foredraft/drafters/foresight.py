"""Drafts that end where the drafter is no longer sure of them: how far they go, how far they are right, what ends them.

How likely a drafter thinks its own tokens tells much about whether they will be accepted, token by token, where a rate
only tells how a text does as a whole (SpecDec++, Huang 2024, arXiv 2405.19715; EAGLE-2, Li 2024, arXiv 2406.16858).
What a drafter's probabilities are worth is learnt in each request: some are too sure of themselves, others not enough.
A drawn token that ends a draft is proposed like those before it: the law holds for drafts whose end is decided by what
they hold (:mod:`foredraft.engine.controller`).
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field

from foredraft.drafters.outlook import Outlook, StepPrice
from foredraft.drafters.rate import Rate

TRUST = (0.09, 0.2, 0.33, 0.43, 0.54, 0.64, 0.74, 0.81, 0.88, 0.97)
"""Acceptance of a token to which the drafter gives a probability below 0.1, below 0.2, …, before anything was seen:
what the head that comes with foredraft had in 2,200 drafts of eight kinds of text.
"""
FAR = 4  # a further row costs what those up to here cost on average: single prices are noisy, and rise in stairs


def grade(chance: float) -> int:
    """The class in :data:`TRUST` of a probability."""
    return min(int(chance * len(TRUST)), len(TRUST) - 1)


@dataclass(slots=True)
class Foresight:
    """One request of a drafter that ends drafts early.

    Attributes:
        least: A draft ends with the token that makes the chance of all its tokens to be accepted less than this.
        trust: Chance of a token by the :func:`grade` of its probability, where all before it are accepted.
    """

    least: float = 0.0
    trust: array[float] = field(default_factory=lambda: array("d", TRUST))
    _grades: list[Rate] = field(default_factory=lambda: [Rate(rate) for rate in TRUST])
    _first: Rate = field(default_factory=lambda: Rate(0.7))  # a first token is accepted
    _next: Rate = field(default_factory=lambda: Rate(0.75))  # a further one is, if all before it are
    _on: Rate = field(default_factory=lambda: Rate(0.6))  # behind a drafted token another one is drafted
    _on_right: Rate = field(default_factory=lambda: Rate(0.7))  # the same behind one that is accepted
    _made: tuple[int, Sequence[float]] | None = None  # the draft that is being verified

    def outlook(self, limit: int, price: StepPrice) -> Outlook | None:
        """What to expect of a draft of up to ``limit`` tokens; sets :attr:`least`. None where lengths are fixed."""
        self.least = 0.0
        if not price.elastic:
            return None
        first, right = self._first.value, self._next.value
        on, further = self._on.value, min(self._on_right.value * right, self._on.value)
        drafted = tuple(on**j for j in range(limit))
        found = Outlook(tuple(first * further**j for j in range(limit)), drafted=drafted, watched=False)
        self.least = price.least(found, FAR) / right
        return found

    def made(self, asked: int, chances: Sequence[float]) -> None:
        """Notes a draft that is going to be verified: how many tokens were asked for, and the probability that the
        drafter gave each one that it drafted.
        """
        self._made = (asked, chances) if chances else None

    def verified(self, accepted: int) -> None:
        """Takes in what became of it; nothing if none was made."""
        if self._made is None:
            return
        (asked, chances), self._made = self._made, None
        drafted = len(chances)
        cut = drafted == asked  # nobody knows whether it would have gone on
        tested = min(accepted, drafted - 1)  # further tokens before which all was right
        self._first.see(accepted > 0, 1)
        self._next.see(max(accepted - 1, 0), tested)
        self._on.see(drafted - 1, drafted - cut)
        self._on_right.see(tested, accepted - (cut and accepted == drafted))
        for j, chance in enumerate(chances[: accepted + 1]):
            rate = self._grades[grade(chance)]
            rate.see(j < accepted, 1)
            self.trust[grade(chance)] = rate.value
