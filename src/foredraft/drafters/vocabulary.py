"""A model with another tokenizer drafts: Timor et al. 2025, "Accelerating LLM inference with lossless speculative
decoding for heterogeneous vocabularies" (arXiv 2502.05202).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, Self, TypeAlias, get_args

import torch
from torch import Tensor

from foredraft.drafters.base import DrafterContext, DraftRequest
from foredraft.drafters.model import ModelDrafter, Writing
from foredraft.drafters.outlook import Outlook, StepPrice
from foredraft.drafters.vocabulary_map import VocabularyMap, map_vocabularies
from foredraft.drafters.vocabulary_recode import Recoder
from foredraft.drafters.vocabulary_text import tokens_after
from foredraft.errors import ConfigError, VocabularyMismatchError
from foredraft.models.base import Target
from foredraft.types import Draft, Verdict

if TYPE_CHECKING:
    from foredraft.models.tokenizer import Tokenizer

Method: TypeAlias = Literal["auto", "intersection", "text"]

COVERAGE = 0.5
"""From this share of either side's writing in shared tokens on, ``auto`` draws from the intersection."""
CONTEXT = 8
"""Committed tokens that a drafted text is encoded together with."""


@dataclass(slots=True)
class _View:
    """One request as the drafter's model reads it.

    Attributes:
        base: Ids of the committed text when it was last read.
        drafted: What the model wrote after them.
        drawn: The same in the target's ids, where they were drawn.
        shared: Whether it draws from the shared tokens; else it writes text.
    """

    recoder: Recoder
    shared: bool
    base: int = 0
    drafted: list[int] = field(default_factory=list)
    drawn: list[int] = field(default_factory=list)


