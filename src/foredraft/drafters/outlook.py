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
        drafted: ``drafted[j]`` is the probability that token ``j+1`` is drafted at all where so many are asked for, by
            a drafter that may end drafts early; empty where all are drafted. ``reach[j] <= drafted[j]``.
    """

    reach: tuple[float, ...]
    seconds: float | None = None
    setup: float = 0.0
    watched: bool = True
    drafted: tuple[float, ...] = ()

    def share(self, token: int) -> float:
        """Probability that the ``token``-th token asked for, from 1 on, is drafted."""
        return self.drafted[token - 1] if self.drafted else 1.0

    def rows(self, tokens: int) -> float:
        """How many are drafted where ``tokens`` are asked for."""
        return sum(self.drafted[:tokens]) if self.drafted else float(tokens)

    def drafting(self, tokens: float, setup: float, each: float) -> float:
        """Seconds of drafting ``tokens``, more than 0; ``setup`` and ``each`` are what the engine has measured."""
        if self.seconds is None:
            return self.setup + setup + tokens * each
        return self.setup + tokens * self.seconds


@dataclass(frozen=True, slots=True)
class StepPrice:
    """What the step to come is expected to write and to take.

    Attributes:
        tokens: Tokens that it writes if this request drafts nothing.
        seconds: ``seconds(n)`` of its pass with ``n`` drafted tokens of this request; a fraction is a mean.
        line: Seconds of what comes before the first drafted token, and of one token, as the engine has measured them;
            worked out only for those who ask.
        elastic: Whether the length of the draft is free; if not, all tokens that are asked for are wanted.
    """

    tokens: float
    seconds: Callable[[float], float]
    line: Callable[[], tuple[float, float]] = lambda: (0.0, 0.0)
    elastic: bool = True

    def rigid(self) -> StepPrice:
        """The same where all tokens that are asked for are wanted."""
        return StepPrice(self.tokens, self.seconds, self.line, False)

    def drafting(self, outlook: Outlook, tokens: float) -> float:
        """Seconds of drafting ``tokens``, more than 0."""
        return outlook.drafting(tokens, *(self.line() if outlook.seconds is None else (0.0, 0.0)))

    def best(self, outlook: Outlook) -> tuple[float, int]:
        """The highest speed that a draft promises over none, and its length; ``(1.0, 0)`` where none is faster."""
        plain = self.tokens / self.seconds(0)
        expected, rows, gain, length = self.tokens, 0.0, 1.0, 0
        for n, reach in enumerate(outlook.reach, 1):
            expected, rows = expected + reach, rows + outlook.share(n)
            speed = expected / (self.seconds(rows) + self.drafting(outlook, rows))
            if speed > gain * plain:
                gain, length = speed / plain, n
        return gain, length

    def least(self, outlook: Outlook, far: int) -> float:
        """Chance of being written that one more token of a draft must have to be worth the time that it takes.

        Time is worth the tokens that are written in it: at the speed of the whole draft, or of none if that is faster.

        Args:
            far: A token costs what the first ``far`` do on average.
        """
        n, rows = len(outlook.reach), outlook.rows(len(outlook.reach))
        if not n:
            return 0.0
        plain, far = self.seconds(0), min(n, far)
        each = (self.seconds(far) - plain) / far + self.drafting(outlook, 2) - self.drafting(outlook, 1)
        whole = (self.tokens + sum(outlook.reach)) / (self.seconds(rows) + self.drafting(outlook, rows))
        return each * max(self.tokens / plain, whole)


FREE = StepPrice(1.0, lambda n: 1.0)
"""A step whose drafted rows cost nothing: for comparisons where nothing was measured yet."""
