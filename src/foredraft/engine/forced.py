"""Drafts under a grammar: cut where it ends them, continued where it leaves no choice."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from foredraft.errors import ConfigError
from foredraft.grammar import Grammar
from foredraft.types import Draft, Verdict


def fit_to_grammar(draft: Draft, grammar: Grammar, most: int) -> tuple[Draft, int]:
    """Fits a chain to the grammar; a tree stays as it is.

    Tokens that were not sampled are dropped from the first that the grammar does not admit on: that token has no
    probability, so they could only waste rows. Sampled ones stay, since taking them back would bend the law (and they
    were sampled under the grammar). Then follow the tokens that spell what must come next, one-hot in q.

    Args:
        draft: The drafter's proposal.
        grammar: The request's grammar after the committed text.
        most: Most tokens that the draft may hold.

    Returns:
        The draft, and how many of its tokens are the drafter's own.
    """
    if draft.parents is not None:
        return draft, draft.k
    try:
        own = draft.k if draft.q is not None else grammar.admitted(draft.tokens)
        forced = grammar.forced(draft.tokens[:own], most - own)
        forced = forced[: grammar.admitted([*draft.tokens[:own], *forced]) - own] if forced else []
    except ConfigError:  # too ambiguous for the parser: if the text itself gets there, verification says so
        return draft, draft.k
    q = draft.q
    if q is not None and forced:
        q = torch.cat((q, _one_hot(forced, q)))
    return replace(draft, tokens=(*draft.tokens[:own], *forced), q=q), own


def _one_hot(tokens: list[int], like: Tensor) -> Tensor:
    rows = like.new_zeros(len(tokens), like.shape[-1])
    rows[range(len(tokens)), tokens] = 1.0
    return rows


def own_verdict(verdict: Verdict, draft: Draft, own: int) -> Verdict:
    """The verdict as if the draft had ended after its first ``own`` tokens, for the drafter that wrote those."""
    if verdict.accepted <= own or draft.parents is not None:
        return verdict
    return Verdict.chain(own, draft.tokens[own], own)