class VocabularyDrafter(ModelDrafter):
    """Drafts with a model whose tokenizer is not the target's. Both methods keep the law of the output.

    ``intersection`` (the paper's TLI): the model's law is restricted to tokens that both vocabularies have,
    filtered like the target's, and drawn from; drafts are verified by the ratio test. ``text`` (SLEM): the model
    writes its likeliest text, which the target's tokenizer encodes; a token is accepted as any that was not drawn.
    Special tokens are never drafted.

    Args:
        model: The model that writes.
        tokenizer: Its tokenizer.
        method: ``auto`` takes the text for greedy requests, where a match of tokens is all that counts, and the
            intersection for sampled ones where enough tokens are shared (:data:`COVERAGE`).

    Attributes:
        method: As given.
        vocabularies: After :meth:`attach`, what the two share.
    """

    name = "vocabulary"
    vocabularies: VocabularyMap
    _target: Tokenizer

    def __init__(self, model: Target, tokenizer: Tokenizer, method: Method = "auto") -> None:
        super().__init__(model, tokenizer)
        if method not in get_args(Method):
            raise ConfigError(
                f"no method {method!r}", field="drafter vocabulary", remedy=f"use {', '.join(get_args(Method))}"
            )
        self.method = method
        self._goal = tokenizer
        self._views: dict[str, _View] = {}

    @classmethod
    def from_spec(cls, argument: str | None, context: DrafterContext) -> Self:
        name, _, method = (argument or "").partition(",")
        if not name:
            raise ConfigError("names no model", field="drafter vocabulary", remedy="write vocabulary:MODEL")
        drafter = ModelDrafter.from_spec(name, context)
        if drafter.tokenizer is None:
            raise VocabularyMismatchError(
                "the model's files hold no tokenizer", field="drafter vocabulary", remedy="add its tokenizer.json"
            )
        return cls(drafter.model, drafter.tokenizer, method or "auto")  # type: ignore[arg-type]

    def attach(self, context: DrafterContext) -> None:
        if context.tokenizer is None:
            raise VocabularyMismatchError(
                "the target has no tokenizer, so its tokens have no text",
                field="drafter vocabulary",
                remedy="give the target's tokenizer, or use model:MODEL",
            )
        if self._goal.vocab_size > self.model.vocab_size:
            raise VocabularyMismatchError(
                f"the drafter's tokenizer has {self._goal.vocab_size} tokens, its logits only {self.model.vocab_size}",
                field="drafter vocabulary",
                remedy="check that they belong to one model; a reduced vocabulary needs a tokenizer of its own",
            )
        self._target, self._width = context.tokenizer, context.target.vocab_size
        self._pool.keep = context.max_batch
        self.vocabularies = map_vocabularies(self._target, self._goal)
        if self.method == "intersection" and not self.vocabularies.to_target:
            raise VocabularyMismatchError(
                "the vocabularies share no token", field="drafter vocabulary", remedy="use the method text"
            )

    def outlook(self, request: DraftRequest, limit: int, price: StepPrice) -> Outlook | None:
        """None: what is accepted are the target's tokens, whose probabilities the model does not know."""
        return None

    def observe(self, request: DraftRequest, verdict: Verdict | None, taps: Tensor | None) -> None:
        """What was accepted is found by comparing ids: the text may be encoded otherwise than it was drafted."""

    def stop(self, request: DraftRequest) -> None:
        super().stop(request)
        self._views.pop(request.id, None)

    def _draws(self, request: DraftRequest) -> bool:
        if self.method == "auto":  # a request without a rule may be any
            return getattr(request, "rule", "block") != "exact" and self.vocabularies.coverage >= COVERAGE
        return self.method == "intersection"

    def _context(self, request: DraftRequest) -> Sequence[int]:
        view = self._views.get(request.id)
        if view is None:
            recoder = Recoder(self._target, self._goal, self.vocabularies)
            view = self._views[request.id] = _View(recoder, self._draws(request))
        same = view.recoder.extend(request.ids)
        ids = view.recoder.ids
        state = self._states.get(request.id)
        if state is not None:
            same = min(same, view.base, state.valid)
            if same == view.base == state.valid:
                for drafted, written in zip(view.drafted, ids[same:], strict=False):
                    if drafted != written:
                        break
                    same += 1
            state.valid = min(same, max(len(ids) - 1, 0))  # one must be read again for the first law
        view.base, view.drafted, view.drawn = len(ids), [], []
        return ids if view.recoder.whole else ()

    def _span(self, request: DraftRequest, k: int) -> int:
        view = self._views[request.id]
        if view.shared:
            return k
        return min(math.ceil(k * view.base / max(len(request.ids), 1)), 2 * k + 2) or 1

    def _draw(self, job: Writing, logits: Tensor) -> tuple[int, Tensor | None] | None:
        view = self._views[job.request.id]
        view.drafted = job.tokens
        likeliest = int(logits.detach().float().cpu().numpy().argmax())
        if self._goal.is_special(likeliest) or likeliest >= self._goal.vocab_size:
            return None  # the text seems to end here; whether it does, the target says
        if not view.shared:
            return likeliest, None
        known = self.vocabularies
        row = logits.new_full((self._width,), -torch.inf)
        row[known.target_ids] = logits[known.drafter_ids]
        token, q = job.request.sampler.draw(row, view.drawn)
        view.drawn.append(token)  # from here on it stands
        if token in known.to_drafter:
            return known.to_drafter[token], q
        if q is not None:  # a processor of the request's own can ask for any token; the model cannot read this one
            job.rows.append(q)
        return None

    def _finish(self, job: Writing) -> Draft:
        view = self._views[job.request.id]
        if view.shared:
            return Draft(tuple(view.drawn), job.rows.stacked())
        before: list[bytes] = []
        for token in reversed(job.request.ids[-CONTEXT:]):
            if self._target.is_special(token):
                break
            before.insert(0, self._target.token_bytes(token))
        text = b"".join(map(self._goal.token_bytes, job.tokens))
        return Draft(tuple(tokens_after(self._target, _from_character(b"".join(before)), text)[: job.asked]))


def _from_character(data: bytes) -> bytes:
    """Without the rest of a character at the beginning."""
    start = 0
    while start < min(len(data), 3) and data[start] & 0xC0 == 0x80:
        start += 1
    return data[start:]
