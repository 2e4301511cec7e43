"""Small statistics of the study: formulas of Leviathan 2022 (arXiv 2211.17192), intervals, sampling noise."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Z95 = 1.959964
Interval = tuple[float, float]
Law = NDArray[np.float64]


def expected_accepted(alpha: float, k: int) -> float:
    """Mean number of accepted tokens out of ``k`` if each is accepted with probability ``alpha``: Σ αⁱ, i = 1…k."""
    return math.fsum(alpha**i for i in range(1, k + 1))


def predicted_speedup(alpha: float, k: int, c: float, verify: float = 1.0) -> float:
    """Tokens a step over time a step, in target calls.

    Args:
        alpha: Acceptance rate.
        k: Drafted tokens a step.
        c: Draft call over target call of one row.
        verify: Target call of k+1 rows over target call of one row; 1 is the paper's assumption.
    """
    return (1 + expected_accepted(alpha, k)) / (k * c + verify)


def fit_alpha(accepted: Sequence[int], k: Sequence[int]) -> float:
    """Maximum-likelihood α of a constant-rate model: accepted tokens over tokens that were judged.

    A trial judges its accepted tokens and, unless all k were accepted, the one it rejected.
    """
    judged = sum(a + (a < n) for a, n in zip(accepted, k, strict=True))
    return sum(accepted) / judged if judged else math.nan


def mean_interval(values: Sequence[float]) -> tuple[float, Interval]:
    """Mean and its 95 % confidence interval (normal approximation)."""
    array = np.asarray(values, dtype=np.float64)
    half = Z95 * float(array.std(ddof=1)) / math.sqrt(len(array)) if len(array) > 1 else math.nan
    return float(array.mean()), (float(array.mean()) - half, float(array.mean()) + half)


def share_interval(hits: int, n: int) -> Interval:
    """Wilson's 95 % interval of a share."""
    share, z2 = hits / n, Z95**2
    centre = (share + z2 / (2 * n)) / (1 + z2 / n)
    half = Z95 * math.sqrt(share * (1 - share) / n + z2 / (4 * n * n)) / (1 + z2 / n)
    return max(0.0, centre - half), min(1.0, centre + half)


def ratio_interval(baseline_s: Sequence[float], ours_s: Sequence[float], seed: int) -> tuple[float, Interval]:
    """Speed-up ``Σ baseline / Σ ours`` over paired rounds, and its 95 % bootstrap interval over rounds."""
    base, ours = np.asarray(baseline_s), np.asarray(ours_s)
    picks = np.random.default_rng(seed).integers(len(base), size=(2000, len(base)))
    ratios = base[picks].sum(axis=1) / ours[picks].sum(axis=1)
    low, high = np.quantile(ratios, [0.025, 0.975])
    return float(base.sum() / ours.sum()), (float(low), float(high))


def total_variation(p: Law, q: Law) -> Law:
    """½ Σ |p - q| over the last axis."""
    return np.asarray(0.5 * np.abs(p - q).sum(axis=-1))


def sampling_noise(law: Law, samples: int, simulations: int, seed: int) -> tuple[float, Interval]:
    """TV between ``law`` and the frequencies of ``samples`` true draws from it: mean and central 95 % band."""
    counts = np.random.default_rng(seed).multinomial(samples, law / law.sum(), size=simulations)
    distances = total_variation(counts / samples, law)
    low, high = np.quantile(distances, [0.025, 0.975])
    return float(distances.mean()), (float(low), float(high))
