"""Drafts that lead where the target has no law, drafters that break half-way, interrupts: the text stays what it is."""

from __future__ import annotations

import json
import logging
from collections import Counter
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from rig import V, chain, model, oracle, plain

from foredraft import Engine, SamplingParams
from foredraft.drafters import Drafter, DraftRequest, ModelDrafter
from foredraft.errors import CacheFullError
from foredraft.models.base import ForwardOutput, Segment
from foredraft.testing import ScriptedDrafter, TableModel
from foredraft.testing.stats import goodness_of_fit
from foredraft.types import Draft

PARAMS = SamplingParams(max_tokens=20)
WRONG = oracle(wrong=lambda position: position % 3 == 0)


def honest_prefixes(params: SamplingParams) -> set[tuple[int, ...]]:
    text = plain([1, 2], params)
    return {(1, 2, *text[:i]) for i in range(len(text) + 1)}


# --- rows without a law that only a draft reaches


@pytest.mark.parametrize("params", [PARAMS, SamplingParams(max_tokens=20, temperature=1.0, seed=3)])
def test_a_target_that_cannot_read_a_rejected_draft(params: SamplingParams) -> None:
    good, honest = chain(), honest_prefixes(params)

    def logits(prefix: tuple[int, ...]) -> list[float]:
        if prefix not in honest:
            raise KeyError(prefix)
        return good(prefix)

    for drafter in (WRONG, oracle()):
        result = Engine(target=TableModel(logits, V), drafter=drafter, k=4).generate([[1, 2]], params)[0]
        assert result.token_ids == plain([1, 2], params)
        assert result.stats.num_draft_tokens


def test_bans_that_leave_no_token_only_where_a_rejected_draft_leads() -> None:
    target = TableModel(lambda prefix: [0.0, 1.0, 0.5], 3)
    params = SamplingParams(max_tokens=8, allowed_token_ids=(0, 1), bad_token_ids=((0, 0), (0, 1)))
    zeros = ScriptedDrafter(lambda prefix, k: [1] + [0] * (k - 1))
    result = Engine(target=target, drafter=zeros, k=3).generate([[1]], params)[0]
    assert result.token_ids == [1] * 8


@pytest.mark.parametrize("drafter", [WRONG, ModelDrafter(model(4))], ids=["scripted", "model"])
@pytest.mark.parametrize("answer", ["raises", "wrong shape"])
def test_a_processor_that_fails_only_where_a_rejected_draft_leads(drafter: Drafter, answer: str) -> None:
    honest = honest_prefixes(PARAMS)

    def picky(ids: list[int], logits: torch.Tensor) -> torch.Tensor:
        if tuple(ids) in honest:
            return logits
        if answer == "raises":
            raise ValueError("no such text")
        return logits[:-1]

    params = SamplingParams(max_tokens=20, processors=(picky,))
    result = Engine(target=model(), drafter=drafter, k=4).generate([[1, 2]], params)[0]
    assert result.token_ids == plain([1, 2], PARAMS)


def test_a_stateful_processor_shared_by_two_requests_keeps_them_apart() -> None:
    class Counting:
        def __init__(self) -> None:
            self.calls = 0

        def snapshot(self) -> object:
            return self.calls

        def restore(self, state: object) -> None:
            self.calls = state  # type: ignore[assignment]

        def __call__(self, ids: Sequence[int], logits: torch.Tensor) -> torch.Tensor:
            self.calls += 1
            logits[self.calls % V] -= 4.0
            return logits

    prompts = [[1, 2], [3], [4, 4, 4]]
    expected = [plain(p, SamplingParams(max_tokens=20, processors=(Counting(),))) for p in prompts]
    for drafter in (None, WRONG, ModelDrafter(model())):
        shared = SamplingParams(max_tokens=20, processors=(Counting(),))
        results = Engine(target=model(), drafter=drafter, k=3).generate(prompts, shared)
        assert [r.token_ids for r in results] == expected


# --- drafters that break


