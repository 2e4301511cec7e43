"""What all rules for chains check first, that p and q are laws, and what a correction is drawn from."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from foredraft.errors import ConfigError, DrafterError, NumericalError
from foredraft.kernels import law as kernel
from foredraft.sampling.draw import Laws, draw, masses
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
    return _target_masses(p, ())[0]


def draft_mass(draft: Draft, vocab_size: int) -> list[float]:
    """The sum of each row of q, near one; ones for a one-hot q. Raises DrafterError on a broken contract."""
    return _draft_masses(draft, vocab_size)[0]


def _target_masses(p: Tensor, tokens: Sequence[int]) -> tuple[list[float], list[float]]:
    """The sum of each row, and the probability of one token in each of the first rows."""
    sums, _, picked = masses(p, tokens)
    for row, mass in enumerate(sums):
        if not abs(mass - 1.0) < _TOLERANCE:
            raise NumericalError(f"row {row} of the target's probabilities sums to {mass}", field="p")
    return sums, picked


def _draft_masses(draft: Draft, vocab_size: int) -> tuple[list[float], list[float]]:
    """The sum of each row of q, and the probability of its drafted token."""
    if draft.k and not (min(draft.tokens) >= 0 and max(draft.tokens) < vocab_size):
        raise DrafterError(f"a drafted token is not in [0, {vocab_size})", field="tokens")
    if draft.q is None:
        return [1.0] * draft.k, [1.0] * draft.k
    if draft.q.shape != (draft.k, vocab_size):
        raise DrafterError(f"q has shape {tuple(draft.q.shape)}, not ({draft.k}, {vocab_size})", field="q")
    sums, _, picked = masses(draft.q, draft.tokens)
    for row, mass in enumerate(sums):
        if not abs(mass - 1.0) < _TOLERANCE:
            raise DrafterError(f"row {row} of q sums to {mass}, so it is not a law", field="q")
        if not picked[row] > 0:
            raise DrafterError(f"token {draft.tokens[row]} was drafted although q gives it no probability", field="q")
    return sums, picked


class Chain:
    """A draft of k tokens beside the target's law; rows of p and q count as scaled to sum to one.

    Args:
        p: ``[k+1, V]``. Of :class:`~foredraft.sampling.draw.Laws` only rows are made that something is drawn from.

    Attributes:
        draft: The draft.
        ratios: ``p_i(x_i) / q_i(x_i)`` of its tokens.

    Raises:
        NumericalError: A row of p is not a law.
        DrafterError: A row of q is not a law, or the token cannot have been drawn from it.
    """

    def __init__(self, draft: Draft, p: Tensor | Laws) -> None:
        self.draft, self.p = draft, p
        self._of_q, of_x = _draft_masses(draft, p.shape[-1])  # first: it checks the tokens, too
        if isinstance(p, Tensor):
            self._of_p, chances = _target_masses(p, draft.tokens)
        else:
            self._of_p, chances = [1.0] * p.shape[0], p.chances(draft.tokens)
        self.ratios = [
            chance / of_p / (x / of_q)
            for chance, of_p, x, of_q in zip(chances, self._of_p, of_x, self._of_q, strict=False)
        ]

    def excess_mass(self, weight: float, row: int) -> float:
        """The sum of ``max(weight * p - q, 0)`` at a row before k."""
        if self.draft.q is None:  # all of weight * p but the drafted token's part: no look at the vocabulary
            return weight * (1.0 - self.ratios[row])
        p = self.p[row]
        return self._draw(p, weight, row, -1.0)[1] if self._fits(p) else float(self._excess(p, weight, row).sum())

    def next_token(self, weight: float, row: int, u: float) -> int:
        """Draws the correction at ``row`` from ``max(weight * p - q, 0)``, or from p itself after the last draft.

        The excess has no mass only if p and q agree to the last digit. Such a row is rejected with probability zero,
        through rounding at most, and p is then the law to draw from.
        """
        if not isinstance(self.p, Tensor) and (row == self.draft.k or self.draft.q is None) and type(u) is float:
            rest = (weight, self.draft.tokens[row]) if row < self.draft.k else (1.0, -1)
            found = self.p.draw(row, u, *rest)
            if found is not None and found[0] >= 0:
                return found[0]
        p = self.p[row]
        if row < self.draft.k:
            if self._fits(p) and type(u) is float:
                token, mass = self._draw(p, weight, row, u)
                if mass > 0.0:
                    return token
            else:
                excess = self._excess(p, weight, row)
                if float(excess.sum()) > 0.0:
                    return draw(excess, u)
        return draw(p, u)

    def _fits(self, p: Tensor) -> bool:
        q = self.draft.q
        return kernel.suits(p) and (q is None or (q.dtype == p.dtype and kernel.suits(q)))

    def _draw(self, p: Tensor, weight: float, row: int, u: float) -> tuple[int, float]:
        """The token and the excess' mass, by the kernels."""
        weight /= self._of_p[row]
        if self.draft.q is None:
            return kernel.draw(p, u, weight, without=self.draft.tokens[row])
        return kernel.draw(p, u, weight, self.draft.q[row], 1.0 / self._of_q[row])

    def _excess(self, p: Tensor, weight: float, row: int) -> Tensor:
        """``[V]`` float64."""
        rest = p.to(torch.float64, copy=True).mul_(weight / self._of_p[row])
        if self.draft.q is None:
            rest[self.draft.tokens[row]] = 0.0  # weight * p - 1 is never above 0
            return rest
        return rest.sub_(self.draft.q[row].to(rest) / self._of_q[row]).clamp_(min=0.0)
