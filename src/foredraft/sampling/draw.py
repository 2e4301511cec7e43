"""Two ways to draw one token from a row of probabilities, given the randomness."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from foredraft.errors import NumericalError
from foredraft.kernels import law as kernel


class Rows(Protocol):
    """``[n, V]`` probabilities of which some rows are looked at: a tensor, or what makes a row when it is asked for."""

    @property
    def shape(self) -> torch.Size: ...

    def __getitem__(self, row: int, /) -> Tensor: ...


class NoiseRow(Protocol):
    """The noise of one position that need not be looked at to run a race: that of ``RequestNoise(seed)``."""

    @property
    def seed(self) -> int: ...
    @property
    def position(self) -> int: ...

    def race(self, p_row: Tensor) -> int:
        """The winner, or -1 if ``p_row`` has no mass or holds NaN."""


@runtime_checkable
class Laws(Rows, Protocol):
    """Rows that are known to be laws, and that tell probabilities without being made."""

    def draw(self, row: int, u: float, weight: float, without: int) -> tuple[int, float] | None:
        """Draws from ``weight`` times a row without one token (-1 for none): token (-1 if nothing is left) and mass.

        None if the row must be made for that.
        """

    def race(self, row: int, noise: NoiseRow) -> int:
        """:func:`race` over one row."""

    def chances(self, tokens: Sequence[int]) -> list[float]:
        """The probability of one token in each of the first rows. Raises NumericalError if one of them is no law."""


def draw(p_row: Tensor, u: float) -> int:
    """Draws by the inverse of the cumulative distribution, in float64.

    Args:
        p_row: ``[V]`` probabilities; they need not sum to one.
        u: Uniform in ``[0, 1)``.

    Returns:
        A token of positive probability: ``x`` with ``cdf(x-1) <= u < cdf(x)``.

    Raises:
        NumericalError: The row holds NaN or infinity, or has no mass.
    """
    if type(u) is float and kernel.suits(p_row):
        token, mass = kernel.draw(p_row, u)
        if token < 0:
            raise NumericalError(f"a row of probabilities sums to {mass}", field="p")
        return token
    cdf = torch.cumsum(p_row.detach(), 0, dtype=torch.float64).cpu().numpy()
    total = float(cdf[-1])
    if not 0.0 < total < float("inf"):
        raise NumericalError(f"a row of probabilities sums to {total}", field="p")
    # The search ends at the last token that has mass, even if u is (rounded to) 1.
    end = int(cdf.searchsorted(total))
    return bisect_right(cdf, u * total, 0, end)


def masses(rows: Tensor, tokens: Sequence[int]) -> tuple[list[float], list[float], list[float]]:
    """Of ``[n, V]`` rows: their sums, their least entries, and those of the first rows at one token each."""
    if kernel.suits(rows):
        return kernel.masses(rows, tokens)
    picked = [float(rows[i, token]) for i, token in enumerate(tokens)]
    return rows.sum(-1).tolist(), rows.amin(-1).tolist(), picked


def race(p_row: Tensor, exponentials: Tensor | NoiseRow) -> int:
    """Draws ``argmin_x E_x / p_x`` over the support, lowest id on ties.

    With independent standard exponentials this has exactly the law p: it is Gumbel-max sampling,
    ``argmax_x log p_x - log E_x``, without the logarithms.

    Args:
        p_row: ``[V]`` probabilities; they need not sum to one.
        exponentials: ``[V]`` float64, above 0; or a row that runs the race itself.

    Raises:
        NumericalError: The row holds NaN or infinity, or has no mass.
    """
    if not isinstance(exponentials, Tensor):
        winner = exponentials.race(p_row)
        if winner < 0:
            raise NumericalError(f"a row of probabilities sums to {float(p_row.sum())}", field="p")
        return winner
    p = p_row.detach().double()
    total = float(p.sum())
    if not 0.0 < total < float("inf"):
        raise NumericalError(f"a row of probabilities sums to {total}", field="p")
    return int((exponentials.to(p.device) / p).argmin())
