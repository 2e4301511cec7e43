"""Modified rejection sampling, token by token (Leviathan 2022, arXiv 2211.17192; Chen 2023, arXiv 2302.01318)."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from foredraft.sampling.draw import Laws
from foredraft.types import Draft, Verdict
from foredraft.verify._chain import Chain, check_chain


def rejection(draft: Draft, p: Tensor | Laws, uniforms: Sequence[float], next_uniform: float) -> Verdict:
    """Accepts token i with probability ``min(1, p_i(x_i) / q_i(x_i))``, up to the first rejection.

    The next token is then drawn from ``max(p_i - q_i, 0)``, normalised, or from row k if all were accepted.

    Args:
        draft: A chain of k tokens; ``q=None`` is a one-hot q at each token.
        p: ``[k+1, V]`` post-filter law of the target, row i given the draft's first i tokens.
        uniforms: k numbers in ``[0, 1)``, independent of the draft.
        next_uniform: One more, for the next token.

    Raises:
        NumericalError: A row of p is not a law.
        DrafterError: A row of q is not a law, or the token cannot have been drawn from it.
    """
    check_chain(draft, p.shape[0], len(uniforms))
    chain = Chain(draft, p)
    accepted = 0
    for ratio, u in zip(chain.ratios, uniforms, strict=True):
        if not u < ratio:
            break
        accepted += 1
    return Verdict.chain(accepted, chain.next_token(1.0, accepted, next_uniform), draft.k)
