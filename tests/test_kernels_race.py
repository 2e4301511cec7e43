"""The compiled race against the one with the noise in memory: the same winner for every row, seed and position."""

from __future__ import annotations

import time

import pytest
import torch

from foredraft import kernels
from foredraft.errors import NumericalError
from foredraft.sampling.draw import race
from foredraft.sampling.noise import RequestNoise

pytestmark = pytest.mark.skipif(not kernels.available(), reason=f"no kernels: {kernels.why_unavailable()}")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("vocab", [1, 2, 5, 127, 1000])
@pytest.mark.parametrize("spread", [0.0, 1.0, 6.0])
def test_the_winner_is_the_same(dtype: torch.dtype, vocab: int, spread: float) -> None:
    generator = torch.Generator().manual_seed(vocab)
    for position in range(60):
        p = torch.softmax(spread * torch.randn(vocab, generator=generator, dtype=dtype), -1)
        p = torch.where(torch.rand(vocab, generator=generator) < 0.3, 0.0, p)  # as filters leave it
        p[-1] = 0.1
        seed = 2**63 - 1 - position
        plain, compiled = RequestNoise(seed), RequestNoise(seed, kernels.race)
        assert race(p, compiled.row(position, vocab)) == race(p, plain.row(position, vocab))


def test_every_token_wins_as_often_as_it_should() -> None:
    p = torch.tensor([0.5, 0.3, 0.0, 0.2])
    noise = RequestNoise(11, kernels.race)
    wins = torch.bincount(torch.tensor([race(p, noise.row(t, 4)) for t in range(20000)]), minlength=4) / 20000
    assert torch.allclose(wins, p, atol=0.015)
    assert wins[2] == 0


@pytest.mark.parametrize("p", [[0.0, 0.0], [0.5, float("nan")], [float("inf"), 0.5]])
def test_a_row_without_a_law_is_refused(p: list[float]) -> None:
    with pytest.raises(NumericalError, match="sums to"):
        race(torch.tensor(p), RequestNoise(1, kernels.race).row(0, 2))


def test_it_is_much_quicker_than_making_the_noise() -> None:
    p = torch.softmax(3 * torch.randn(50000, generator=torch.Generator().manual_seed(0)), -1)

    def quickest(noise: RequestNoise) -> float:
        best = 1.0
        for position in range(12):
            started = time.perf_counter()
            race(p, noise.row(position, 50000))
            best = min(best, time.perf_counter() - started)
        return best

    assert quickest(RequestNoise(1, kernels.race)) < 0.8 * quickest(RequestNoise(1))
