"""Drafting with an EAGLE-3 head: the target's own hidden states in, a chain of tokens out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Self

import torch
from torch import Tensor

from foredraft.drafters.base import Drafter, DrafterContext, DraftRequest
from foredraft.drafters.eagle_checkpoint import BITS, check_target, embedded_head, load_head
from foredraft.drafters.eagle_head import EagleHead, HeadSegment, HeadState
from foredraft.drafters.foresight import Foresight
from foredraft.drafters.outlook import Outlook, StepPrice
from foredraft.errors import ConfigError, DrafterError
from foredraft.kernels.head_pass import HeadDraft
from foredraft.kernels.law import Draws
from foredraft.models.prefix import common_prefix
from foredraft.types import NO_DRAFT, Draft, Verdict

WINDOW = 512
"""Rows of committed text that a head surely sees, where there are so many; up to as many older ones it may see as well.
Nothing that is older is read or kept, so drafts cost no more in a long text, and a long prompt no more to begin with.
"""


@dataclass(slots=True)
class _Text:
    """One request inside the head.

    Attributes:
        state: The head's keys and values; None until the target's first pass shows where its states begin.
        waiting: Hidden states ``[n, taps, target_hidden]`` of the latest committed positions, which the head has not
            read.
        rows: How many those are.
        foresight: How drafts end, and fare.
    """

    state: HeadState | None = None
    waiting: list[Tensor] = field(default_factory=list)
    rows: int = 0
    foresight: Foresight = field(default_factory=Foresight)

    def add(self, states: Tensor) -> None:
        self.waiting.append(states)
        self.rows += states.shape[0]
        if self.rows > 2 * WINDOW:
            self.shorten()

    def shorten(self) -> None:
        """Leaves no more rows waiting than the window holds; older ones are out of it, read or not."""
        extra = self.rows - WINDOW
        if extra > 0:
            self.waiting = [torch.cat(self.waiting)[extra:].clone()]
            self.rows = WINDOW
            if self.state is not None:
                self.state.forget(0)
                self.state.skip(extra)

    def read(self, rows: int) -> None:
        """The head has read all that waited, and keeps it."""
        assert self.state is not None
        self.state.commit(rows)
        self.waiting.clear()
        self.rows = 0
        if self.state.length > 2 * WINDOW:
            self.state.forget(WINDOW)


@dataclass(frozen=True, slots=True)
class _Finished:
    tenant: str
    ids: list[int]
    state: HeadState


@dataclass(slots=True)
class _Writing:
    """One draft in the making."""

    request: DraftRequest
    text: _Text
    k: int
    segment: HeadSegment
    tokens: list[int] = field(default_factory=list)
    rows: list[Tensor] = field(default_factory=list)  # of q, while it is written token by token
    q: Tensor | None = None
    chances: Sequence[float] = ()  # the head's probabilities of the tokens, where it knows them

    def read(self) -> None:
        """Keeps the rows of committed tokens."""
        self.text.read(len(self.segment.tokens))


class Eagle3Drafter(Drafter):
    """Drafts chains with an EAGLE-3 head (Li 2025, arXiv 2503.01840).

    Tokens are drawn by each request's own law, so greedy requests get the head's argmax and others a draw from the same
    filters as the target's.

    Args:
        head: A head made for the target.
    """

    name = "eagle3"

    def __init__(self, head: EagleHead) -> None:
        self.head = head
        self.taps = head.shape.taps
        self._texts: dict[str, _Text] = {}
        self._finished: list[_Finished] = []  # oldest first, as the target keeps prefixes of finished requests
        self._keep = 0

    @classmethod
    def from_spec(cls, argument: str | None, context: DrafterContext) -> Self:
        folder, bits = _bits(argument or "")
        if not folder:
            return cls(embedded_head(context.target, bits))
        return cls(load_head(Path(folder), context.target, bits))

    def attach(self, context: DrafterContext) -> None:
        check_target(self.head.shape, context.target)
        self._keep = context.max_batch

    def outlook(self, request: DraftRequest, limit: int, price: StepPrice) -> Outlook | None:
        text = self._texts.get(request.id)
        if text is None or not request.sampler.bare or not self._foresees(request):
            return None
        return text.foresight.outlook(limit, price)

    def _foresees(self, request: DraftRequest) -> bool:
        """Whether the head chooses the request's tokens by itself, and so knows how sure it is of them."""
        plan = None if self.head.draws else request.sampler.ahead(1)
        return self.head.draws or (plan is not None and plan.controls is None)

    def propose(self, request: DraftRequest, k: int) -> Draft:
        return self.propose_batch([request], [k])[0]

    def propose_batch(self, requests: Sequence[DraftRequest], ks: Sequence[int]) -> list[Draft]:
        jobs = [self._begin(request, k) if k else None for request, k in zip(requests, ks, strict=True)]
        writing = [job for job in jobs if job is not None]
        try:
            if planned := [(job, plan) for job in writing if (plan := self._ahead(job)) is not None]:
                self._chains(planned)
            if others := [job for job in writing if not job.tokens]:
                self._draws(others)
        finally:
            for job in writing:
                job.segment.state.drop()
        for job in writing:
            job.text.foresight.made(job.k, job.chances)
        return [NO_DRAFT if job is None else _draft(job) for job in jobs]

    def observe(self, request: DraftRequest, verdict: Verdict | None, taps: Tensor | None) -> None:
        assert taps is not None
        text = self._texts.setdefault(request.id, _Text())
        text.add(taps)
        if verdict is None:  # a chunk of the prompt: where it begins is known once the prompt's end is there
            return
        text.foresight.verified(verdict.accepted)
        if text.state is None:
            text.state = self._start(request, len(request.ids) - 1 - text.rows)

    def stop(self, request: DraftRequest) -> None:
        text = self._texts.pop(request.id, None)
        if text is None or text.state is None or not self._keep:
            return
        self._finished.append(_Finished(request.tenant, list(request.ids), text.state))
        del self._finished[: -self._keep]

    def reset(self) -> None:
        self._finished.clear()

    # --- committed text

    def _start(self, request: DraftRequest, known: int) -> HeadState:
        """The state of a text of which the target had ``known`` tokens in its cache already: as much of it as a
        finished request of the same tenant left behind; the rest is skipped.
        """
        best, rows = None, 0
        for finished in self._finished:
            if known and finished.tenant == request.tenant:
                shared = common_prefix(finished.ids, request.ids) - 1  # a row needs the token after its own
                n = finished.state.before(min(shared, known))
                if n > rows:
                    best, rows = finished, n
        state = self.head.new_state() if best is None else best.state.copy(rows, self.head.shape)
        state.skip(known - state.position)
        return state

    # --- drafts

    def _begin(self, request: DraftRequest, k: int) -> _Writing | None:
        text = self._texts.get(request.id)
        if text is None or text.state is None or not text.waiting:
            return None
        text.shorten()
        states = text.waiting[0] if len(text.waiting) == 1 else torch.cat(text.waiting)
        # the token after each position
        tokens = list(request.ids[text.state.position + 1 : text.state.position + 1 + states.shape[0]])
        segment = HeadSegment(text.state, tokens, states, logits_from=len(tokens) - 1)
        return _Writing(request, text, k, segment)

    def _ahead(self, job: _Writing) -> Draws | None:
        """How the head can choose this draft's tokens by itself."""
        plan = job.request.sampler.ahead(job.k)
        if plan is not None:
            foresight = job.text.foresight
            plan = replace(plan, trust=foresight.trust, least=foresight.least)
        return plan if plan is not None and (plan.controls is None or self.head.draws) else None

    def _chains(self, planned: Sequence[tuple[_Writing, Draws]], branch: int = 1) -> list[HeadDraft]:
        """Drafts in one call; what gets no token is left as it was."""
        drafts = self.head.draft([job.segment for job, _ in planned], [plan for _, plan in planned], branch)
        for (job, _), draft in zip(planned, drafts, strict=True):
            if draft.tokens:
                job.read()
                job.tokens, job.q, job.chances = draft.tokens, draft.laws, draft.chances
            else:
                job.segment.state.drop()
        return drafts

    def _draws(self, writing: list[_Writing]) -> None:
        """Drafts tokens drawn by each request's own sampler."""
        first = True
        while writing:
            logits, hidden = self.head.step([job.segment for job in writing])
            if first:
                for job in writing:
                    job.read()
                first = False
            steps = zip(writing, logits, hidden, strict=True)
            writing = [job for job, row, feature in steps if self._write(job, row[-1], feature[-1:])]

    def _write(self, job: _Writing, logits: Tensor, feature: Tensor) -> bool:
        """Draws one token; whether the draft goes on.

        What was drawn stands. A draft ends where the request allows no token that the head can propose.
        """
        try:
            token, law = job.request.sampler.draw(logits, job.tokens, self.head.weights.token_ids)
        except DrafterError:
            if not job.tokens and not bool(torch.isfinite(logits).all()):
                raise
            return False
        job.tokens.append(token)
        if law is not None:
            job.rows.append(law)
        job.segment = HeadSegment(job.segment.state, [token], feature)
        return len(job.tokens) < job.k


def _bits(argument: str) -> tuple[str, int]:
    """Splits ``FOLDER,bits=N``, of which either may be missing."""
    folder, found, text = argument.rpartition("bits=")
    if not found or (folder and not folder.endswith(",")):
        return argument, BITS
    if text not in ("4", "8", "32"):
        raise ConfigError(
            f"bits must be 4, 8 or 32 (got {text!r})", field="drafter eagle3", remedy="for example eagle3:bits=8"
        )
    return folder.removesuffix(","), int(text)


def _draft(job: _Writing) -> Draft:
    q = torch.stack(job.rows) if job.rows else job.q
    return Draft(tuple(job.tokens), q) if job.tokens else NO_DRAFT
