"""How many tokens to draft: the batch-wide Leviathan optimum under measured costs, down to none and back.

With acceptance rate α the j-th drafted token of a request is committed with probability α^j (Leviathan 2022,
arXiv 2211.17192). All candidate tokens of a batch are sorted by that probability and the prefix with the
highest predicted throughput is drafted, as in load-aware admission (DSpark, arXiv 2607.05147) but searched
whole, because step costs are not convex.

Why this cannot bend the law. A step's random numbers are keyed by its anchor (:mod:`foredraft.sampling.noise`) and
no earlier step has used them. Its draft length is fixed before its draft is made, from measured times and from
acceptances of earlier steps: whatever these may depend on, earlier tokens included, the numbers of this step are
independent of it. So given the past, k is a constant, and for every constant k the rules give the target's law.
Four details belong to the argument:

- A drafter may say what it expects of its draft (:class:`~foredraft.drafters.outlook.Outlook`), and what it copies from
  the text is part of the past. What it will draw is not, and may not enter.
- A drafter may draft fewer than k tokens, after looking at those that it drafted: every drawn token is still
  verified, and the rules hold for a draft whose end is decided by what it holds. It may not take one back.
- A token drafted only to be watched (:meth:`Controller.shadow`) is compared with the text, never used; its random
  number is for drafting at this anchor, and the plain token beside it is drawn with another.
- Where memory runs out in the middle of a step, the step is begun again, from the same numbers, and its length may then
  differ. So memory for the longest draft is found before any of it is drawn, and where a cache cannot say beforehand
  whether it has room, sampled drafts are not ended early.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from foredraft.config import SpeculationConfig
from foredraft.drafters.outlook import Outlook, StepPrice
from foredraft.engine.costs import DraftCosts, PassCosts

PRIOR_RATE = 0.7
PRIOR_WEIGHT = 2.0
DECAY = 0.93
MARGIN = 1.02  # speculation must promise this much more throughput than plain decoding
CHEAP = 0.02  # a drafter under this share of a pass a token is free to run unverified
FIRST_PROBE = 16
LAST_PROBE = 256
PROBE = 2  # tokens of a trial draft
TRIALS = 0.02  # share of the time that trial drafts may take, where their rows have a price


@dataclass(slots=True)
class Acceptance:
    """Running acceptance rate of one request, recent steps weighing more, and its probing schedule.

    Nothing here is shared between requests: another client's acceptance must not show in this one's speed.
    """

    accepted: float = PRIOR_RATE * PRIOR_WEIGHT
    rejected: float = (1 - PRIOR_RATE) * PRIOR_WEIGHT
    idle: int = 0
    again: bool = False
    probe_after: int = FIRST_PROBE

    @property
    def rate(self) -> float:
        return self.accepted / (self.accepted + self.rejected)

    def update(self, drafted: int, accepted: int) -> None:
        """Takes in one verified draft; the first rejection of a draft is the only one that was really seen."""
        if drafted:
            self.accepted = DECAY * self.accepted + accepted
            self.rejected = DECAY * self.rejected + (accepted < drafted)


UNKNOWN = Outlook(())
"""Of a drafter that says nothing."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """One request in the eyes of the controller; at most ``limit`` tokens may be drafted for it."""

    acceptance: Acceptance
    limit: int
    speculation: SpeculationConfig
    outlook: Outlook | None = None

    @property
    def reach(self) -> Sequence[float]:
        """Probabilities that the first 1, 2, … drafted tokens are all accepted."""
        if self.outlook is not None:
            return self.outlook.reach[: self.limit]
        return [self.acceptance.rate**j for j in range(1, self.limit + 1)]

    def each(self, line: tuple[float, float]) -> float:
        """Time to draft one token: as measured, ``line`` (:attr:`DraftCosts.line`), unless the drafter knows better."""
        return line[1] if self.outlook is None or self.outlook.seconds is None else self.outlook.seconds

    def share(self, token: int) -> float:
        """Probability that the ``token``-th token asked for is drafted."""
        return (self.outlook or UNKNOWN).share(token)

    def seconds(self, asked: int, line: tuple[float, float]) -> float:
        """Time of drafting if ``asked`` tokens are asked for."""
        outlook = self.outlook or UNKNOWN
        return outlook.drafting(outlook.rows(asked), *line)


class Controller:
    """Chooses draft lengths for every step.

    Args:
        prior: What passes of several rows are expected to cost, before and beside what they are measured to: see
            :class:`~foredraft.engine.costs.PassCosts`.

    Attributes:
        passes: Measured costs of a step by the rows of its pass, drafting apart.
        drafts: Measured costs of drafting.
    """

    def __init__(self, prior: Callable[[float], float] | None = None) -> None:
        self.passes = PassCosts(prior)
        self.drafts = DraftCosts()

    def choose(self, candidates: Sequence[Candidate], base_rows: int) -> list[int]:
        """Draft lengths for this step.

        Args:
            candidates: The requests that could be drafted for.
            base_rows: Rows that the pass has before any drafted token.
        """
        fixed = [_fixed(c) for c in candidates]
        free = [i for i, k in enumerate(fixed) if k is None]
        ks = [k or 0 for k in fixed]
        if free:
            chosen = self._optimum([candidates[i] for i in free], base_rows + sum(ks))
            patience = self._patience(base_rows + sum(ks), len(free))
            for i, k in zip(free, chosen, strict=True):
                ks[i] = self._or_probe(candidates[i], k, patience)
        return ks

    def _optimum(self, candidates: Sequence[Candidate], base_rows: int) -> list[int]:
        plain = self.passes.estimate(base_rows)
        if plain is None:  # the first step measures plain decoding
            return [0] * len(candidates)
        line = self.drafts.line
        prices = [c.each(line) for c in candidates]
        best, tokens = MARGIN * len(candidates) / plain, list[tuple[float, int, int]]()
        for dearest in sorted(set(prices)):  # all wait for the dearest draft, so each step may do without the dear ones
            served = [i for i, price in enumerate(prices) if price <= dearest]
            best, tokens = self._prefix(candidates, served, base_rows, line, best, tokens)
        ks = [0] * len(candidates)
        for _, minus_j, i in tokens:
            ks[i] = max(ks[i], -minus_j)
        return ks

    def _prefix(
        self,
        candidates: Sequence[Candidate],
        served: Sequence[int],
        base_rows: int,
        line: tuple[float, float],
        best: float,
        chosen: list[tuple[float, int, int]],
    ) -> tuple[float, list[tuple[float, int, int]]]:
        """The likeliest tokens of the ``served`` candidates, as many as give the highest speed, if above ``best``."""
        tokens = sorted(((gain, -j, i) for i in served for j, gain in enumerate(candidates[i].reach, 1)), reverse=True)
        expected, rows, best_n = float(len(candidates)), float(base_rows), 0
        drafting: dict[float, float] = {}  # by price: drafters of different prices draft one after the other
        # costs beyond the largest measured pass are guesses: go there by doubling, so that a wrong guess is cheap
        reach = 2 * max(self.passes.largest, base_rows) - base_rows
        for n, (gain, minus_j, i) in enumerate(tokens[:reach], 1):
            expected, rows = expected + gain, rows + candidates[i].share(-minus_j)
            price = candidates[i].each(line)
            drafting[price] = max(drafting.get(price, 0.0), candidates[i].seconds(-minus_j, line))
            cost = self.passes.estimate(rows)
            assert cost is not None
            rate = expected / (cost + sum(drafting.values()))
            if rate > best:
                best, best_n = rate, n
        return (best, tokens[:best_n]) if best_n else (best, chosen)

    def _patience(self, base_rows: int, requests: int) -> float:
        """Plain steps that every request must wait between trial drafts, so that all of them cost no more than a share.

        Requests that began together try together, and in a large batch a trial's rows are not free. One alone need not
        wait because of a price that nobody has measured.
        """
        if requests == 1 and self.passes.largest <= base_rows:
            return 0.0
        plain, tried = self.passes.estimate(base_rows), self.passes.estimate(base_rows + PROBE)
        return requests * max(tried / plain - 1, 0.0) / TRIALS if plain and tried else 0.0

    def _or_probe(self, candidate: Candidate, k: int, patience: float) -> int:
        """Lets a request that is decoded plainly try one draft now and then, ever more rarely.

        Where the price of drafting is in doubt, or old, it tries two: the first has to read all that was decoded
        plainly, only the second shows the price.
        """
        state = candidate.acceptance
        if candidate.outlook is not None and candidate.outlook.watched:
            return k
        if k or not candidate.limit:
            state.idle, state.again = 0, False
            state.probe_after = FIRST_PROBE if k > 1 else state.probe_after
            return k
        if state.again:
            state.again = False
            return min(PROBE, candidate.limit)
        state.idle += 1
        if state.idle < max(state.probe_after, min(patience, LAST_PROBE)):
            return 0
        state.again = self.drafts.unsure or state.probe_after == LAST_PROBE
        state.idle, state.probe_after = 0, min(2 * state.probe_after, LAST_PROBE)
        return min(PROBE, candidate.limit)

    def price(self, base_rows: int, requests: int) -> StepPrice:
        """What the step to come costs; where nothing was measured yet, as if drafted rows were free."""

        def seconds(n: float) -> float:
            return self.passes.estimate(base_rows + n) or 1.0

        return StepPrice(float(requests), seconds, lambda: self.drafts.line)

    def shadow(self, passes_rows: int) -> bool:
        """Whether drafting is so cheap that acceptance may be watched without verifying anything."""
        plain, per_token = self.passes.estimate(passes_rows), self.drafts.per_token
        return plain is not None and per_token is not None and per_token < CHEAP * plain


def _fixed(candidate: Candidate) -> int | None:
    k = candidate.speculation.k
    return min(k, candidate.limit) if k != "auto" else None
