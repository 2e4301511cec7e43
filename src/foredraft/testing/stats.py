"""Statistics for samples of tokens: goodness of fit, two-sample tests, total variation and its sampling noise."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class ChiSquare:
    """A chi-square test.

    Attributes:
        statistic: Pearson's statistic.
        dof: Degrees of freedom.
        p_value: Probability of a statistic at least as large if the samples have the law.
    """

    statistic: float
    dof: int
    p_value: float


def goodness_of_fit(
    counts: Sequence[float] | Tensor, law: Sequence[float] | Tensor, *, pool_below: float = 5.0
) -> ChiSquare:
    """Whether samples have a given law.

    Args:
        counts: ``[V]`` occurrences.
        law: ``[V]`` probabilities.
        pool_below: Cells that expect fewer occurrences than this are counted as one, as the test needs.

    A token of probability zero that occurs is a fault at once: p_value 0.
    """
    seen, p = _float64(counts), _float64(law)
    if bool((seen[p == 0] > 0).any()):
        return ChiSquare(float("inf"), 1, 0.0)
    seen, p = seen[p > 0], p[p > 0]
    expected = p / p.sum() * seen.sum()
    seen, expected = _pool(torch.stack((seen, expected)), expected < pool_below)
    return _result(float(((seen - expected) ** 2 / expected).sum()), seen.shape[0] - 1)


def two_sample(a: Sequence[float] | Tensor, b: Sequence[float] | Tensor, *, pool_below: float = 5.0) -> ChiSquare:
    """Whether two sets of samples, ``[V]`` occurrences each, have one law, be it known or not."""
    table = torch.stack((_float64(a), _float64(b)))
    sizes = table.sum(-1, keepdim=True)
    table = table[:, table.sum(0) > 0]
    expected = sizes * table.sum(0) / sizes.sum()
    table = _pool(table, expected.amin(0) < pool_below)
    expected = sizes * table.sum(0) / sizes.sum()
    return _result(float(((table - expected) ** 2 / expected).sum()), table.shape[1] - 1)


def total_variation(p: Sequence[float] | Tensor, q: Sequence[float] | Tensor) -> float:
    """``½ Σ |p - q|`` in [0, 1]; counts are normalised first."""
    a, b = _float64(p), _float64(q)
    return float((a / a.sum() - b / b.sum()).abs().sum() / 2)


@dataclass(frozen=True, slots=True)
class NoiseBand:
    """What total variation from its own law a sample of n tokens shows: mean, and the quantile ``level``."""

    mean: float
    upper: float
    level: float
    n: int


def tv_noise(
    law: Sequence[float] | Tensor, n: int, *, level: float = 0.95, trials: int = 1000, seed: int = 0
) -> NoiseBand:
    """The total variation that n direct samples of ``law`` show from it, by simulation of ``trials`` samples."""
    p = _float64(law)
    p = p / p.sum()
    counts = np.random.default_rng(seed).multinomial(n, p.numpy(), size=trials)
    tv = (torch.from_numpy(counts) / n - p).abs().sum(-1) / 2
    return NoiseBand(float(tv.mean()), float(tv.quantile(level)), level, n)


def _float64(values: Sequence[float] | Tensor) -> Tensor:
    return torch.as_tensor(values, dtype=torch.float64)


def _pool(table: Tensor, small: Tensor) -> Tensor:
    """Adds up the columns marked small."""
    if not bool(small.any()):
        return table
    return torch.cat((table[:, ~small], table[:, small].sum(-1, keepdim=True)), -1)


def _result(statistic: float, dof: int) -> ChiSquare:
    if dof < 1:
        return ChiSquare(statistic, 0, 1.0)
    tail = torch.special.gammaincc(
        torch.tensor(dof / 2, dtype=torch.float64), torch.tensor(statistic / 2, dtype=torch.float64)
    )
    return ChiSquare(statistic, dof, float(tail))
