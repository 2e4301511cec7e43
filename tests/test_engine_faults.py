"""What breaks stays where it broke: drafters and targets that raise, memory that runs out, leaks (fault 27)."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
import torch
from rig import V, chain, model, oracle, plain

from foredraft import Engine, SamplingParams
from foredraft.drafters import Drafter, DraftRequest, LookupDrafter, ModelDrafter
from foredraft.errors import CacheFullError, RequestFailedError
from foredraft.models.base import ForwardOutput, Segment
from foredraft.testing import ScriptedDrafter, TableModel
from foredraft.types import Draft

PARAMS = SamplingParams(max_tokens=20)


class Broken(Drafter):
    """Proposes correctly except for prompts that begin with 6, on which it breaks in the given way."""

    def __init__(self, how: str) -> None:
        self.how = how
        self.inner = oracle()
        self.stopped: list[str] = []

    def start(self, request: DraftRequest) -> None:
        if self.how == "start" and request.ids[0] == 6:
            raise RuntimeError("start")

    def propose(self, request: DraftRequest, k: int) -> Draft:
        draft = self.inner.propose(request, k)
        if request.ids[0] != 6 or len(request.ids) < 8:
            return draft
        if self.how == "raise":
            raise RuntimeError("propose")
        if self.how == "range":
            return Draft((V,))
        if self.how == "negative":
            return Draft((-1,))
        if self.how == "long":
            return Draft(draft.tokens + (0,) * k)
        if self.how == "q":
            return Draft(draft.tokens, torch.full((draft.k, V), 0.5))
        if self.how == "tree":
            return Draft(draft.tokens, None, tuple(range(draft.k)))
        if self.how == "nan":
            return Draft(draft.tokens, torch.full((draft.k, V), float("nan")))
        return draft

    def observe(self, request: DraftRequest, verdict: object, taps: object) -> None:
        if self.how == "observe" and request.ids[0] == 6:
            raise RuntimeError("observe")

    def stop(self, request: DraftRequest) -> None:
        self.stopped.append(request.id)


@pytest.mark.parametrize("how", ["start", "raise", "range", "negative", "long", "q", "nan", "tree", "observe"])
def test_a_drafter_that_breaks_on_one_request(how: str, caplog: pytest.LogCaptureFixture) -> None:
    drafter = Broken(how)
    engine = Engine(target=model(), drafter=drafter, k=3)
    prompts = [[1, 2], [6, 1], [3]]
    results = engine.generate(prompts, PARAMS)
    assert [r.token_ids for r in results] == [plain(p, PARAMS) for p in prompts]
    assert "goes on without its drafter" in caplog.text
    for intact in (results[0], results[2]):
        assert intact.stats.draft_acceptance_rate == 1.0
    assert sorted(drafter.stopped) == sorted(r.id for r in results if how != "start" or r.prompt_ids[0] != 6)


class Moody(TableModel):
    """Raises whenever a segment's slot holds a prompt that begins with 6."""

    def forward(self, segments: Sequence[Segment], taps: Sequence[int] = ()) -> ForwardOutput:
        for segment in segments:
            first = [*self.cache.tokens(segment.slot), *segment.tokens][0]
            if first == 6 and self.cache.length(segment.slot) > 4:
                raise RuntimeError("the device is gone")
        return super().forward(segments, taps)


def test_a_target_that_raises_on_one_request() -> None:
    engine = Engine(target=Moody(chain(), V), drafter=oracle(), k=3)
    with pytest.raises(RequestFailedError, match="the device is gone") as caught:
        engine.generate([[1, 2], [6, 1], [3]], PARAMS)
    results = caught.value.results
    assert [r.finish_reason for r in results] == ["length", "error", "length"]
    assert [results[0].token_ids, results[2].token_ids] == [plain([1, 2], PARAMS), plain([3], PARAMS)]
    assert engine.generate([[1, 2]], PARAMS)[0].token_ids == plain([1, 2], PARAMS)
    assert len(engine.generate([[6, 1]], PARAMS, raise_errors=False)) == 1


