"""The rules one by one: what they accept, what they refuse, and what no input may make them do."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from foredraft.errors import ConfigError, DrafterError, NumericalError
from foredraft.types import NO_DRAFT, Draft, Verdict
from foredraft.verify import block, coupled, exact, rejection

LAST = 1.0 - 2.0**-53
SAMPLED = [rejection, block]


def rows(*values: list[float]) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def test_exact_accepts_the_common_prefix() -> None:
    assert exact(Draft((1, 2, 3)), [1, 2, 3, 4]) == Verdict(3, 4, True, (0, 1, 2))
    assert exact(Draft((1, 2, 3)), [1, 0, 3, 4]) == Verdict(1, 0, False, (0,))
    assert exact(Draft((9,)), [1, 2]) == Verdict(0, 1, False, ())
    assert exact(NO_DRAFT, [5]) == Verdict(0, 5, True, ())


@pytest.mark.parametrize("rule", SAMPLED)
@pytest.mark.parametrize("u", [0.0, 0.3, LAST])
def test_greedy_target_writes_its_argmax(rule: Any, u: float) -> None:
    """Draft p(a)=.2 is its top token, the target has p(a)=.3, p(b)=.5: at T=0 always b."""
    one_hot = rows([0, 1, 0], [0, 1, 0])
    assert rule(Draft((0,)), one_hot, [u], u) == Verdict(0, 1, False, ())
    assert rule(Draft((0,), rows([0.4, 0.3, 0.3])), one_hot, [u], u) == Verdict(0, 1, False, ())
    assert rule(Draft((1,)), one_hot, [u], u) == Verdict(1, 1, True, (0,))


@pytest.mark.parametrize("rule", SAMPLED)
def test_acceptance_and_correction(rule: Any) -> None:
    p, q = rows([0.5, 0.3, 0.2], [0.1, 0.2, 0.7]), rows([0.2, 0.5, 0.3])
    assert rule(Draft((1,), q), p, [0.599], 0.05).accepted == 1  # .3 / .5
    assert rule(Draft((1,), q), p, [0.601], 0.05) == Verdict(0, 0, False, ())  # only token 0 gains
    assert rule(Draft((0,), q), p, [LAST], 0.25) == Verdict(1, 1, True, (0,))
    assert rule(NO_DRAFT, p[:1], [], 0.6) == Verdict(0, 1, True, ())


@pytest.mark.parametrize("rule", SAMPLED)
def test_a_draft_that_was_not_sampled_is_never_its_own_correction(rule: Any) -> None:
    p = rows([0.5, 0.3, 0.2], [1, 0, 0])
    assert rule(Draft((0,)), p, [0.49], 0.0).accepted == 1
    assert {rule(Draft((0,)), p, [0.5], u).next_token for u in (0.0, 0.59, 0.61, LAST)} == {1, 2}


@pytest.mark.parametrize("rule", SAMPLED)
def test_zero_probability_is_never_accepted(rule: Any) -> None:
    p, q = rows([0, 1], [1, 0]), rows([1, 0])
    assert rule(Draft((0,), q), p, [0.0], 0.0) == Verdict(0, 1, False, ())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("rule", SAMPLED)
def test_equal_laws_always_accept(rule: Any, dtype: torch.dtype) -> None:
    p = torch.randn(4, 1000, generator=torch.Generator().manual_seed(0), dtype=dtype).softmax(-1)
    assert rule(Draft((5, 6, 7), p[:3].clone()), p, [LAST] * 3, LAST).accepted == 3


def test_excess_without_mass_falls_back_to_the_target() -> None:
    """Only rounding can lead there: p and q agree, and yet the row is asked for a correction."""
    from foredraft.verify._chain import Chain

    p = rows([0.25, 0.25, 0.5], [1, 0, 0])
    chain = Chain(Draft((0,), p[:1].clone()), p)
    assert chain.excess_mass(1.0, 0) == 0.0
    assert [chain.next_token(1.0, 0, u) for u in (0.1, 0.3, 0.6)] == [0, 1, 2]


BAD_TARGETS = [math.nan, math.inf, -1.0]


@settings(max_examples=150, deadline=None)
@given(
    st.sampled_from(BAD_TARGETS),
    st.integers(0, 2),
    st.integers(0, 3),
    st.floats(0, LAST),
    st.sampled_from(["rejection", "block", "coupled"]),
    st.booleans(),
)
def test_broken_rows_never_become_a_token(bad: float, row: int, x: int, u: float, name: str, in_q: bool) -> None:
    V = 4
    p = torch.full((3, V), 0.25)
    q = torch.full((2, V), 0.25)
    (q[min(row, 1)] if in_q else p[row])[x] = bad
    draft = Draft((1, 2), q)
    try:
        if name == "coupled":
            verdict = coupled(draft, p, torch.ones(3, V, dtype=torch.float64))
        else:
            verdict = {"rejection": rejection, "block": block}[name](draft, p, [u, u], u)
    except (NumericalError, DrafterError):
        return
    assert name == "coupled"  # it needs no q, and reads no row past the first mismatch
    assert 0 <= verdict.next_token < V


def test_whose_fault_a_broken_row_is() -> None:
    p, q = torch.full((2, 2), 0.5), torch.full((1, 2), 0.5)
    nan = torch.tensor([[0.5, math.nan]])
    for rule in SAMPLED:
        with pytest.raises(NumericalError, match="row 1"):
            rule(Draft((0,), q), torch.cat((q, nan)), [0.5], 0.5)
        with pytest.raises(DrafterError, match="row 0"):
            rule(Draft((0,), nan), p, [0.5], 0.5)
        with pytest.raises(DrafterError, match="no probability"):
            rule(Draft((0,), torch.tensor([[0.0, 1.0]])), p, [0.5], 0.5)
        for token in (-1, 2):
            with pytest.raises(DrafterError, match="not in"):
                rule(Draft((token,)), p, [0.5], 0.5)
        with pytest.raises(DrafterError, match="shape"):
            rule(Draft((0, 1), q), torch.full((3, 2), 0.5), [0.5] * 2, 0.5)
    for token in (-1, 2):
        with pytest.raises(DrafterError, match="not in"):
            coupled(Draft((token,)), p, torch.ones(2, 2))


def test_shapes_and_trees_are_refused() -> None:
    p = torch.full((3, 2), 0.5)
    tree = Draft((0, 1), None, (-1, -1))
    noise = torch.ones(3, 2)
    for call in (
        lambda draft, p: rejection(draft, p, [0.5] * draft.k, 0.5),
        lambda draft, p: block(draft, p, [0.5] * draft.k, 0.5),
        lambda draft, p: coupled(draft, p, noise),
        lambda draft, p: exact(draft, p.argmax(-1).tolist()),
    ):
        with pytest.raises(ConfigError, match="tree"):
            call(tree, p)
        with pytest.raises(ConfigError):
            call(Draft((0,)), p)
        assert call(Draft((0, 1)), p).next_token in (0, 1)
    for rule in SAMPLED:
        with pytest.raises(ConfigError, match="uniforms"):
            rule(Draft((0, 1)), p, [0.5], 0.5)
    with pytest.raises(ConfigError, match="noise"):
        coupled(Draft((0, 1)), p, noise[:2])


def test_rules_change_none_of_their_arguments() -> None:
    p = torch.randn(3, 5, dtype=torch.float64).softmax(-1)
    q = torch.randn(2, 5, dtype=torch.float64).softmax(-1)
    before = p.clone(), q.clone()
    for rule in SAMPLED:
        for draft in (Draft((0, 1), q), Draft((0, 1))):
            rule(draft, p, [LAST, LAST], 0.5)
    assert torch.equal(p, before[0])
    assert torch.equal(q, before[1])
