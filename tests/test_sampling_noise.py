"""The request's random numbers, and the two ways to turn them into tokens."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from foredraft import kernels
from foredraft.errors import NumericalError
from foredraft.sampling import Purpose, RequestNoise, draw, fresh_seed, race
from foredraft.testing.stats import goodness_of_fit

LAST = 1.0 - 2.0**-53


def test_the_stream_never_changes() -> None:
    noise = RequestNoise(7)
    assert noise.uniform(Purpose.DRAFT, 3, 2) == 0.8012901322762435
    assert noise.uniform(Purpose.NEXT, 3, 3) == 0.9411378959439832
    assert noise.exponentials(5, 3).tolist() == pytest.approx(
        [0.5510818488806876, 0.652245223386638, 0.4941301690997139], rel=1e-14
    )


def test_numbers_depend_on_the_key_only() -> None:
    keys = [(purpose, position, anchor) for purpose in Purpose for position in range(4) for anchor in range(4)]
    forward = [RequestNoise(1).uniform(*key) for key in keys]
    shared = RequestNoise(1)
    backward = [shared.uniform(*key) for key in reversed(keys)][::-1]
    assert forward == backward
    assert len(set(forward)) == len(keys)
    assert not set(forward) & {RequestNoise(2).uniform(*key) for key in keys}


def test_exponentials_are_prefix_stable_and_cached() -> None:
    noise = RequestNoise(11)
    short, long = noise.exponentials(4, 5).clone(), noise.exponentials(4, 1000)
    assert torch.equal(short, long[:5])
    assert noise.exponentials(4, 1000).data_ptr() == long.data_ptr()
    for position in range(100):
        noise.exponentials(position, 2)
    assert torch.equal(noise.exponentials(4, 1000), long)
    assert len(noise._rows) < 20
    assert bool((long > 0).all())
    assert long.dtype == torch.float64


def test_numbers_are_uniform_and_exponential() -> None:
    noise = RequestNoise(3)
    uniforms = torch.tensor([noise.uniform(Purpose.ACCEPT, i, i // 3) for i in range(20_000)])
    assert goodness_of_fit(torch.histc(uniforms, 20, 0, 1), [0.05] * 20).p_value > 1e-4
    exponentials = noise.exponentials(0, 200_000)
    assert goodness_of_fit(torch.histc((-exponentials).exp(), 50, 0, 1), [0.02] * 50).p_value > 1e-4


def test_fresh_seeds_differ_and_fit() -> None:
    seeds = {fresh_seed() for _ in range(100)}
    assert len(seeds) == 100
    assert all(0 <= seed < 2**63 for seed in seeds)
    RequestNoise(2**63 - 1).uniform(Purpose.DRAFT, 0, 0)


@pytest.mark.parametrize("u", [0.0, 0.5, LAST, 1.0])
@pytest.mark.parametrize(
    "row", [[0.0, 0.3, 0.0, 0.7, 0.0], [1.0], [0.0, 0.0, 1e-300], [0.1] * 10, [0.0, 1 / 3, 1 / 3, 1 / 3, 0.0]]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_draw_gives_a_token_with_mass(u: float, row: list[float], dtype: torch.dtype) -> None:
    p = torch.tensor(row, dtype=dtype)
    if float(p.sum()) > 0:
        assert p[draw(p, u)] > 0


def test_draw_inverts_the_distribution() -> None:
    p = torch.tensor([0.25, 0.0, 0.5, 0.25])
    assert [draw(p, u) for u in (0.0, 0.2499, 0.25, 0.7499, 0.75, LAST)] == [0, 0, 2, 2, 3, 3]
    assert draw(p * 8, 0.75) == 3


def test_race_has_the_law_and_stays_in_the_support() -> None:
    noise = RequestNoise(5)
    p = torch.tensor([0.5, 0.0, 0.3, 0.2])
    counts = torch.bincount(torch.tensor([race(p, noise.exponentials(i, 4)) for i in range(6_000)]), minlength=4)
    assert goodness_of_fit(counts, p).p_value > 1e-4


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_broken_rows_are_refused(bad: float) -> None:
    row = torch.tensor([0.5, bad, 0.5])
    with pytest.raises(NumericalError):
        draw(row, 0.9)
    with pytest.raises(NumericalError):
        race(row, torch.ones(3, dtype=torch.float64))
    with pytest.raises(NumericalError):
        draw(torch.zeros(3), 0.5)
    with pytest.raises(NumericalError):
        race(torch.zeros(3), torch.ones(3, dtype=torch.float64))


def test_the_most_extreme_words_give_finite_positive_noise(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "available", lambda: False)
    extremes = np.array([0, 2**64 - 1], dtype=np.uint64)
    monkeypatch.setattr(RequestNoise, "_words", lambda self, purpose, position, anchor, n: extremes)
    noise = RequestNoise(0).exponentials(0, 2)
    assert bool((noise > 0).all())
    assert bool(noise.isfinite().all())
    assert RequestNoise(0).uniform(Purpose.NEXT, 0, 0) == 0.0
    extremes = extremes[::-1].copy()
    assert RequestNoise(0).uniform(Purpose.NEXT, 0, 0) == LAST
