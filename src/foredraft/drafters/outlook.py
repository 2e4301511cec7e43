"""What a drafter expects of the draft it would make now, and what a step costs: from both follows how long to draft."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Outlook:
    """What to expect of a draft, before it is asked for.

    It may depend on the committed text and on the past, never on a random number of the step to come.

    Attributes:
        reach: ``reach[j]`` is the probability that the first ``j+1`` drafted tokens are all accepted. Its length is
            the most that can be drafted; empty says that there is nothing to propose.
        seconds: Time to draft one token; None as the engine has measured it, with what it takes to begin.
        setup: Seconds before the first of them.
        watched: The drafter learns from plain steps too, so the engine need not try a draft now and then.
    """

    reach: tuple[float, ...]
    seconds: float | None = None
    setup: float = 0.0
    watched: bool = True

    def drafting(self, tokens: int, setup: float, each: float) -> float:
        """Seconds of drafting ``tokens >= 1``; ``setup`` and ``each`` are what the engine has measured."""
        if self.seconds is None:
            return self.setup + setup + tokens * each
        return self.setup + tokens * self.seconds


@dataclass(frozen=True, slots=True)
class StepPrice:
    """What the step to come is expected to write and to take.

    Attributes:
        tokens: Tokens that it writes if this request drafts nothing.
        seconds: ``seconds(n)`` of its pass with ``n`` drafted tokens of this request.
        draft_seconds: Of drafting one token, as the engine has measured it, and
        draft_setup: of what comes before the first.
    """

    tokens: float
    seconds: Callable[[int], float]
    draft_seconds: float = 0.0
    draft_setup: float = 0.0

    def drafting(self, outlook: Outlook, tokens: int) -> float:
        """Seconds of drafting ``tokens >= 1``."""
        return outlook.drafting(tokens, self.draft_setup, self.draft_seconds)

    def best(self, outlook: Outlook) -> tuple[float, int]:
        """The highest speed that a draft promises over none, and its length; ``(1.0, 0)`` where none is faster."""
        plain = self.tokens / self.seconds(0)
        expected, gain, length = self.tokens, 1.0, 0
        for n, reach in enumerate(outlook.reach, 1):
            expected += reach
            speed = expected / (self.seconds(n) + self.drafting(outlook, n))
            if speed > gain * plain:
                gain, length = speed / plain, n
        return gain, length


FREE = StepPrice(1.0, lambda n: 1.0)
"""A step whose drafted rows cost nothing: for comparisons where nothing was measured yet."""
