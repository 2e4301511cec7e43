"""Metrics: defined once, pooled, bonus apart (fault 25)."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rig import model, oracle

from foredraft import Engine, SamplingParams
from foredraft.engine.stats import SpecStats

STEPS = st.lists(st.integers(0, 8).flatmap(lambda k: st.tuples(st.just(k), st.integers(0, k))), max_size=40)


def stats(steps: list[tuple[int, int]]) -> SpecStats:
    made = SpecStats()
    for drafted, accepted in steps:
        made.add(drafted, accepted)
    return made


@given(STEPS)
def test_identities(steps: list[tuple[int, int]]) -> None:
    spec = stats(steps).to_dict(detailed=True)
    accepted, drafted = spec["num_accepted_draft_tokens"], spec["num_draft_tokens"]
    assert sum(i * n for i, n in enumerate(spec["acceptance_histogram"])) == accepted
    assert sum(spec["acceptance_histogram"]) == spec["num_spec_steps"]
    by_length = spec["acceptance_histogram_by_draft_length"]
    assert sum(sum(h) for h in by_length.values()) == spec["num_spec_steps"]
    if drafted == 0:
        assert spec["draft_acceptance_rate"] is None
        assert spec["mean_acceptance_length"] is None
    else:
        assert 0 <= spec["draft_acceptance_rate"] == accepted / drafted <= 1
        assert spec["mean_acceptance_length"] == pytest.approx(1 + sum(spec["acceptance_rate_per_position"]))
    assert spec["per_step_drafted"] == [k for k, _ in steps]


@given(STEPS, STEPS)
def test_pooling_adds_counts(a: list[tuple[int, int]], b: list[tuple[int, int]]) -> None:
    pooled = stats(a)
    pooled.merge(stats(b))
    assert pooled.to_dict() == stats(a + b).to_dict()


def test_the_engine_counts_what_it_delivers() -> None:
    engine = Engine(target=model(), drafter=oracle(wrong=lambda p: p % 5 == 0), k=4)
    results = engine.generate([[1], [2, 3]], SamplingParams(max_tokens=33))
    for result in results:
        spec = result.metrics["speculative_decoding"]
        assert spec["num_accepted_draft_tokens"] == result.kinds.count("accepted")
        assert spec["num_accepted_draft_tokens"] + spec["num_steps"] == 33 == result.usage.completion_tokens
        assert result.kinds.count("bonus") + result.kinds.count("correction") <= spec["num_spec_steps"]
    assert engine.stats.num_steps == sum(r.stats.num_steps for r in results)
    assert not engine.stats.trace  # pooled statistics stay small however long the engine lives


def test_no_draft_gives_none_not_nan() -> None:
    result = Engine(target=model()).generate([[1]], SamplingParams(max_tokens=5))[0]
    spec = result.metrics["speculative_decoding"]
    assert spec["draft_acceptance_rate"] is None
    assert spec["mean_acceptance_length"] is None
    assert spec["tokens_per_step"] == 1.0


def test_a_printed_result_fits_on_a_screen() -> None:
    result = Engine(target=model()).generate([[1, 2, 3]], SamplingParams(max_tokens=64))[0]
    shown = repr(result)
    assert len(shown) < 800
    assert "SpecStats(steps=" in shown
    assert "StepRecord" not in shown