def test_a_processor_that_raises_fails_its_own_request() -> None:
    def angry(ids: list[int], logits: torch.Tensor) -> torch.Tensor:
        if len(ids) > 6:
            raise ValueError("no")
        return logits

    engine = Engine(target=model(), drafter=oracle(), k=3)
    each = [PARAMS, SamplingParams(max_tokens=20, processors=(angry,))]
    left, right = engine.generate([[1, 2], [1, 2]], each, raise_errors=False)
    assert left.token_ids == plain([1, 2], PARAMS)
    assert right.finish_reason == "error"
    assert right.token_ids == left.token_ids[: len(right.token_ids)]


class Small(TableModel):
    """A cache with room for ``room`` tokens in all."""

    room = 60

    def forward(self, segments: Sequence[Segment], taps: Sequence[int] = ()) -> ForwardOutput:
        used = self.cache.bytes_in_use // 8 + sum(len(s.tokens) for s in segments)
        if used > self.room:
            raise CacheFullError("full", field="cache_bytes")
        return super().forward(segments, taps)


def test_memory_that_runs_out_sends_the_youngest_back_and_all_finish() -> None:
    engine = Engine(target=Small(chain(), V), drafter=oracle(wrong=lambda p: p % 3 == 0), k=3)
    prompts = [[i, 1, 2] for i in range(6)]
    results = engine.generate(prompts, PARAMS)
    assert [r.token_ids for r in results] == [plain(p, PARAMS) for p in prompts]


def test_a_request_too_long_for_the_cache_fails_alone() -> None:
    engine = Engine(target=Small(chain(), V), drafter=oracle(), k=3)
    each = [SamplingParams(max_tokens=90), PARAMS]
    results = engine.generate([[1], [2]], each, raise_errors=False)
    assert results[0].finish_reason == "error"
    assert isinstance(results[0].error, CacheFullError)
    assert results[1].token_ids == plain([2], PARAMS)


@pytest.mark.parametrize("which", ["lookup", "model", "scripted"])
def test_a_thousand_requests_leave_nothing_behind(which: str) -> None:
    rng = random.Random(5)
    drafter: Drafter = {
        "lookup": LookupDrafter(2, 1),
        "model": ModelDrafter(model(3)),
        "scripted": oracle(wrong=lambda p: p % 3 == 0),
    }[which]
    engine = Engine(target=model(), drafter=drafter, k="auto", max_batch=6)
    waiting = []
    for i in range(1000):
        prompt = [rng.randrange(V) for _ in range(rng.randint(1, 6))]
        request = engine.submit(prompt, SamplingParams(max_tokens=rng.randint(0, 6)), tenant=str(i % 3))
        waiting.append(request)
        if rng.random() < 0.2:
            engine.cancel(rng.choice(waiting))
        if i % 3 == 0:
            engine.step()
    while engine.scheduler.busy:
        engine.step()
    assert all(request.finished_at is not None for request in waiting)
    engine.reset()
    assert engine.target.cache.slots_in_use == 0
    assert engine.target.cache.bytes_in_use == 0
    if isinstance(drafter, ModelDrafter):
        drafter._pool.clear()
        assert drafter.model.cache.slots_in_use == 0
        assert not drafter._states
    if isinstance(drafter, LookupDrafter):
        assert not drafter._copying


def test_closing_a_stream_frees_its_slot() -> None:
    engine = Engine(target=model(), drafter=oracle(), k=3)
    stream = engine.stream([1, 2], SamplingParams(max_tokens=100))
    next(stream)
    stream.close()
    engine.reset()
    assert engine.target.cache.slots_in_use == 0
    assert not engine.scheduler.busy


def test_an_interrupt_leaves_the_engine_usable() -> None:
    def interrupting(prefix: tuple[int, ...], k: int) -> list[int]:
        if len(prefix) == 9 and prefix[0] == 5:
            raise KeyboardInterrupt
        return []

    engine = Engine(target=model(), drafter=ScriptedDrafter(interrupting), k=3)
    with pytest.raises(KeyboardInterrupt):
        engine.generate([[5, 1]], PARAMS)
    assert engine.generate([[1, 2]], PARAMS)[0].token_ids == plain([1, 2], PARAMS)
    engine.reset()
    assert engine.target.cache.slots_in_use == 0
