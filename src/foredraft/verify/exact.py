"""Greedy decoding: a draft is accepted while it is what the target would write anyway."""

from __future__ import annotations

from collections.abc import Sequence

from foredraft.types import Draft, Verdict
from foredraft.verify._chain import check_chain


def exact(draft: Draft, argmax: Sequence[int]) -> Verdict:
    """Accepts while token i is the target's argmax at row i, then commits the argmax of the next row.

    Args:
        draft: A chain of k tokens; q does not matter.
        argmax: k+1 token ids, row i given the draft's first i tokens.
    """
    check_chain(draft, len(argmax), draft.k)
    accepted = 0
    while accepted < draft.k and draft.tokens[accepted] == argmax[accepted]:
        accepted += 1
    return Verdict.chain(accepted, argmax[accepted], draft.k)
