"""One round of speculation, taken apart: contexts in, laws, drafts and verdicts out.

The engine does the same inside its step; the study needs the parts, such as drafted tokens that were discarded.
All laws here are at temperature 1 with no filter.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from foredraft import verify
from foredraft.models.base import Segment, Target
from foredraft.sampling.draw import draw
from foredraft.types import Draft, Verdict

BATCH = 32
Tokens = Sequence[int]
Rule = Callable[[Draft, Tensor, Sequence[float], float], Verdict]
RULES: dict[str, Rule] = {"rejection": verify.rejection, "block": verify.block}


@dataclass(frozen=True, slots=True)
class Round:
    """A draft, the target's laws over it, and the verdict.

    Attributes:
        p: ``[k+1, V]`` the target's laws, row i after i drafted tokens.
    """

    context: Tokens
    draft: Draft
    p: Tensor
    verdict: Verdict


def last_laws(model: Target, contexts: Sequence[Tokens]) -> Tensor:
    """``[n, V]`` float64: the law of the token that follows each context."""
    return torch.cat([rows[-1:] for rows in row_laws(model, contexts, [1] * len(contexts))])


def row_laws(model: Target, sequences: Sequence[Tokens], rows: Sequence[int]) -> list[Tensor]:
    """The laws after the last ``rows[i]`` tokens of each sequence: ``[rows[i], V]`` float64."""
    laws: list[Tensor] = []
    for start in range(0, len(sequences), BATCH):
        batch = sequences[start : start + BATCH]
        slots = [model.cache.allocate() for _ in batch]
        segments = [
            Segment(slot, list(tokens), len(tokens) - n)
            for slot, tokens, n in zip(slots, batch, rows[start : start + BATCH], strict=True)
        ]
        laws += [torch.softmax(logits.double(), -1) for logits in model.forward(segments).logits]
        _give_back(model, slots)
    return laws


def write_drafts(drafter: Target, contexts: Sequence[Tokens], k: int, generator: torch.Generator) -> list[Draft]:
    """Samples ``k`` tokens after each context from the drafter, one at a time, each from the law it reports."""
    drafts: list[Draft] = []
    for start in range(0, len(contexts), BATCH):
        batch = contexts[start : start + BATCH]
        slots = [drafter.cache.allocate() for _ in batch]
        feeds = [list(context) for context in batch]
        tokens: list[list[int]] = [[] for _ in batch]
        laws: list[list[Tensor]] = [[] for _ in batch]
        for _ in range(k):
            segments = [Segment(slot, feed, len(feed) - 1) for slot, feed in zip(slots, feeds, strict=True)]
            logits = drafter.forward(segments).logits
            for i, row in enumerate(logits):
                drafter.cache.commit(slots[i], len(feeds[i]))
                laws[i].append(torch.softmax(row[0].double(), -1))
                tokens[i].append(draw(laws[i][-1], _uniform(generator)))
                feeds[i] = tokens[i][-1:]
        _give_back(drafter, slots, pending=False)
        drafts += [Draft(tuple(t), torch.stack(q)) for t, q in zip(tokens, laws, strict=True)]
    return drafts


def play_rounds(
    target: Target, drafter: Target, contexts: Sequence[Tokens], k: int, rule: Rule, generator: torch.Generator
) -> list[Round]:
    """Drafts ``k`` tokens after each context and verifies them, once."""
    drafts = write_drafts(drafter, contexts, k, generator)
    sequences = [[*context, *draft.tokens] for context, draft in zip(contexts, drafts, strict=True)]
    laws = row_laws(target, sequences, [k + 1] * len(sequences))
    return [
        Round(context, draft, p, judge(rule, draft, p, generator))
        for context, draft, p in zip(contexts, drafts, laws, strict=True)
    ]


def judge(rule: Rule, draft: Draft, p: Tensor, generator: torch.Generator) -> Verdict:
    """Applies a rule with fresh uniforms."""
    return rule(draft, p, [_uniform(generator) for _ in range(draft.k)], _uniform(generator))


def _uniform(generator: torch.Generator) -> float:
    return float(torch.rand((), dtype=torch.float64, generator=generator))


def _give_back(model: Target, slots: Sequence[int], pending: bool = True) -> None:
    for slot in slots:
        if pending:
            model.cache.commit(slot, 0)
        model.cache.free(slot)
