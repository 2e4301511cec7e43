"""Ends, stops and budgets are exact inside a block (faults 9-12), and memory runs out without losing anything."""

from __future__ import annotations

import pytest
from rig import V, model, oracle, plain

from foredraft import Engine, SamplingParams
from foredraft.drafters import ModelDrafter
from foredraft.errors import ConfigError, ContextLengthError, RequestFailedError


@pytest.mark.parametrize("k", [1, 2, 6, 8])
@pytest.mark.parametrize("at", range(6))
def test_end_token_inside_a_block(k: int, at: int) -> None:
    whole = plain([4, 2], SamplingParams(max_tokens=20))
    end = whole[at]
    params = SamplingParams(max_tokens=20, stop_token_ids=(end,))
    engine = Engine(target=model(), drafter=oracle(), k=k)
    deltas = list(engine.stream([4, 2], params))
    result = deltas[-1].result
    assert result is not None
    assert result.token_ids == whole[: whole.index(end) + 1]
    assert result.finish_reason == "stop"
    assert [token.id for delta in deltas for token in delta.tokens] == result.token_ids


@pytest.mark.parametrize("k", [1, 3, 6])
@pytest.mark.parametrize("budget", [0, 1, 2, 3, 4, 6, 7, 13])
def test_budgets(k: int, budget: int) -> None:
    params = SamplingParams(max_tokens=budget)
    engine = Engine(target=model(), drafter=oracle(), k=k)
    result = engine.generate([[4, 2]], params)[0]
    assert result.token_ids == plain([4, 2], params)
    assert len(result.token_ids) == budget == result.usage.completion_tokens
    assert result.finish_reason == "length"
    assert result.stats.num_accepted_draft_tokens + result.stats.num_steps == budget


def test_context_limit_ends_like_a_budget() -> None:
    for drafter in (None, oracle(), ModelDrafter(model(max_context=12))):
        result = Engine(target=model(max_context=12), drafter=drafter, k=5).generate([[1, 2, 3]])[0]
        assert len(result.token_ids) == 9
        assert result.finish_reason == "length"
        assert result.token_ids == plain([1, 2, 3], SamplingParams(max_tokens=9))


@pytest.mark.parametrize("wrong", [lambda p: False, lambda p: p % 2 == 0])
def test_the_cache_holds_nothing_past_the_stop_and_the_next_turn_reuses_it(wrong) -> None:  # type: ignore[no-untyped-def]
    target = model()
    engine = Engine(target=target, drafter=oracle(wrong=wrong), k=8)
    whole = plain([4, 2], SamplingParams(max_tokens=20))
    end = whole[9]
    first = engine.generate([[4, 2]], SamplingParams(max_tokens=20, stop_token_ids=(end,)))[0]
    slot = next(iter(target.cache._slots))
    said = [4, 2, *first.token_ids]
    cached = target.cache.tokens(slot)
    assert cached == said[: len(cached)]
    turn = [*said, 6, 6]
    second = engine.generate([turn], SamplingParams(max_tokens=10))[0]
    assert second.usage.cached_tokens == len(cached) >= len(said) - 1
    assert second.token_ids == plain(turn, SamplingParams(max_tokens=10))


def test_prefixes_are_never_shared_across_tenants() -> None:
    engine = Engine(target=model())
    params = SamplingParams(max_tokens=5)
    engine.generate([[1, 2, 3, 4]], params, tenant="a")
    other = engine.generate([[1, 2, 3, 4]], params, tenant="b")[0]
    same = engine.generate([[1, 2, 3, 4]], params, tenant="a")[0]
    assert other.usage.cached_tokens == 0
    assert same.usage.cached_tokens == 3


def test_bad_requests_are_refused_by_name_and_nothing_starts() -> None:
    engine = Engine(target=model(max_context=16), drafter=oracle())
    for prompt, params, error, field in [
        ([], None, ConfigError, "prompt"),
        ([V], None, ConfigError, "prompt"),
        ([-1], None, ConfigError, "prompt"),
        ("text", None, ConfigError, "prompt"),
        ([0] * 16, None, ContextLengthError, "prompt"),
        ([0], SamplingParams(stop="x"), ConfigError, "stop"),
        ([0], SamplingParams(bad_words="x"), ConfigError, "bad_words"),
        ([0], SamplingParams(logit_bias={V: 1.0}), ConfigError, "logit_bias"),
    ]:
        with pytest.raises(error, match=field):
            engine.generate([[1], prompt], params)
        assert not engine.scheduler.busy
    for option in ({"k": -1}, {"max_batch": 0}, {"verify": "lossy"}, {"kk": 1}):
        with pytest.raises(ConfigError, match=next(iter(option))):
            Engine(target=model(), **option)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="temperature"):
        SamplingParams(temperature=-0.1)


def test_no_slot_at_all_is_an_error_of_the_request_alone() -> None:
    engine = Engine(target=model(max_slots=0))
    with pytest.raises(RequestFailedError, match="slots"):
        engine.generate([[1]], SamplingParams(max_tokens=2))
    assert not engine.scheduler.busy


def test_more_requests_than_slots_all_finish() -> None:
    engine = Engine(target=model(max_slots=2), drafter=oracle(), k=3, max_batch=8)
    prompts = [[i % V, 1] for i in range(9)]
    params = SamplingParams(max_tokens=12)
    assert [r.token_ids for r in engine.generate(prompts, params)] == [plain(p, params) for p in prompts]
