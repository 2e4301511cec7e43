"""Load-aware admission: of what a batch has drafted, verify only what raises the predicted throughput.

The rule is DSpark's (arXiv 2607.05147; also TETRIS): the drafted tokens of all requests are taken in the order of their
predicted probability of being reached and accepted, as long as each raises expected tokens a second; at the first that
does not, the rest is left unverified. Whereas :class:`~foredraft.engine.controller.Controller` fixes lengths before
anything is drawn, this looks at drafts that have been made. What keeps it lossless:

- Whether token j of a request is verified may depend on the committed text, on the request's drafted tokens *before* j
  and on the law q that j was drawn from, but not on which token j became, nor on anything after it. Then "this draft
  has at least j tokens" is settled before token j is drawn: the draft is one whose drafter stopped there by itself,
  and for each such draft the rules give the target's law.
- So the confidence of a token is a figure of the row of q, never q at the token. And tokens are met in order: a token
  is looked at only after those before it were admitted. A search for the best prefix of the whole sorted list looks
  at token j+1, whose confidence knows what token j became, before it decides about j. ``tests/test_load.py``
  enumerates both and shows that the latter bends the law.
- Other requests' drafts are drawn with random numbers of their own; to this request they are like the clock.
- A request that is greedy or coupled may be cut anywhere, since its text is a function of the target alone.
- One thing stands outside the argument: a step that finds no room in the cache is begun again from the same numbers,
  and how many rows it had depends here on what was drawn (see the controller's docstring). Give the cache room enough.
"""

from __future__ import annotations

import heapq
from bisect import bisect_right
from collections.abc import Callable, Sequence

from torch import Tensor

from foredraft.drafters.base import Drafter, DrafterContext, DraftRequest
from foredraft.drafters.outlook import Outlook, StepPrice
from foredraft.engine.costs import PassCosts
from foredraft.types import Draft, Verdict

CONFIDENCE_FROM = (0.0, 0.2, 0.4, 0.6, 0.8, 0.95)
"""Classes of confidence, by their lowest."""
PRIOR = (0.35, 0.5, 0.6, 0.7, 0.85, 0.95)
"""Acceptance by class, before anything was seen."""
PRIOR_WEIGHT = 6.0
LEVEL_WEIGHT = 6.0
DECAY = 0.97


def admit(reach: Sequence[Sequence[float]], base_rows: int, seconds: Callable[[int], float]) -> list[int]:
    """How many leading tokens of every draft to verify.

    Args:
        reach: For every request the predicted probability that its first 1, 2, … drafted tokens are all accepted;
            entry j may depend on the tokens before j alone. Only entries of admitted tokens and of the one behind
            them are read.
        base_rows: Rows that the pass has anyway, one for each request at least.
        seconds: What a pass of so many rows takes.
    """
    admitted = [0] * len(reach)
    heap = [(-row[0], i) for i, row in enumerate(reach) if len(row)]
    heapq.heapify(heap)
    expected, rows = float(len(reach)), base_rows
    rate = expected / seconds(rows)
    while heap:
        gain, i = heapq.heappop(heap)
        better = (expected - gain) / seconds(rows + 1)
        if better <= rate:
            break
        expected, rows, rate = expected - gain, rows + 1, better
        admitted[i] += 1
        if admitted[i] < len(reach[i]):
            heapq.heappush(heap, (-reach[i][admitted[i]], i))
    return admitted


