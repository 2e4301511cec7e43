"""The real small model: speculative text is plain text to the last token, in every dtype (faults 7, 21-23)."""

from __future__ import annotations

import functools

import pytest
import torch

from foredraft import Engine, SamplingParams, SpeculationConfig
from foredraft.kernels import available
from foredraft.models.base import Segment
from foredraft.models.catalog import resolve

TARGET = "smollm2-135m"
DRAFTERS = ["lookup:3,1", f"model:{TARGET}@28"]
QUESTIONS = [
    "Write a Python function that adds two numbers, then write it again.",
    "List three colours.",
    "한국의 수도는? 🦜 Answer with an emoji.",
    "Repeat: apples, pears, plums, apples, pears, plums, apples",
]

pytestmark = [
    pytest.mark.real_model,
    pytest.mark.skipif(resolve(TARGET) is None, reason=f"run: foredraft models fetch {TARGET}"),
]


@functools.cache
def engine(drafter: str | None, dtype: str, max_batch: int = 8) -> Engine:
    return Engine(TARGET, drafter, dtype=dtype, max_batch=max_batch, prefix_reuse=False)  # type: ignore[arg-type]


def prompts(made: Engine) -> list[list[int]]:
    assert made.tokenizer is not None
    return [made.tokenizer.chat([{"role": "user", "content": text}]) for text in QUESTIONS]


@functools.cache
def plain(dtype: str) -> list[list[int]]:
    made = engine(None, dtype, 1)
    return [r.token_ids for r in made.generate(prompts(made), SamplingParams(max_tokens=24, ignore_eos=True))]


@pytest.mark.skipif(not available(), reason="no compiled kernels")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("drafter", DRAFTERS)
@pytest.mark.parametrize("k", [1, 2, 5, 8, "auto"])
def test_greedy_is_plain_in_every_dtype(dtype: str, drafter: str, k: int | str) -> None:
    made = engine(drafter, dtype)
    params = SamplingParams(max_tokens=24, ignore_eos=True)
    results = made.generate(prompts(made), params, speculation=SpeculationConfig(k=k))
    assert [r.token_ids for r in results] == plain(dtype)
    assert k == "auto" or sum(r.stats.num_draft_tokens for r in results) > 0


@pytest.mark.skipif(not available(), reason="no compiled kernels")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_seed_gives_one_text_with_speculation_and_without(dtype: str) -> None:
    params = [SamplingParams(temperature=1.0, top_p=0.95, seed=seed, max_tokens=20) for seed in range(4)]
    reference = [
        engine(None, dtype, 1).generate([ids], p)[0].token_ids
        for ids, p in zip(prompts(engine(None, dtype, 1)), params, strict=True)
    ]
    for drafter in DRAFTERS:
        for k in (1, 4):
            made = engine(drafter, dtype)
            results = made.generate(prompts(made), params, speculation=SpeculationConfig(k=k))
            assert [r.token_ids for r in results] == reference


@pytest.mark.parametrize("drafter", DRAFTERS)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_logprobs_match_teacher_forcing(drafter: str, temperature: float) -> None:
    made = engine(drafter, "float32")
    ids = prompts(made)[3]
    params = SamplingParams(max_tokens=24, temperature=temperature, seed=2, logprobs=0)
    result = made.generate([ids], params, speculation=SpeculationConfig(k=4))[0]
    assert result.logprobs is not None
    slot = made.target.cache.allocate()
    rows = made.target.forward([Segment(slot, ids + result.token_ids, len(ids) - 1)]).logits[0]
    made.target.cache.free(slot)
    for row, token, entry in zip(rows.double().log_softmax(-1), result.token_ids, result.logprobs, strict=False):
        assert entry.token_id == token
        assert entry.logprob == pytest.approx(float(row[token]), abs=1e-5)


def test_streamed_text_is_the_whole_text() -> None:
    made = engine("lookup:3,1", "float32")
    for ids in prompts(made):
        deltas = list(made.stream(ids, SamplingParams(max_tokens=24, ignore_eos=True)))
        result = deltas[-1].result
        assert result is not None
        assert "".join(delta.text for delta in deltas) == result.text
        assert "\ufffd" not in "".join(delta.text for delta in deltas[:-1])
        assert made.tokenizer is not None
        assert result.text.rstrip("\ufffd") == made.tokenizer.decode(result.token_ids).rstrip("\ufffd")


@pytest.mark.parametrize("k", [0, 1, 4, 8])
def test_stop_strings_end_inside_a_block(k: int) -> None:
    made = engine("lookup:3,1", "float32")
    ids = prompts(made)[3]
    whole = made.generate([ids], SamplingParams(max_tokens=24))[0].text
    assert len(whole) > 20
    for stop in (whole[9:12], whole[5:16], whole[-4:]):
        result = made.generate([ids], SamplingParams(max_tokens=24, stop=stop), speculation=SpeculationConfig(k=k))[0]
        assert result.text == whole[: whole.index(stop)]
        assert result.finish_reason == "stop"
        kept = made.generate(
            [ids], SamplingParams(max_tokens=24, stop=stop, include_stop=True), speculation=SpeculationConfig(k=k)
        )[0]
        assert kept.text == whole[: whole.index(stop) + len(stop)]


def test_a_second_turn_reuses_the_whole_first() -> None:
    made = Engine(TARGET, DRAFTERS[0], k=4)
    assert made.tokenizer is not None
    talk = [{"role": "user", "content": "Name a fruit."}]
    first = made.generate([made.tokenizer.chat(talk)], SamplingParams(max_tokens=30))[0]
    talk += [{"role": "assistant", "content": first.text}, {"role": "user", "content": "Another."}]
    turn = made.tokenizer.chat(talk)
    second = made.generate([turn], SamplingParams(max_tokens=12))[0]
    assert second.usage.cached_tokens >= first.usage.prompt_tokens + len(first.token_ids) - 2
    cold = Engine(TARGET, None).generate([turn], SamplingParams(max_tokens=12))[0]
    assert second.token_ids == cold.token_ids


def test_two_threads_and_one_give_the_same_bits() -> None:
    if not available():
        pytest.skip("no compiled kernels")
    made = engine(DRAFTERS[0], "float32")
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        results = made.generate(prompts(made), SamplingParams(max_tokens=24, ignore_eos=True))
    finally:
        torch.set_num_threads(threads)
    assert [r.token_ids for r in results] == plain("float32")
