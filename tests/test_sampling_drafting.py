"""The sampler that drafters draw with."""

from __future__ import annotations

import pytest
import torch

from foredraft.config import SamplingParams
from foredraft.drafters.base import DraftSampler
from foredraft.errors import DrafterError
from foredraft.kernels import available
from foredraft.sampling import Purpose, RequestNoise, RequestSampler, TokenLaw, draw, race

V = 5
LOGITS = torch.tensor([0.1, 1.0, -0.5, 0.9, 0.0])
PARAMS = SamplingParams(temperature=0.7, top_k=3, frequency_penalty=1.5)


def sampler(rule: str, params: SamplingParams = PARAMS, anchor: int = 4) -> RequestSampler:
    made = RequestSampler(TokenLaw(params, [0], V), RequestNoise(3), rule)
    made.anchor = anchor
    return made


@pytest.mark.parametrize("rule", ["rejection", "block"])
def test_sampled_drafts_come_with_the_filtered_law_they_were_drawn_from(rule: str) -> None:
    contract: DraftSampler = sampler(rule)
    token, q = contract.draw(LOGITS, (1,))
    assert q is not None
    assert torch.equal(q, TokenLaw(PARAMS, [0], V).probs(LOGITS[None], [(1,)])[0])
    assert int((q > 0).sum()) == 3
    assert token == draw(q, RequestNoise(3).uniform(Purpose.DRAFT, 5, 4))


def test_each_step_draws_anew() -> None:
    flat = SamplingParams(temperature=1.0)
    drawn = {
        anchor: sampler("block", flat, anchor).draw(torch.zeros(V), (1,) * (20 - anchor))[0] for anchor in range(20)
    }
    assert len(set(drawn.values())) > 1


def test_coupled_drafts_race_with_the_noise_of_their_position() -> None:
    law = TokenLaw(PARAMS, [0], V).probs(LOGITS[None], [(1, 2)])[0]
    for anchor in range(2, 9):
        token, q = sampler("coupled", anchor=anchor).draw(LOGITS, (1, 2))
        assert q is None
        assert token == race(law, RequestNoise(3).exponentials(anchor + 2, V))


def test_greedy_drafts_are_the_argmax_after_processors() -> None:
    greedy = SamplingParams(frequency_penalty=2.0)
    assert sampler("exact", greedy).draw(LOGITS, ()) == (1, None)
    assert sampler("exact", greedy).draw(LOGITS, (1,)) == (3, None)


@pytest.mark.parametrize("rule", ["exact", "rejection", "block", "coupled"])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_broken_drafter_logits_are_the_drafters_fault(rule: str, bad: float) -> None:
    logits = LOGITS.clone()
    logits[2] = bad
    with pytest.raises(DrafterError):
        sampler(rule).draw(logits, ())
    with pytest.raises(DrafterError):
        sampler(rule).draw(LOGITS[None], ())
    with pytest.raises(DrafterError):
        sampler(rule).draw(LOGITS[:-1], ())


IDS = torch.tensor([0, 2, 3])
"""Tokens of a drafter that cannot propose the others."""


def wide(logits: torch.Tensor) -> torch.Tensor:
    rows = torch.full((*logits.shape[:-1], V), -torch.inf)
    rows[..., IDS] = logits
    return rows


@pytest.mark.parametrize("rule", ["exact", "rejection", "block", "coupled"])
@pytest.mark.parametrize("params", [SamplingParams(temperature=0.7, top_k=2, frequency_penalty=1.5), SamplingParams()])
def test_logits_of_some_tokens_are_those_of_a_law_without_the_others(rule: str, params: SamplingParams) -> None:
    logits = torch.randn(40, len(IDS), generator=torch.Generator().manual_seed(8))
    for row in logits:
        token, q = sampler(rule, params).draw(row, (3,), IDS)
        expected, law = sampler(rule, params).draw(wide(row), (3,))
        assert token == expected
        assert (q is None and law is None) or torch.equal(q, law)  # type: ignore[arg-type]
    paths = [(i % V,) for i in range(len(logits))]
    counts = [1 + i % 4 for i in range(len(logits))]
    some = sampler(rule, params).children(logits, paths, counts, IDS)
    every = sampler(rule, params).children(wide(logits), paths, counts)
    assert [children.tokens for children in some] == [children.tokens for children in every]
    for mine, theirs in zip(some, every, strict=True):
        assert mine.weights == pytest.approx(theirs.weights, rel=1e-5)
        assert (mine.q is None and theirs.q is None) or torch.equal(mine.q, theirs.q)  # type: ignore[arg-type]


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_broken_logits_of_some_tokens_are_the_drafters_fault(bad: float) -> None:
    greedy = sampler("exact", SamplingParams())
    logits = torch.full((2, len(IDS)), bad) if bad < 0 else torch.tensor([[0.0, 1.0, 2.0], [0.0, bad, 2.0]])
    with pytest.raises(DrafterError):
        greedy.children(logits, [(), (1,)], [2, 2], IDS)
    with pytest.raises(DrafterError):
        greedy.children(torch.zeros(2, V), [(), (1,)], [2, 2], IDS)
    with pytest.raises(DrafterError):
        greedy.draw(logits[1], (), IDS)


def test_only_what_changes_no_logits_is_chosen_ahead() -> None:
    greedy = sampler("exact", SamplingParams()).ahead(3)
    assert greedy is not None
    assert (greedy.count, greedy.controls) == (3, None)
    assert sampler("exact", SamplingParams(frequency_penalty=1.0)).ahead(3) is None
    assert sampler("exact", SamplingParams(logit_bias={1: 5.0})).ahead(3) is None
    for rule in ("block", "coupled"):
        drawn = sampler(rule, SamplingParams(temperature=1.0)).ahead(3)
        if not available():
            assert drawn is None
            continue
        assert drawn is not None
        assert drawn.controls is not None
        assert (drawn.uniforms is None) == (rule == "coupled")
