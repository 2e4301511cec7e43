"""Block verification: the draft is judged as a whole (Sun 2024, arXiv 2403.10444).

Let ``b_0 = 1`` and ``b_i = min(1, b_{i-1} p_i(x_i) / q_i(x_i))``: the share of the draft's first i tokens that is to be
kept. Write A_i for "at least i tokens are accepted". The rule is built so that ``P(A_i | x_1 … x_i) = b_i``, hence

    P(x_1 … x_i drafted, A_i) = q(x_1 … x_i) b_i.

Given that prefix, a mass ``q_{i+1}(x) b_{i+1} = min(q_{i+1}(x), b_i p_{i+1}(x))`` goes on with token x. The target
wants ``b_i p_{i+1}(x)``, so corrections must add ``max(b_i p_{i+1}(x) - q_{i+1}(x), 0)``, in total r_i. Exactly i
tokens must therefore be accepted with probability r_i, out of the drafts whose continuation was not accepted; these
have probability ``1 - Σ min(q, b_i p) = 1 - b_i + r_i``. The quotient ``h_i = r_i / (r_i + 1 - b_i)`` is the
probability of stopping at i given that nothing longer was accepted; ``h_k = b_k``.

Token-wise rejection keeps ``Π min(1, p/q)`` of a prefix, which is never more than b_i.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from foredraft.sampling.draw import Laws
from foredraft.types import Draft, Verdict
from foredraft.verify._chain import Chain, check_chain


def block(draft: Draft, p: Tensor | Laws, uniforms: Sequence[float], next_uniform: float) -> Verdict:
    """Accepts the longest prefix i whose uniform is under h_i; the correction comes from ``max(b_i p - q, 0)``.

    Arguments and errors are those of :func:`~foredraft.verify.rejection.rejection`. Every uniform counts, also
    those past the accepted prefix: none may be used again for a token drafted at the same position later.
    """
    check_chain(draft, p.shape[0], len(uniforms))
    chain = Chain(draft, p)
    kept = [1.0]
    for ratio in chain.ratios:
        kept.append(min(1.0, kept[-1] * ratio))
    accepted = draft.k
    while accepted > 0 and not uniforms[accepted - 1] < _stop_here(kept[accepted], chain, accepted):
        accepted -= 1
    return Verdict.chain(accepted, chain.next_token(kept[accepted], accepted, next_uniform), draft.k)


def _stop_here(b: float, chain: Chain, row: int) -> float:
    """h_i: the probability of accepting i = ``row`` tokens when no longer prefix was accepted; ``b`` is b_i."""
    if row == chain.draft.k or b in (0.0, 1.0):
        return b
    mass = chain.excess_mass(b, row)
    return mass / (mass + 1.0 - b)
