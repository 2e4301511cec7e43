"""The instruments themselves: the forking enumeration and the statistics."""

from __future__ import annotations

import pytest
import torch

from foredraft.errors import ConfigError
from foredraft.sampling import draw
from foredraft.testing.fork import Fork, Uniform, outcomes
from foredraft.testing.law import accepted_law, exact_law, expected_tokens, plain_law
from foredraft.testing.stats import goodness_of_fit, total_variation, tv_noise, two_sample
from foredraft.types import Draft
from foredraft.verify import block, rejection


def total(run: object) -> dict[object, float]:
    law: dict[object, float] = {}
    for result, weight in outcomes(run):
        law[result] = law.get(result, 0.0) + weight
    return law


def test_a_comparison_forks_by_the_length_of_the_interval() -> None:
    assert total(lambda fork: Uniform(fork) < 0.3) == pytest.approx({True: 0.3, False: 0.7})
    assert total(lambda fork: Uniform(fork) * 2 < 0.3) == pytest.approx({True: 0.15, False: 0.85})
    assert total(lambda fork: Uniform(fork) / 2 >= 0.3) == pytest.approx({True: 0.4, False: 0.6})
    assert total(lambda fork: Uniform(fork) < float("nan")) == {False: 1.0}
    assert total(lambda fork: Uniform(fork) > float("nan")) == {False: 1.0}
    assert total(lambda fork: Uniform(fork) < 1.5) == {True: 1.0}
    assert total(lambda fork: Uniform(fork) < 0.0) == {False: 1.0}


def test_a_number_remembers_what_is_known_about_it() -> None:
    def run(fork: Fork) -> tuple[bool, bool, bool]:
        u, v = Uniform(fork), Uniform(fork)
        return u < 0.5, u * 4 < 1.0, v < 0.5

    law = total(run)
    assert law[True, True, True] == pytest.approx(0.125)
    assert law[False, False, True] == pytest.approx(0.25)
    assert (False, True, True) not in law
    assert sum(law.values()) == pytest.approx(1.0)


def test_the_real_draw_can_be_enumerated() -> None:
    p = torch.tensor([0.2, 0.0, 0.5, 0.3], dtype=torch.float64)
    assert total(lambda fork: draw(p * 3, Uniform(fork))) == pytest.approx({0: 0.2, 2: 0.5, 3: 0.3})


def test_what_cannot_be_enumerated_is_refused() -> None:
    for misuse in (float, lambda u: u == 0.5, lambda u: u * -1, lambda u: torch.zeros(2) < u, lambda u: u + 1):
        with pytest.raises((TypeError, ValueError)):
            list(outcomes(lambda fork, f=misuse: f(Uniform(fork))))


@pytest.mark.parametrize("rule", [rejection, block])
def test_enumeration_agrees_with_real_uniforms(rule: object) -> None:
    """The verdicts of a dense grid of numbers, against the probabilities of the forks."""
    generator = torch.Generator().manual_seed(1)
    p = torch.randn(3, 3, generator=generator, dtype=torch.float64).softmax(-1)
    q = torch.randn(2, 3, generator=generator, dtype=torch.float64).softmax(-1)
    n = 12
    grid = [(i + 0.5) / n for i in range(n)]
    for tokens in ((0, 1), (2, 2)):
        draft = Draft(tokens, q)
        law = total(lambda fork, d=draft: rule(d, p, [Uniform(fork), Uniform(fork)], Uniform(fork)))
        counts: dict[object, float] = dict.fromkeys(law, 0.0)
        for u in grid:
            for v in grid:
                for w in grid:
                    counts[rule(draft, p, [u, v], w)] += n**-3
        assert sum(abs(counts[x] - law[x]) for x in law) / 2 < 2.0 / n