class Trust:
    """Acceptance by confidence, learnt within one request from a common prior."""

    def __init__(self) -> None:
        self._accepted = [0.0] * len(PRIOR)
        self._seen = [0.0] * len(PRIOR)
        self._total = (LEVEL_WEIGHT, LEVEL_WEIGHT)  # accepted, and expected by the prior

    def rate(self, confidence: float) -> float:
        """Probability that a token drawn with that confidence is accepted, if all before it were."""
        i = bisect_right(CONFIDENCE_FROM, confidence) - 1
        prior = min(PRIOR[i] * self._total[0] / self._total[1], 0.99)
        return (PRIOR_WEIGHT * prior + self._accepted[i]) / (PRIOR_WEIGHT + self._seen[i])

    def reach(self, confidences: Sequence[float]) -> list[float]:
        """Probabilities that the first 1, 2, … tokens are all accepted."""
        reach, product = [], 1.0
        for confidence in confidences:
            product *= self.rate(confidence)
            reach.append(product)
        return reach

    def learn(self, confidences: Sequence[float], accepted: int) -> None:
        """Takes in a verified draft: its accepted tokens, and the one rejected where there is one."""
        for j, confidence in enumerate(confidences[: accepted + 1]):
            i, hit = bisect_right(CONFIDENCE_FROM, confidence) - 1, j < accepted
            self._accepted[i] = DECAY * self._accepted[i] + hit
            self._seen[i] = DECAY * self._seen[i] + 1
            got, wanted = self._total
            self._total = (
                LEVEL_WEIGHT + DECAY * (got - LEVEL_WEIGHT) + hit,
                LEVEL_WEIGHT + DECAY * (wanted - LEVEL_WEIGHT) + PRIOR[i],
            )


def confidences(q: Tensor) -> list[float]:
    """``[k, V]`` laws -> the largest probability of each: known before a token is drawn from it."""
    return [float(row) for row in q.amax(-1)]


class LoadAware(Drafter):
    """A drafter whose sampled chains are cut by :func:`admit` before they are verified.

    Args:
        drafter: Drafts the chains. Trees and tokens that were not drawn pass as they are.
        passes: What passes cost: those of the engine that takes this drafter.
    """

    name = "load-aware"

    def __init__(self, drafter: Drafter, passes: PassCosts | None = None) -> None:
        self.drafter = drafter
        self.passes = passes
        self.taps = drafter.taps
        self.records: list[tuple[float, bool]] = []
        self._trust: dict[str, Trust] = {}
        self._cut: dict[str, list[float]] = {}

    def attach(self, context: DrafterContext) -> None:
        self.drafter.attach(context)
        self.taps = self.drafter.taps

    def start(self, request: DraftRequest) -> None:
        self._trust[request.id] = Trust()
        self.drafter.start(request)

    def outlook(self, request: DraftRequest, limit: int, price: StepPrice) -> Outlook | None:
        return self.drafter.outlook(request, limit, price)

    def propose(self, request: DraftRequest, k: int) -> Draft:
        return self.propose_batch([request], [k])[0]

    def propose_batch(self, requests: Sequence[DraftRequest], ks: Sequence[int]) -> list[Draft]:
        drafts = self.drafter.propose_batch(requests, ks)
        known = [[] if d.q is None or d.parents is not None else confidences(d.q) for d in drafts]
        reach = [self._trust[r.id].reach(c) for r, c in zip(requests, known, strict=True)]
        lengths = [d.k for d in drafts]
        if self.passes is not None and self.passes.level:
            others = sum(d.k for d, c in zip(drafts, known, strict=True) if not c)
            admitted = admit(reach, len(requests) + others, self._seconds)
            lengths = [n if c else d.k for n, c, d in zip(admitted, known, drafts, strict=True)]
        for request, confidence, n in zip(requests, known, lengths, strict=True):
            self._cut[request.id] = confidence[:n]
        return [_first(draft, n) for draft, n in zip(drafts, lengths, strict=True)]

    def _seconds(self, rows: int) -> float:
        assert self.passes is not None
        return self.passes.estimate(rows) or 1.0

    def observe(self, request: DraftRequest, verdict: Verdict | None, taps: Tensor | None) -> None:
        cut = self._cut.pop(request.id, None)
        if cut and verdict is not None:
            self._trust[request.id].learn(cut, verdict.accepted)
            self.records += [(c, j < verdict.accepted) for j, c in enumerate(cut[: verdict.accepted + 1])]
        self.drafter.observe(request, verdict, taps)

    def stop(self, request: DraftRequest) -> None:
        self._trust.pop(request.id, None)
        self._cut.pop(request.id, None)
        self.drafter.stop(request)

    def reset(self) -> None:
        self.drafter.reset()


def _first(draft: Draft, n: int) -> Draft:
    if n >= draft.k:
        return draft
    return Draft(draft.tokens[:n], None if draft.q is None or not n else draft.q[:n])