@pytest.mark.parametrize("verify", ["rejection", "block", "coupled"])
def test_a_token_that_q_rules_out_costs_the_drafter_not_the_request(
    verify: str, caplog: pytest.LogCaptureFixture
) -> None:
    liar = ScriptedDrafter(lambda prefix, k: ([0] * k, [[0.0, *[1 / (V - 1)] * (V - 1)]] * k))
    params = SamplingParams(max_tokens=12, temperature=1.0, seed=2)
    with caplog.at_level(logging.WARNING, logger="foredraft"):
        result = Engine(target=model(), drafter=liar, k=2, verify=verify).generate([[1]], params)[0]
    assert len(result.token_ids) == 12
    assert "no probability" in caplog.text


def test_numpy_tokens_of_a_drafter_reach_nobody() -> None:
    class Numpy(Drafter):
        def propose(self, request: DraftRequest, k: int) -> Draft:
            return Draft(tuple(np.array(oracle().propose(request, k).tokens)))

    result = Engine(target=model(), drafter=Numpy(), k=3).generate([[1, 2]], PARAMS)[0]
    assert result.stats.num_accepted_draft_tokens
    json.dumps(result.to_dict())


@pytest.mark.parametrize("how", ["nan", "raise"])
def test_a_drafter_model_that_breaks_on_what_it_drew_does_not_bend_the_law(how: str) -> None:
    """It breaks exactly if its first token is 0: were the draft dropped then, 0 would be written too seldom."""

    def drafts(prefix: tuple[int, ...]) -> list[float]:
        if len(prefix) > 2 and prefix[-1] == 0:
            if how == "raise":
                raise RuntimeError("gone")
            return [float("nan")] * 2
        return [0.0, 0.0]

    target = TableModel(lambda prefix: [1.0, 0.0], 2)
    params = SamplingParams(temperature=1.0, max_tokens=5)
    engine = Engine(target=target, drafter=ModelDrafter(TableModel(drafts, 2)), k=2, verify="rejection", max_batch=64)
    each = [params.model_copy(update={"seed": seed}) for seed in range(600)]
    results = engine.generate([[1]] * len(each), each)
    counts = Counter(result.token_ids[1] for result in results)
    p = float(torch.softmax(torch.tensor([1.0, 0.0], dtype=torch.float64), -1)[0])
    assert goodness_of_fit([counts[0], counts[1]], [p, 1 - p]).p_value > 1e-3


def test_a_drafter_model_whose_pass_fails_on_one_request_keeps_the_others() -> None:
    good = chain()

    def logits(prefix: tuple[int, ...]) -> list[float]:
        if prefix[0] == 6 and len(prefix) > 7:
            raise RuntimeError("gone")
        return good(prefix)

    drafter = ModelDrafter(TableModel(logits, V))
    engine = Engine(target=model(), drafter=drafter, k=3)
    prompts = [[1, 2], [6, 1], [3]]
    results = engine.generate(prompts, PARAMS)
    assert [r.token_ids for r in results] == [plain(p, PARAMS) for p in prompts]
    for intact in (results[0], results[2]):
        assert intact.stats.num_accepted_draft_tokens == intact.stats.num_draft_tokens >= 12
    drafter._pool.clear()
    assert drafter.model.cache.slots_in_use == 0


def test_a_drafter_cache_full_of_idle_slots_makes_room() -> None:
    class Small(TableModel):
        def forward(self, segments: Sequence[Segment], taps: Sequence[int] = ()) -> ForwardOutput:
            if self.cache.bytes_in_use // 8 + sum(len(s.tokens) for s in segments) > 40:
                raise CacheFullError("full", field="cache_bytes")
            return super().forward(segments, taps)

    engine = Engine(target=model(), drafter=ModelDrafter(Small(chain(), V)), k=3)
    for first in range(6):
        result = engine.generate([[first, 1, 2]], PARAMS)[0]
        assert result.stats.draft_acceptance_rate == 1.0


