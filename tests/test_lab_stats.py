"""The study's formulas against closed forms, and its intervals against simulation."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from foredraft.lab.stats import (
    expected_accepted,
    fit_alpha,
    mean_interval,
    predicted_speedup,
    ratio_interval,
    sampling_noise,
    share_interval,
    total_variation,
)


@given(alpha=st.floats(0, 0.999), k=st.integers(1, 16))
def test_expected_accepted_is_leviathans(alpha: float, k: int) -> None:
    assert 1 + expected_accepted(alpha, k) == pytest.approx((1 - alpha ** (k + 1)) / (1 - alpha))


@given(alpha=st.floats(0, 1), c=st.floats(0, 2))
def test_one_drafted_token_gains_what_the_paper_says(alpha: float, c: float) -> None:
    assert predicted_speedup(alpha, 1, c) == pytest.approx((1 + alpha) / (1 + c))


def test_alpha_counts_judged_tokens_only() -> None:
    # 2 of 4 accepted, then one rejected: 2 of 3 judged. All 2 of 2 accepted: 2 of 2 judged.
    assert fit_alpha([2, 2], [4, 2]) == pytest.approx(4 / 5)


def test_alpha_is_recovered_from_a_constant_rate() -> None:
    rng = np.random.default_rng(0)
    accepted = [int(np.argmin([*(rng.random(4) < 0.7), False])) for _ in range(20_000)]
    assert fit_alpha(accepted, [4] * len(accepted)) == pytest.approx(0.7, abs=0.01)


def test_intervals_contain_the_truth_about_95_times_in_100() -> None:
    rng = np.random.default_rng(1)
    inside_mean = inside_share = 0
    for _ in range(400):
        low, high = mean_interval(rng.exponential(size=200).tolist())[1]
        inside_mean += low <= 1 <= high
        low, high = share_interval(int((rng.random(60) < 0.9).sum()), 60)
        inside_share += low <= 0.9 <= high
    assert 365 <= inside_mean <= 395
    assert 365 <= inside_share <= 395


def test_ratio_is_of_sums_and_its_interval_surrounds_it() -> None:
    ratio, (low, high) = ratio_interval([2.0, 4.0, 3.0], [1.0, 1.0, 1.0], seed=0)
    assert ratio == pytest.approx(3.0)
    assert 2.0 <= low < ratio < high <= 4.0


def test_total_variation() -> None:
    assert total_variation(np.array([1.0, 0.0]), np.array([0.0, 1.0])) == 1.0
    assert total_variation(np.array([[0.5, 0.5]]), np.array([[0.25, 0.75]])) == pytest.approx([0.25])


def test_noise_band_holds_true_draws_and_excludes_others() -> None:
    law = np.array([0.5, 0.3, 0.15, 0.05])
    mean, (low, high) = sampling_noise(law, 2_000, 2_000, seed=3)
    assert low < mean < high
    rng = np.random.default_rng(4)
    distances = total_variation(rng.multinomial(2_000, law, size=1_000) / 2_000, law)
    assert 0.93 <= float(((distances >= low) & (distances <= high)).mean()) <= 0.97
    other = rng.multinomial(2_000, [0.44, 0.36, 0.15, 0.05]) / 2_000
    assert total_variation(other, law) > high
