"""Scores of prompts: those of teacher forcing, however the prompt is read, and nothing else changes."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
import torch
from rig import V, chain, model, oracle, plain

from foredraft import Engine, SamplingParams, SpeculationConfig
from foredraft.engine import scoring
from foredraft.engine.result import TokenLogprob
from foredraft.errors import ContextLengthError, RequestFailedError
from foredraft.models.base import ForwardOutput, Segment
from foredraft.testing import TableModel

PROMPTS = [[0], [1, 2, 3, 4, 5, 6, 7], [7, 7, 7, 7, 1], list(range(V)) * 4]
SCORED = SamplingParams(max_tokens=12, prompt_logprobs=2)


def forced(ids: Sequence[int], top: int = 2) -> list[TokenLogprob | None]:
    """What the table itself says of a text, token after token."""
    found: list[TokenLogprob | None] = [None]
    for i in range(1, len(ids)):
        logs = torch.tensor(chain()(tuple(ids[:i])), dtype=torch.float64).log_softmax(-1)
        best = logs.topk(top)
        pairs = tuple(zip(best.indices.tolist(), best.values.tolist(), strict=True))
        found.append(TokenLogprob(ids[i], float(logs[ids[i]]), pairs))
    return found


class Counting(TableModel):
    """Counts the rows of logits of every pass."""

    def __init__(self, *args: object, **options: object) -> None:
        super().__init__(*args, **options)  # type: ignore[arg-type]
        self.rows: list[int] = []

    def forward(self, segments: Sequence[Segment], taps: Sequence[int] = ()) -> ForwardOutput:
        self.rows.append(sum(len(s.tokens) - s.logits_from for s in segments))
        return super().forward(segments, taps)


@pytest.mark.parametrize("chunk", [1, 3, 512])
@pytest.mark.parametrize("rows", [1, 4, 1000])
def test_scores_are_those_of_teacher_forcing(chunk: int, rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scoring, "BYTES", 4 * V * rows)
    target = Counting(chain(), V)
    engine = Engine(target=target, drafter=oracle(), k=3, max_step_tokens=chunk)
    for _ in range(2):  # the second time every prefix is in the cache
        results = engine.generate([*PROMPTS, [3, 1, 4]], [SCORED] * 4 + [SamplingParams(max_tokens=12)])
        for prompt, result in zip(PROMPTS, results, strict=False):
            assert result.prompt_logprobs == forced(prompt)
            assert result.token_ids == plain(prompt, SCORED)
            assert result.usage.cached_tokens == 0
            assert result.stats.num_draft_tokens > 0
        assert results[-1].prompt_logprobs is None
    decoding = 5 * 4  # of every request one row and three drafted ones
    assert max(target.rows) <= min(rows, chunk * 4) + decoding


@pytest.mark.parametrize("limit", [None, 7])
def test_a_prompt_is_only_scored(limit: int | None) -> None:
    """Nothing is written, and the prompt may fill the context to its end."""
    engine = Engine(target=model(max_context=limit), drafter=oracle())
    params = SamplingParams(max_tokens=0, prompt_logprobs=2)
    request = engine.submit(PROMPTS[1], params)
    beside = engine.submit([1], SamplingParams(max_tokens=5))
    while engine.scheduler.busy:
        engine.step()
    result = request.result(0.0)
    assert result.prompt_logprobs == forced(PROMPTS[1])
    assert (result.token_ids, result.text, result.finish_reason) == ([], "", "length")
    assert result.usage.completion_tokens == result.stats.num_steps == 0
    assert list(beside.output) == plain([1], SamplingParams(max_tokens=5))
    [again] = engine.generate([[*PROMPTS[1][:6], 0]], SamplingParams(max_tokens=0))
    assert again.prompt_logprobs is None
    [warm] = engine.generate([PROMPTS[1][:6]], SamplingParams(max_tokens=1))
    assert warm.usage.cached_tokens == 5  # what was scored is as good a prefix as any
    if limit is not None:
        with pytest.raises(ContextLengthError):
            engine.prepare([0] * 8, params)
        with pytest.raises(ContextLengthError):
            engine.prepare([0] * 7, SCORED)


def test_a_prompt_that_is_read_again_is_scored_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory runs out while prompts are read; the youngest begins anew."""
    monkeypatch.setattr(scoring, "BYTES", 4 * V * 2)
    full = {"pass": 0}

    class Tight(TableModel):
        def forward(self, segments: Sequence[Segment], taps: Sequence[int] = ()) -> ForwardOutput:
            from foredraft.errors import CacheFullError

            full["pass"] += 1
            if full["pass"] in (5, 9) and len(segments) > 1:
                raise CacheFullError("no room")
            return super().forward(segments, taps)

    engine = Engine(target=Tight(chain(), V), drafter=oracle(), k=2)
    results = engine.generate(PROMPTS, SCORED)
    assert full["pass"] > 9
    for prompt, result in zip(PROMPTS, results, strict=True):
        assert result.prompt_logprobs == forced(prompt)
        assert result.token_ids == plain(prompt, SCORED)


def test_a_row_without_a_law_ends_that_request_alone() -> None:
    def broken(prefix: tuple[int, ...]) -> list[float]:
        return [math.nan] * V if prefix[:1] == (5,) and len(prefix) == 2 else chain()(prefix)

    engine = Engine(target=TableModel(broken, V), drafter=oracle())
    with pytest.raises(RequestFailedError) as caught:
        engine.generate([[5, 1, 2, 3], [1, 2]], SCORED)
    bad, good = caught.value.results
    assert "a row of logits is no law" in str(bad.error)
    assert good.prompt_logprobs == forced([1, 2])
    assert engine.target.cache.slots_in_use == engine.scheduler.pool.idle
    [unasked] = engine.generate([[5, 1, 2, 3]], SamplingParams(max_tokens=3))  # without scores nobody looks
    assert unasked.finish_reason == "length"


def test_impossible_tokens_and_ties() -> None:
    rows = torch.tensor([[0.0, 0.0, -math.inf], [1.0, 2.0, 3.0]], dtype=torch.float64)
    first, second = scoring.token_logprobs(rows, [2, 0], 5)
    assert first.logprob == -math.inf
    assert [token for token, _ in first.top][:2] in ([0, 1], [1, 0])
    assert len(second.top) == 3
    assert second.logprob == pytest.approx(float(rows[1].log_softmax(-1)[0]))


def test_scores_do_not_depend_on_how_the_text_is_drawn() -> None:
    params = SCORED.model_copy(update={"temperature": 0.7, "top_k": 2, "repetition_penalty": 1.3, "seed": 3})
    with_drafts = Engine(target=model(), drafter=oracle()).generate(
        [PROMPTS[3]], params, speculation=SpeculationConfig(k=4)
    )[0]
    assert with_drafts.prompt_logprobs == forced(PROMPTS[3])
    assert with_drafts.token_ids == plain(PROMPTS[3], params)
    plain_data = with_drafts.to_dict()["prompt_logprobs"]
    assert plain_data[0] is None
    assert plain_data[1]["token_id"] == PROMPTS[3][1]
