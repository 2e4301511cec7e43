"""What all rules for chains check first: the shape of the draft and that p and q are laws."""

from __future__ import annotations

from torch import Tensor

from foredraft.errors import ConfigError, DrafterError, NumericalError
from foredraft.types import Draft

_TOLERANCE = 1e-3
"""How far a row may be from summing to one; a float32 softmax over 250k tokens stays under 1e-5."""


def check_chain(draft: Draft, rows: int, numbers: int) -> None:
    """Refuses a tree, and arguments that are not k+1 rows and ``numbers`` (k) uniforms."""
    if draft.parents is not None:
        raise ConfigError("this rule verifies chains, the draft is a tree", field="verify", remedy="use a tree rule")
    if rows != draft.k + 1:
        raise ConfigError(f"{draft.k} drafted tokens need {draft.k + 1} rows of the target, not {rows}", field="p")
    if numbers != draft.k:
        raise ConfigError(f"{draft.k} drafted tokens need {draft.k} uniforms, not {numbers}", field="uniforms")


def target_mass(p: Tensor) -> list[float]:
    """``[k+1, V]`` -> the sum of each row, near one. Raises NumericalError if a row is not a law."""
    for row, mass in enumerate(sums := p.sum(-1).tolist()):
        if not abs(mass - 1.0) < _TOLERANCE:
            raise NumericalError(f"row {row} of the target's probabilities sums to {mass}", field="p")
    return sums


def draft_mass(draft: Draft, vocab_size: int) -> list[float]:
    """The sum of each row of q, near one; ones for a one-hot q. Raises DrafterError on a broken contract."""
    if draft.k and not (min(draft.tokens) >= 0 and max(draft.tokens) < vocab_size):
        raise DrafterError(f"a drafted token is not in [0, {vocab_size})", field="tokens")
    if draft.q is None:
        return [1.0] * draft.k
    if draft.q.shape != (draft.k, vocab_size):
        raise DrafterError(f"q has shape {tuple(draft.q.shape)}, not ({draft.k}, {vocab_size})", field="q")
    for row, mass in enumerate(sums := draft.q.sum(-1).tolist()):
        if not abs(mass - 1.0) < _TOLERANCE:
            raise DrafterError(f"row {row} of q sums to {mass}, so it is not a law", field="q")
        if not draft.q[row, draft.tokens[row]] > 0:
            raise DrafterError(f"token {draft.tokens[row]} was drafted although q gives it no probability", field="q")
    return sums


def ratios(draft: Draft, p: Tensor) -> list[float]:
    """``p_i(x_i) / q_i(x_i)`` of the k drafted tokens, rows of p and q scaled to sum to one."""
    of_p, of_q = target_mass(p), draft_mass(draft, p.shape[-1])
    out = []
    for i, token in enumerate(draft.tokens):
        q = 1.0 if draft.q is None else float(draft.q[i, token]) / of_q[i]
        out.append(float(p[i, token]) / of_p[i] / q)
    return out


def excess(weight: float, draft: Draft, p: Tensor, row: int) -> Tensor:
    """``[V]`` float64: ``max(weight * p - q, 0)`` at a row before k, both rows scaled to sum to one."""
    rest = p[row].double()
    rest = rest * (weight / float(rest.sum()))
    if draft.q is None:
        rest[draft.tokens[row]] = 0.0  # weight * p - 1 is never above 0
        return rest
    q = draft.q[row].double()
    return rest.sub_(q / float(q.sum())).clamp_(min=0.0)


def residual(weight: float, draft: Draft, p: Tensor, row: int) -> Tensor:
    """What the correction at ``row`` is drawn from: the excess, or p itself after the last draft.

    The excess has no mass only if p and q agree to the last digit. Such a row is rejected with probability zero,
    through rounding at most, and p is then the law to draw from.
    """
    if row == draft.k:
        return p[row]
    rest = excess(weight, draft, p, row)
    return rest if float(rest.sum()) > 0.0 else p[row]
