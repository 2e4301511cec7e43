"""The step: propose, one target pass, verify, commit, observe. This file is the whole of speculative decoding.

A request's unread tokens (a chunk of its prompt, or the one token that the last step wrote) and its draft
travel in one segment; row ``unread - 1 + i`` of the pass gives the law of the token after ``i`` drafted ones.
Prefill, plain decoding and verification are therefore the same thing with different numbers.
"""

from __future__ import annotations

import contextlib
import logging
import operator
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from foredraft.drafters.base import Drafter
from foredraft.drafters.outlook import StepPrice
from foredraft.engine.commit import commit
from foredraft.engine.controller import Candidate, Controller
from foredraft.engine.forced import fit_to_grammar, own_verdict
from foredraft.engine.guard import Guard
from foredraft.engine.judge import judge
from foredraft.engine.request import Request
from foredraft.engine.scoring import collect, rows_of_a_step, unscored
from foredraft.errors import CacheFullError, DrafterError, ForedraftError
from foredraft.models.base import Segment, Target
from foredraft.sampling.draw import masses
from foredraft.types import NO_DRAFT, Draft, Verdict

log = logging.getLogger("foredraft")

_Outcome = tuple[Tensor, Tensor | None, Sequence[int]]  # logits, taps and likeliest tokens of one request's rows


@dataclass(slots=True)
class Work:
    """One request's part of a step."""

    request: Request
    unread: list[int]
    complete: bool  # the unread tokens reach the end of the committed text, so the pass writes something
    scored: bool = False  # the rows of the unread tokens are wanted too
    draft: Draft = NO_DRAFT
    proposed: int = 0  # tokens that the drafter proposed
    own: int = 0  # those of them in the draft, at its beginning
    together: int = 1  # requests in the pass
    shadow: int | None = None  # a token drafted only to be compared with what is written


@dataclass(slots=True)
class StepTimes:
    """Where the time of one step went, in seconds."""

    total: float = 0.0
    target: float = 0.0
    draft: float = 0.0
    rows: int = 0
    drafted: int = 0
    pure: bool = False  # no prompt was read in this step
    settled: bool = False  # all drafts followed others: none had to read a prompt or plain steps first