def test_the_example_of_the_docstring() -> None:
    def p(prefix: tuple[int, ...]) -> torch.Tensor:
        return torch.tensor([0.5, 0.3, 0.2] if sum(prefix) % 2 else [0.1, 0.1, 0.8], dtype=torch.float64)

    def q(prefix: tuple[int, ...]) -> torch.Tensor:
        return torch.tensor([0.2, 0.5, 0.3], dtype=torch.float64)

    law = exact_law(rejection, p, q, k=2, length=3)
    assert torch.allclose(law, plain_law(p, length=3), rtol=0, atol=1e-12)
    assert float(accepted_law("block", p, q, 2).sum()) == pytest.approx(1.0)
    assert 1.0 < expected_tokens("block", p, q, 2) < 3.0


def test_plain_law_is_the_product() -> None:
    p = lambda prefix: torch.tensor([0.25, 0.75] if prefix else [0.5, 0.5], dtype=torch.float64)  # noqa: E731
    assert plain_law(p, 2).tolist() == [[0.125, 0.375], [0.125, 0.375]]
    assert plain_law(p, 1).tolist() == [0.5, 0.5]


def test_the_exact_rule_and_mixed_drafts_are_checked() -> None:
    p = lambda _: torch.tensor([0.5, 0.5], dtype=torch.float64)  # noqa: E731
    with pytest.raises(ConfigError, match="one-hot"):
        exact_law("exact", p, p, 1)
    with pytest.raises(ConfigError, match="positions"):
        exact_law("rejection", p, lambda prefix: 0 if prefix else p(prefix), 2)
    with pytest.raises(ConfigError, match="simulate"):
        accepted_law("coupled", p, p, 1)


def test_chi_square_against_tabled_values() -> None:
    # 3.841, 5.991 and 18.307 are the 95 % points for 1, 2 and 10 degrees of freedom.
    for dof, point in ((1, 3.841), (2, 5.991), (10, 18.307)):
        shift = (point * 10_000 / 2) ** 0.5
        counts = [10_000 + shift, 10_000 - shift] + [10_000] * (dof - 1)
        result = goodness_of_fit(counts, [1 / (dof + 1)] * (dof + 1))
        assert result.dof == dof
        assert result.statistic == pytest.approx(point, rel=1e-6)
        assert result.p_value == pytest.approx(0.05, abs=1e-4)


def test_p_values_are_uniform_under_the_law_and_small_under_another() -> None:
    generator = torch.Generator().manual_seed(0)
    p = torch.tensor([0.5, 0.2, 0.2, 0.1])
    fits, pairs = [], []
    for _ in range(400):
        a, b = (torch.multinomial(p, 1000, True, generator=generator).bincount(minlength=4) for _ in range(2))
        fits.append(goodness_of_fit(a, p).p_value)
        pairs.append(two_sample(a, b).p_value)
    for values in (fits, pairs):
        assert goodness_of_fit(torch.histc(torch.tensor(values), 5, 0, 1), [0.2] * 5).p_value > 1e-4
    other = torch.tensor([0.45, 0.25, 0.2, 0.1])
    c = torch.multinomial(other, 5000, True, generator=generator).bincount(minlength=4)
    assert goodness_of_fit(c, p).p_value < 1e-6
    assert two_sample(a * 5, c).p_value < 1e-3


def test_impossible_tokens_and_small_cells() -> None:
    assert goodness_of_fit([10, 1], [1.0, 0.0]).p_value == 0.0
    assert goodness_of_fit([10, 0], [1.0, 0.0]).p_value == 1.0
    pooled = goodness_of_fit([500, 497, 1, 2], [0.5, 0.497, 0.001, 0.002])
    assert pooled.dof == 2
    assert two_sample([100, 0, 0], [90, 0, 0]).p_value == 1.0


def test_total_variation_and_its_noise() -> None:
    assert total_variation([0.5, 0.5], [1.0, 0.0]) == 0.5
    assert total_variation([2, 2], [0.5, 0.5]) == 0.0
    p = torch.tensor([0.5, 0.3, 0.2])
    band = tv_noise(p, 1000)
    # Mean of |count/n - p| is sqrt(2 p (1 - p) / (pi n)) for large n.
    expected = float((2 * p * (1 - p) / (torch.pi * 1000)).sqrt().sum() / 2)
    assert band.mean == pytest.approx(expected, rel=0.1)
    assert band.mean < band.upper < 4 * band.mean
    assert tv_noise(p, 100_000).upper < band.upper / 5
