"""A smaller model drafts token by token, with its own cache and its own context limit."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Self

import torch
from torch import Tensor

from foredraft.drafters.base import Drafter, DrafterContext, DraftRequest
from foredraft.drafters.foresight import Foresight, grade
from foredraft.drafters.outlook import Outlook, StepPrice
from foredraft.errors import CacheFullError, ConfigError, VocabularyMismatchError
from foredraft.models.base import Segment, Target
from foredraft.models.prefix import PrefixPool
from foredraft.types import NO_DRAFT, Draft, Verdict

if TYPE_CHECKING:
    from foredraft.models.tokenizer import Tokenizer


@dataclass(slots=True)
class State:
    """One request inside the drafter.

    Attributes:
        slot: Its cache slot.
        base: Committed ids when the latest draft was made.
        valid: How many leading ids in the slot are known to be committed; the rest may be rejected drafts.
    """

    slot: int
    base: int = 0
    valid: int = 0


class LawRows:
    """The rows of q in one tensor: each is copied while it is at hand, not all of them at the end.

    Args:
        most: Rows that there is to be room for; more are taken, too.
    """

    def __init__(self, most: int) -> None:
        self._most, self._count = most, 0
        self._rows: Tensor | None = None

    def append(self, q: Tensor) -> None:
        """Adds a row ``[V]``."""
        if self._rows is None:
            self._rows = q.new_empty((max(self._most, 1), q.shape[0]))
        elif self._count == len(self._rows):
            self._rows = torch.cat((self._rows, torch.empty_like(self._rows)))
        self._rows[self._count] = q
        self._count += 1

    def stacked(self) -> Tensor | None:
        """``[k, V]``; None without a row."""
        return None if self._rows is None else self._rows[: self._count]


@dataclass(slots=True)
class Writing:
    """One draft in the making.

    Attributes:
        asked: Target tokens that the engine asked for.
        k: Tokens that the model is to write.
        feed: What it reads in the next pass.
        tokens: What it has written, in its own ids.
        rows: The laws that they were drawn from.
    """

    request: DraftRequest
    slot: int
    asked: int
    k: int
    feed: list[int]
    tokens: list[int]
    rows: LawRows
    foresight: Foresight | None = None
    chances: list[float] = field(default_factory=list)  # the model's probability of what it has written, if asked for
    sure: float = 1.0  # of all of it together: by itself, or as foresight knows it


class ModelDrafter(Drafter):
    """Drafts by sampling from a smaller model under the request's own law.

    Args:
        model: Any model behind the :class:`~foredraft.models.base.Target` contract, with the target's vocabulary.
        tokenizer: Its tokenizer, compared with the target's when an engine takes the drafter.
        doubt: Ends a draft once the model gives its tokens together less than probability ``1 - doubt`` (as in
            SpecDec++, Huang 2024, arXiv 2405.19715), where tokens may be dropped freely: requests that are greedy or
            coupled. None ends drafts of likeliest tokens where, by measured costs, a further token would not pay
            (:mod:`foredraft.drafters.foresight`), if their length is free.

    Raises:
        ConfigError: ``doubt`` is not between 0 and 1.
    """

    name = "model"

    def __init__(self, model: Target, tokenizer: Tokenizer | None = None, doubt: float | None = None) -> None:
        if doubt is not None and not 0 < doubt < 1:
            raise ConfigError(f"doubt must be between 0 and 1 (got {doubt})", field="drafter model")
        self.model = model
        self.tokenizer = tokenizer
        self.doubt = doubt
        self._width = model.vocab_size  # of the target's logits, once attached
        self._states: dict[str, State] = {}
        self._foresights: dict[str, Foresight] = {}
        self._pool = PrefixPool(model.cache, keep=0)

    @classmethod
    def from_spec(cls, argument: str | None, context: DrafterContext) -> Self:
        from foredraft.models.loading import load_model

        if argument is None:
            raise ConfigError(
                "names no model", field="drafter model", remedy="write model:NAME, folder, file or hub id"
            )
        argument, doubt = _doubt(argument)
        name, _, layers = argument.rpartition("@")
        if not name or not layers.isdecimal():
            name, layers = argument, ""
        loaded = load_model(
            name,
            dtype=context.dtype,
            device=context.device,
            max_context=context.max_context,
            layers=int(layers) if layers else None,
            only_drafts=True,
        )
        return cls(loaded.target, loaded.tokenizer, doubt)

    def attach(self, context: DrafterContext) -> None:
        if self.tokenizer is not None and context.tokenizer is not None:
            context.tokenizer.same_vocabulary(self.tokenizer)
        elif self.model.vocab_size != context.target.vocab_size:
            raise VocabularyMismatchError(
                f"the drafter has {self.model.vocab_size} tokens, the target {context.target.vocab_size}",
                field="drafter model",
                remedy="use a drafter with the target's tokenizer",
            )
        self._width = context.target.vocab_size
        self._pool.keep = context.max_batch

    def outlook(self, request: DraftRequest, limit: int, price: StepPrice) -> Outlook | None:
        if self.doubt is not None or not request.sampler.bare:
            return None
        return self._foresights.setdefault(request.id, Foresight()).outlook(limit, price)

    def propose(self, request: DraftRequest, k: int) -> Draft:
        return self.propose_batch([request], [k])[0]

    def propose_batch(self, requests: Sequence[DraftRequest], ks: Sequence[int]) -> list[Draft]:
        jobs = [self._begin(request, k) if k else None for request, k in zip(requests, ks, strict=True)]
        writing = [job for job in jobs if job is not None]
        for job in writing:
            job.foresight = self._foresights.get(job.request.id)
        while writing:
            try:
                logits = self._read(writing)
            except Exception:
                if not writing[0].tokens:
                    raise
                break
            for job, row in zip(writing, logits, strict=True):
                self._write(job, row[0])
            writing = [job for job in writing if len(job.tokens) < job.k]
        drafts = [NO_DRAFT if job is None else self._finish(job) for job in jobs]
        for made, k, draft in zip(jobs, ks, drafts, strict=True):
            if made is not None and made.foresight is not None:
                made.foresight.made(k, made.chances[: draft.k])
        return drafts

    def _read(self, writing: Sequence[Writing]) -> list[Tensor]:
        """One pass; the last row of each draft."""
        cache = self.model.cache
        segments = [Segment(job.slot, job.feed, len(job.feed) - 1) for job in writing]
        try:
            logits = self.model.forward(segments).logits
        except CacheFullError:
            if not self._pool.evict():
                raise
            return self._read(writing)
        except BaseException:
            for job in writing:  # drop what the failed pass may have left pending
                with contextlib.suppress(Exception):
                    cache.commit(job.slot, 0)
            raise
        for job in writing:
            cache.commit(job.slot, len(job.feed))
        return logits

    def _write(self, job: Writing, logits: Tensor) -> None:
        """Draws one token, or ends the draft with what it has where no token can be drawn.

        What was drawn stands, here as where a later pass fails: a draft that vanished because of the tokens in it
        would bend the law (see :meth:`Drafter.propose`). A failure that lasts meets the first token of a later draft.
        """
        try:
            drawn = self._draw(job, logits)
        except Exception:
            if not job.tokens:
                raise
            drawn = None
        if drawn is None:
            job.k = len(job.tokens)
            return
        token, q = drawn
        job.tokens.append(token)
        job.feed = [token]
        if q is not None:
            job.rows.append(q)
        if job.foresight is not None or (self.doubt is not None and q is None):
            plain = logits.float()
            chance = q[token] if q is not None else torch.exp(plain[token] - plain.logsumexp(-1))
            job.chances.append(float(chance))
            if self._doubtful(job, job.chances[-1]):
                job.k = len(job.tokens)

    def _doubtful(self, job: Writing, chance: float) -> bool:
        """Whether the draft should end with the token to which the model gives the probability ``chance``."""
        if job.foresight is None:
            job.sure *= chance
            return self.doubt is not None and 1 - job.sure > self.doubt
        job.sure *= job.foresight.trust[grade(chance)]
        return job.sure < job.foresight.least

    def _begin(self, request: DraftRequest, k: int) -> Writing | None:
        """Prepares to draft: what the cache has not read yet is fed first. None where the context is full."""
        ids = self._context(request)
        limit = self.model.max_context
        room = k if limit is None else limit - len(ids) + 1  # the last drafted token need not be read
        if room < 1 or not ids:
            return None
        state = self._states.get(request.id)
        if state is None:
            slot, shared = self._pool.take(ids, request.tenant)
            state = self._states[request.id] = State(slot, valid=shared)
        self._drop_rejected(state)
        state.base = state.valid = len(ids)
        feed = list(ids[self.model.cache.length(state.slot) :])
        span = min(self._span(request, k), room)
        return Writing(request, state.slot, k, span, feed, [], LawRows(span))

    def observe(self, request: DraftRequest, verdict: Verdict | None, taps: Tensor | None) -> None:
        state = self._states.get(request.id)
        if state is not None and verdict is not None:
            state.valid = state.base + verdict.accepted
            self._drop_rejected(state)
        self._learn(request, verdict)

    def _learn(self, request: DraftRequest, verdict: Verdict | None) -> None:
        if verdict is not None and request.id in self._foresights:
            self._foresights[request.id].verified(verdict.accepted)

    def stop(self, request: DraftRequest) -> None:
        self._foresights.pop(request.id, None)
        if request.id in self._states:
            ids = self._context(request)
            state = self._states.pop(request.id)
            state.valid = min(state.valid, len(ids))
            self._drop_rejected(state)
            self._pool.give(state.slot, ids, request.tenant)

    def reset(self) -> None:
        self._pool.clear()

    def _drop_rejected(self, state: State) -> None:
        if self.model.cache.length(state.slot) > state.valid:
            self.model.cache.rollback(state.slot, state.valid)

    def _fit(self, logits: Tensor) -> Tensor:
        """``[V_drafter] -> [V_target]``: models of one tokenizer differ in how far they pad their logits."""
        missing = self._width - logits.shape[-1]
        if not missing:
            return logits
        if missing > 0:
            return torch.nn.functional.pad(logits, (0, missing), value=float("-inf"))
        return logits[: self._width]

    # --- what a model with a vocabulary of its own does otherwise (foredraft.drafters.vocabulary)

    def _context(self, request: DraftRequest) -> Sequence[int]:
        """The committed text in the model's ids."""
        return request.ids

    def _span(self, request: DraftRequest, k: int) -> int:
        """How many tokens the model writes for ``k`` of the target's."""
        return k

    def _draw(self, job: Writing, logits: Tensor) -> tuple[int, Tensor | None] | None:
        """The next token in the model's ids and the law ``[V_target]`` that it was drawn from; None ends the draft."""
        return job.request.sampler.draw(self._fit(logits), job.tokens)

    def _finish(self, job: Writing) -> Draft:
        """What was written, in the target's ids."""
        return Draft(tuple(job.tokens), job.rows.stacked())


def _doubt(argument: str) -> tuple[str, float | None]:
    """Splits ``NAME,doubt=H``."""
    name, found, text = argument.rpartition(",doubt=")
    if not found:
        return argument, None
    try:
        return name, float(text)
    except ValueError:
        raise ConfigError(
            f"doubt must be between 0 and 1 (got {text!r})",
            field="drafter model",
            remedy="for example model:NAME,doubt=0.6",
        ) from None