def test_one_drafter_in_two_engines_serves_both() -> None:
    drafter = ModelDrafter(model())
    engines = [Engine(target=model(), drafter=drafter, k=3) for _ in range(2)]
    requests = [engine.submit(prompt, PARAMS) for engine, prompt in zip(engines, ([1, 2], [5, 3, 1]), strict=True)]
    while not all(request.finished for request in requests):
        for engine in engines:
            engine.step()
    for request in requests:
        assert list(request.output) == plain(request.ids[: request.prompt_length], PARAMS)
        assert request.stats.num_accepted_draft_tokens == request.stats.num_draft_tokens > 0


# --- interrupts


@pytest.mark.parametrize("where", ["target", "drafter", "processor"])
def test_an_interrupt_in_the_middle_of_a_pass_leaves_no_slot_half_done(where: str) -> None:
    good, armed = chain(), [True]

    def interrupt_once(length: int) -> None:
        if armed[0] and length == 9:
            armed[0] = False
            raise KeyboardInterrupt

    def logits(prefix: tuple[int, ...]) -> list[float]:
        interrupt_once(len(prefix))
        return good(prefix)

    def processor(ids: list[int], row: torch.Tensor) -> torch.Tensor:
        interrupt_once(len(ids))
        return row

    def make(name: str) -> TableModel:
        return TableModel(logits if where == name else good, V)

    drafter = ModelDrafter(make("drafter"))
    engine = Engine(target=make("target"), drafter=drafter, k=3)
    other = engine.submit([1, 2], PARAMS)
    params = SamplingParams(max_tokens=20, processors=(processor,)) if where == "processor" else PARAMS
    with pytest.raises(KeyboardInterrupt):
        list(engine.stream([5, 1, 3], params))
    again = engine.generate([[5, 1, 3, 3]], PARAMS)[0]  # may reuse what the interrupted request left
    assert again.token_ids == plain([5, 1, 3, 3], PARAMS)
    assert again.stats.draft_acceptance_rate == 1.0
    while not other.finished:
        engine.step()
    assert list(other.output) == plain([1, 2], PARAMS)
    engine.reset()
    drafter._pool.clear()
    assert engine.target.cache.slots_in_use == drafter.model.cache.slots_in_use == 0


# --- two streams at once


def test_a_stream_whose_request_finished_while_another_was_read_still_delivers() -> None:
    engine = Engine(target=model(), drafter=WRONG, k=3)
    streams = [engine.stream(prompt, PARAMS) for prompt in ([1, 2], [3], [4, 4])]
    for stream in streams:
        next(stream)
    for stream, prompt in zip(streams, ([1, 2], [3], [4, 4]), strict=True):
        deltas = list(stream)
        assert deltas[-1].result is not None
        assert deltas[-1].result.token_ids == plain(prompt, PARAMS)


def test_a_stream_that_nobody_reads_starts_nothing() -> None:
    engine = Engine(target=model())
    stream = engine.stream([1, 2], PARAMS)
    del stream
    assert not engine.scheduler.busy


# --- a tokenizer that breaks


def test_a_token_that_cannot_be_decoded_fails_its_request_alone() -> None:
    class Decoder:
        def __init__(self) -> None:
            self.ids: list[int] = []

        def push(self, token: int) -> str:
            self.ids.append(token)
            return self.flush()

        def flush(self) -> str:
            if len(self.ids) > 5:
                raise OverflowError("no such token")
            return "x"

    class Letters:
        eos_ids: frozenset[int] = frozenset()

        def stream_decoder(self) -> Decoder:
            return Decoder()

    engine = Engine(target=model(), drafter=oracle(), k=3)
    engine._admission.tokenizer = Letters()  # type: ignore[assignment]
    failed = engine.submit([3, 1], PARAMS)
    engine._admission.tokenizer = None
    other = engine.submit([1, 2], PARAMS)
    while engine.scheduler.busy:
        engine.step()
    assert failed.finish_reason == "error"
    assert "OverflowError" in str(failed.error)
    assert list(other.output) == plain([1, 2], PARAMS)
    engine.reset()
    assert engine.target.cache.slots_in_use == 0