class Loop:
    """Runs steps over the admitted requests.

    Args:
        target: The model that verifies.
        drafter: The drafter, or None for plain decoding.
        controller: Chooses draft lengths and learns costs.
        max_step_tokens: Most prompt tokens read in one step.
        clock: Monotonic seconds.
        guard: Takes drafting from those for whom it does not pay; None for no guard.
    """

    def __init__(
        self,
        target: Target,
        drafter: Drafter | None,
        controller: Controller,
        max_step_tokens: int,
        clock: Callable[[], float] = time.perf_counter,
        guard: Guard | None = None,
    ) -> None:
        self.target = target
        self.drafter = drafter
        self.controller = controller
        self.max_step_tokens = max_step_tokens
        self.clock = clock
        self.guard = guard

    def step(self, requests: Sequence[Request]) -> StepTimes:
        """One step of every request. A request that fails is finished with its error; the others go on.

        Raises:
            CacheFullError: The pass does not fit into the cache's budget; nothing has changed.
        """
        start = self.clock()
        times = StepTimes()
        works = self._plan(requests)
        self._propose(works, times)
        self._fit(works)
        times.rows = sum(len(work.unread) + work.draft.k for work in works)
        times.pure = all(work.complete and work.request.started for work in works)
        try:
            outcomes = self._forward(works, times)
            for work, outcome in zip(works, outcomes, strict=True):
                if outcome is not None:
                    self._settle(work, *outcome)
        except BaseException:  # no room, or an interrupt: no slot may be left with half a pass in it
            self._abandon(works)
            raise
        times.total = self.clock() - start
        self._learn(works, times)
        return times

    # --- plan

    def _plan(self, requests: Sequence[Request]) -> list[Work]:
        """Who reads how much of what is unread; the budget of prompt tokens is shared in order of arrival."""
        works = []
        room, rows = self.max_step_tokens, rows_of_a_step(self.target.vocab_size)
        for request in requests:
            assert request.slot is not None
            unread = request.ids[self.target.cache.length(request.slot) :]
            take = len(unread) if len(unread) == 1 else min(len(unread), room)
            if scored := unscored(request):
                take = min(take, rows)
                rows -= take
            if take:
                room -= take if len(unread) > 1 else 0
                works.append(Work(request, unread[:take], take == len(unread), scored))
        return works

    # --- propose

    def _propose(self, works: Sequence[Work], times: StepTimes) -> None:
        ready = [w for w in works if w.complete and w.request.started and w.request.drafting]
        if self.drafter is None or not ready:
            return
        start = self.clock()
        base_rows = sum(len(w.unread) for w in works)
        price = self.controller.price(base_rows, len(ready))
        candidates = [self._candidate(self.drafter, work, price) for work in ready]
        times.draft = self.clock() - start
        ks = self.controller.choose(candidates, base_rows)
        for work, candidate, k in zip(ready, candidates, ks, strict=True):
            work.request.plain_steps += k == 0 and candidate.limit > 0 and candidate.speculation.k == "auto"
            work.request.sampler.anchor = len(work.request.ids)
        watching = 0 in ks and self.controller.shadow(base_rows)
        asked = [
            min(1, c.limit) if k == 0 and watching and c.speculation.k == "auto" and c.outlook is None else k
            for c, k in zip(candidates, ks, strict=True)
        ]
        chosen = [(work, k, n) for work, k, n in zip(ready, ks, asked, strict=True) if n]
        if not chosen:
            return
        self._make_room(works, {id(work): n for work, _, n in chosen})
        start = self.clock()
        drafts = self._ask(self.drafter, [work for work, _, _ in chosen], [n for _, _, n in chosen])
        times.draft += self.clock() - start
        times.drafted = max((draft.k for draft in drafts), default=0) or max(asked)
        times.settled = all(work.request.asked_at == len(work.request.stats.trace) - 1 for work, _, _ in chosen)
        for (work, k, _), draft in zip(chosen, drafts, strict=True):
            work.request.asked_at = len(work.request.stats.trace)
            if k:
                work.draft = draft
            elif draft.tokens and draft.q is None:  # equality says nothing about how often a sampled draft is accepted
                work.shadow = draft.tokens[0]

    def _candidate(self, drafter: Drafter, work: Work, price: StepPrice) -> Candidate:
        """A request and what its drafter expects of a draft."""
        request, limit, outlook = work.request, self._limit(work), None
        if limit:
            try:
                outlook = drafter.outlook(request, limit, price if self._may_end(request) else price.rigid())
            except Exception as error:
                self._dismiss(work, error)
                limit = 0
        return Candidate(request.acceptance, limit, request.speculation, outlook)

    def _may_end(self, request: Request) -> bool:
        """Whether the request's drafts may end by what they hold: see :mod:`foredraft.engine.controller`."""
        return request.speculation.k == "auto" and (
            not request.sampler.sampled or hasattr(self.target.cache, "reserve")
        )

    def _make_room(self, works: Sequence[Work], asked: Mapping[int, int]) -> None:
        """Finds memory for the longest pass that there can be before any draft is drawn, so that whether there is
        enough tells nothing about sampled ones.

        Args:
            works: All of the pass; some caches only check all of them together.
            asked: ``id(work)`` -> tokens asked for.

        Raises:
            CacheFullError: There is not enough.
        """
        reserve = getattr(self.target.cache, "reserve", None)
        if reserve is None or not any(w.request.sampler.sampled for w in works if id(w) in asked):
            return
        rows = {}
        for work in works:
            forced = self._limit(work) if work.complete and work.request.law.grammar else 0
            rows[work.request.slot] = len(work.unread) + max(asked.get(id(work), 0), forced)
        reserve(rows)

    def _fit(self, works: Sequence[Work]) -> None:
        """Drafts of requests that have a grammar keep to it, and go on for nothing where it leaves no choice."""
        for work in works:
            request = work.request
            work.proposed = work.own = work.draft.k
            work.together = len(works)
            grammar = request.law.grammar
            if grammar and self.drafter is not None and work.complete and request.started and request.drafting:
                work.draft, work.own = fit_to_grammar(work.draft, grammar, self._limit(work))

    def _limit(self, work: Work) -> int:
        """Most tokens worth drafting: the last of the budget is written by the target itself."""
        request = work.request
        k = request.speculation.k
        limit = min(request.remaining - 1, request.speculation.max_k if k == "auto" else k)
        if self.target.max_context is not None:
            limit = min(limit, self.target.max_context - len(request.ids))
        limit = max(limit, 0)
        return self.guard.limit(request, limit) if self.guard is not None else limit

    def _ask(self, drafter: Drafter, works: Sequence[Work], ks: Sequence[int]) -> list[Draft]:
        """Asks for all drafts at once; if that fails, one by one, so that only the one at fault loses its drafter."""
        try:
            drafts = drafter.propose_batch([w.request for w in works], ks)
            return [self._checked(draft, k) for draft, k in zip(drafts, ks, strict=True)]
        except Exception as error:
            if len(works) == 1:
                return [self._dismiss(works[0], error)]
        finally:
            for work in works:
                work.request.law.rewind()
        return [self._ask(drafter, [work], [k])[0] for work, k in zip(works, ks, strict=True)]

    def _checked(self, draft: Draft, k: int) -> Draft:
        """Refuses what would break the law or the pass: ids that do not exist, a q of the wrong shape."""
        if draft.k > k:
            raise DrafterError(f"proposed {draft.k} tokens where {k} were asked for")
        vocab = self.target.vocab_size
        if draft.parents is not None:
            draft = replace(draft, parents=self._checked_tree(draft))
        if any(type(token) is not int for token in draft.tokens):  # numpy's integers are no JSON
            draft = replace(draft, tokens=tuple(map(operator.index, draft.tokens)))
        if draft.tokens and not (min(draft.tokens) >= 0 and max(draft.tokens) < vocab):
            raise DrafterError(f"proposed a token id outside 0…{vocab - 1}")
        if draft.q is not None and draft.tokens:
            if draft.q.shape != (draft.k, vocab):
                raise DrafterError(f"q has shape {tuple(draft.q.shape)}, not {(draft.k, vocab)}")
            sums, least, picked = masses(draft.q, draft.tokens)
            if not all(abs(mass - 1) < 1e-3 for mass in sums) or not min(least) >= 0:
                raise DrafterError("q is not a probability distribution")
            if not all(picked):
                raise DrafterError("proposed a token to which q gives no probability")
        return draft

    def _checked_tree(self, draft: Draft) -> tuple[int, ...] | None:
        """The parents of a tree; None if it is a chain after all."""
        assert draft.parents is not None
        parents = tuple(map(operator.index, draft.parents))
        if len(parents) != draft.k or any(not -1 <= parent < node for node, parent in enumerate(parents)):
            raise DrafterError("proposed a tree in which a node does not follow an earlier one", field="parents")
        if parents == tuple(range(-1, draft.k - 1)):
            return None
        if problem := getattr(self.target, "tree_problem", None):
            raise DrafterError(f"proposed a tree, which the target cannot read: {problem}", field="parents")
        return parents

    def _dismiss(self, work: Work, error: Exception) -> Draft:
        """Goes on without the drafter for one request."""
        request = work.request
        request.drafting = False
        log.warning("request %s goes on without its drafter: %s", request.id, error)
        self._stop_drafter(request)
        return NO_DRAFT

    def _stop_drafter(self, request: Request) -> None:
        if self.drafter is not None:
            try:
                self.drafter.stop(request)
            except Exception:
                log.exception("the drafter failed to stop request %s", request.id)

    # --- the target's pass

    def _forward(self, works: Sequence[Work], times: StepTimes, bare: bool = False) -> list[_Outcome | None]:
        """One pass for all. If it fails, each request runs alone, so that only the one at fault fails.

        And a request alone runs once more without its drafted tokens (``bare``), in case they are what the target
        cannot read: :func:`~foredraft.engine.judge.judge` makes do with the first row.
        """
        taps = self.drafter.taps if self.drafter is not None else ()
        failure: Exception | None = None
        start = self.clock()
        try:
            output = self.target.forward([_segment(work, bare) for work in works], taps)
        except CacheFullError:
            raise
        except Exception as error:
            failure = error
        finally:
            times.target += self.clock() - start
        if failure is None:
            tapped: Sequence[Tensor | None] = output.taps or [None] * len(works)
            likeliest: Sequence[Sequence[int]] = output.likeliest or [()] * len(works)
            return list(zip(output.logits, tapped, likeliest, strict=True))
        times.pure = False
        self._abandon(works)
        if len(works) > 1:
            return [self._forward([work], times)[0] for work in works]
        if works[0].draft.k and not bare:
            return self._forward(works, times, bare=True)
        self.fail(works[0].request, failure)
        return [None]

    def _abandon(self, works: Sequence[Work]) -> None:
        """Drops what a failed pass may have left pending."""
        for work in works:
            assert work.request.slot is not None
            with contextlib.suppress(Exception):
                self.target.cache.commit(work.request.slot, 0)

    def fail(self, request: Request, error: Exception) -> None:
        """Finishes one request with an error that says what happened."""
        if not isinstance(error, ForedraftError):
            log.error("request %s failed", request.id, exc_info=error)
            error = ForedraftError(f"failed with {type(error).__name__}: {error}", field=f"request {request.id}")
        request.error, request.finish_reason = error, "error"

    # --- verify, commit, observe

    def _settle(self, work: Work, logits: Tensor, taps: Tensor | None, likeliest: Sequence[int]) -> None:
        request, cache = work.request, self.target.cache
        assert request.slot is not None
        if work.scored and not request.cancelled:
            try:
                collect(request, cache.length(request.slot), logits[: len(work.unread)])
            except Exception as error:
                cache.commit(request.slot, 0)
                self.fail(request, error)
                return
            logits, likeliest = logits[len(work.unread) - 1 :], likeliest[len(work.unread) - 1 :]
            if work.complete and request.remaining <= 0:  # nothing but scores is wanted
                request.finish_reason = "length"
        if not work.complete or request.cancelled or request.finished:
            cache.commit(request.slot, len(work.unread))
            self._observe(work, None, taps, len(work.unread))
            return
        try:
            before = len(request.ids)
            verdict = judge(request, work.draft, logits, likeliest)
            kept = commit(request, work.draft, verdict, logits)
        except Exception as error:  # no law, or a custom processor that raised: this request's own affair
            cache.commit(request.slot, 0)
            self.fail(request, error)
            return
        rows = len(work.unread)
        keep = rows + kept if work.draft.parents is None else [*range(rows), *(rows + n for n in verdict.path[:kept])]
        cache.commit(request.slot, keep)
        if request.started and work.request.drafting:
            accepted = min(kept, verdict.accepted, work.own)
            request.acceptance.update(work.proposed, accepted)
            if self.guard is not None:
                self.guard.update(request, work.proposed, accepted, len(request.ids) - before, work.together)
        if work.shadow is not None:
            request.acceptance.update(1, int(request.ids[-1] == work.shadow))
        request.started = True
        self._observe(work, own_verdict(verdict, work.draft, work.own), taps, keep)

    def _observe(self, work: Work, verdict: Verdict | None, taps: Tensor | None, keep: int | list[int]) -> None:
        """Tells the drafter what became of its draft; of the tapped rows it gets those that the cache kept."""
        if self.drafter is None or not work.request.drafting:
            return
        if taps is not None and keep != taps.shape[0]:  # views are not free either
            taps = taps[:keep] if isinstance(keep, int) else taps[keep]
        try:
            self.drafter.observe(work.request, verdict, taps)
        except Exception as error:
            self._dismiss(work, error)

    def _learn(self, works: Sequence[Work], times: StepTimes) -> None:
        if times.pure and works:
            # everything but drafting: sampling and verifying k+1 rows cost more than one, too
            self.controller.passes.observe(times.rows, times.total - times.draft)
            if times.drafted and times.draft > 0:
                drafts = self.controller.drafts
                learn = drafts.observe if times.settled else drafts.observe_bound
                learn(times.drafted, times.draft)


def _segment(work: Work, bare: bool) -> Segment:
    assert work.request.slot is not None
    unread, draft = work.unread, NO_DRAFT if bare else work.draft
    first = 0 if work.scored else len(unread) - 1 if work.complete else len(unread)
    parents = None
    if draft.parents is not None:
        offset = len(unread)
        parents = [*range(-1, offset - 1), *(offset + p if p >= 0 else offset - 1 for p in draft.parents)]
    return Segment(work.request.slot, [*unread, *draft.tokens], first, parents)
