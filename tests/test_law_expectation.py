"""How much the rules accept: closed forms, known figures, and block verification against token-wise rejection."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from foredraft.sampling import draw
from foredraft.testing.law import accepted_law, exact_law, expected_tokens, plain_law
from foredraft.types import Draft, Verdict
from foredraft.verify import block, rejection

SEEDS = st.integers(0, 2**31)


def law(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def random_model(seed: int, V: int = 3, sharp: float = 2.0) -> object:
    def row(prefix: tuple[int, ...]) -> Tensor:
        generator = torch.Generator().manual_seed(hash((seed, *prefix)) % 2**31)
        return (torch.randn(V, generator=generator, dtype=torch.float64) * sharp).softmax(-1)

    return row


@pytest.mark.parametrize("k", [1, 2, 3, 4])
def test_expected_tokens_have_the_closed_form(k: int) -> None:
    p, q = law(0.5, 0.3, 0.2), law(0.2, 0.5, 0.3)
    alpha = float(torch.minimum(p, q).sum())
    got = expected_tokens(rejection, lambda _: p, lambda _: q, k)
    assert got == pytest.approx((1 - alpha ** (k + 1)) / (1 - alpha), abs=1e-12)


def test_acceptance_of_three_ways_to_draft() -> None:
    """p=[.5,.3,.2], q=[.2,.5,.3]: .70 by the ratio test, .31 by matching independent draws, .30 by argmax drafts."""
    p, q = law(0.5, 0.3, 0.2), law(0.2, 0.5, 0.3)

    def matching(draft: Draft, p: Tensor, uniforms: Sequence[float], next_uniform: float) -> Verdict:
        token = draw(p[0], uniforms[0])
        matched = token == draft.tokens[0]
        return Verdict.chain(1, draw(p[1], next_uniform), 1) if matched else Verdict.chain(0, token, 1)

    for rule, proposal, rate in (
        (rejection, lambda _: q, 0.7),
        (block, lambda _: q, 0.7),
        (matching, lambda _: q, 0.31),
        (rejection, lambda _: 1, 0.3),
        (block, lambda _: 1, 0.3),
    ):
        assert float(accepted_law(rule, lambda _: p, proposal, 1)[1]) == pytest.approx(rate, abs=1e-12)
        emitted = exact_law(rule, lambda _: p, proposal, 1, 2)
        assert torch.allclose(emitted, plain_law(lambda _: p, 2), rtol=0, atol=1e-12)


def test_block_on_the_papers_example() -> None:
    """Two tokens, p=(1/3, 2/3), q=(2/3, 1/3): 10/9 accepted token by token, 11/9 as a block."""
    p, q = law(1 / 3, 2 / 3), law(2 / 3, 1 / 3)
    assert expected_tokens(rejection, lambda _: p, lambda _: q, 2) - 1 == pytest.approx(10 / 9, abs=1e-12)
    assert expected_tokens(block, lambda _: p, lambda _: q, 2) - 1 == pytest.approx(11 / 9, abs=1e-12)


@settings(max_examples=40, deadline=None)
@given(SEEDS, st.integers(1, 3), st.sampled_from([0.5, 2.0, 5.0]))
def test_block_never_accepts_fewer(seed: int, k: int, sharp: float) -> None:
    p, q = random_model(seed, sharp=sharp), random_model(seed + 1, sharp=sharp)
    token_wise = accepted_law(rejection, p, q, k)
    as_block = accepted_law(block, p, q, k)
    assert float(as_block.sum()) == pytest.approx(1.0, abs=1e-12)
    # Not only on average: at least i tokens are accepted at least as often, for every i.
    tails = [law.flip(0).cumsum(0) for law in (as_block, token_wise)]
    assert bool((tails[0] >= tails[1] - 1e-12).all())
    if k == 1:
        assert torch.allclose(as_block, token_wise, rtol=0, atol=1e-12)


@settings(max_examples=20, deadline=None)
@given(SEEDS, st.integers(1, 4))
def test_block_equals_rejection_for_drafts_that_were_not_drawn(seed: int, k: int) -> None:
    p, top = random_model(seed), random_model(seed + 1)
    proposal = lambda prefix: int(top(prefix).argmax())  # noqa: E731
    rules = [accepted_law(rule, p, proposal, k) for rule in (rejection, block)]
    assert torch.allclose(*rules, rtol=0, atol=1e-12)


@pytest.mark.parametrize("rule", [rejection, block])
def test_a_perfect_drafter_is_always_accepted(rule: object) -> None:
    p = random_model(5)
    assert accepted_law(rule, p, p, 3).tolist() == pytest.approx([0, 0, 0, 1], abs=1e-12)
    near = lambda prefix: (row := p(prefix).float().double()) / row.sum()  # noqa: E731
    assert expected_tokens(rule, p, near, 3) == pytest.approx(4.0, abs=1e-6)
