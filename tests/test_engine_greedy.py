"""Greedy output is token for token that of plain decoding, whatever is drafted and accepted (faults 7, 8, 13-15)."""

from __future__ import annotations

import random

import pytest
from rig import V, model, oracle, plain, scheduled

from foredraft import Engine, SamplingParams
from foredraft.drafters import LookupDrafter, ModelDrafter
from foredraft.testing import ScriptedDrafter

PROMPTS = [[0], [1, 2, 3], [7, 7, 7, 7, 1], list(range(V)) * 3]
PARAMS = SamplingParams(max_tokens=40)


def drafters() -> list[object]:
    rng = random.Random(1)
    return [
        oracle(),
        oracle(wrong=lambda position: True),
        oracle(wrong=lambda position: position % 3 == 0),
        ScriptedDrafter(lambda prefix, k: [rng.randrange(V) for _ in range(rng.randint(0, k))]),
        LookupDrafter(),
        LookupDrafter(3, 1),
        ModelDrafter(model()),
        ModelDrafter(model(seed=9)),
        ModelDrafter(model(max_context=20)),
    ]


@pytest.mark.parametrize("k", [0, 1, 2, 3, 4, 5, 6, 7, 8, "auto"])
@pytest.mark.parametrize("which", range(9))
def test_greedy_is_plain(k: int | str, which: int) -> None:
    engine = Engine(target=model(), drafter=drafters()[which], k=k)  # type: ignore[arg-type]
    results = engine.generate(PROMPTS, PARAMS)
    assert [r.token_ids for r in results] == [plain(p, PARAMS) for p in PROMPTS]


@pytest.mark.parametrize("lengths", [(0, 4), (4, 0), (1, 0, 6, 0), (8,), (3, 0, 0, 3)])
@pytest.mark.parametrize("accept", [0, 1, 4])
def test_alternating_draft_lengths(lengths: tuple[int, ...], accept: int) -> None:
    drafter = scheduled(oracle(wrong=lambda position: position % (accept + 1) == accept), lengths)
    results = Engine(target=model(), drafter=drafter, k=8).generate(PROMPTS, PARAMS)
    assert [r.token_ids for r in results] == [plain(p, PARAMS) for p in PROMPTS]


@pytest.mark.parametrize("k", range(1, 7))
def test_draft_equal_to_target_is_always_accepted(k: int) -> None:
    drafter = ModelDrafter(model())
    engine = Engine(target=model(), drafter=drafter, k=k)
    request = engine.submit([3, 1], SamplingParams(max_tokens=200))
    while not request.finished:
        engine.step()
        state = drafter._states.get(request.id)
        if state is not None:  # the drafter's cache holds a prefix of what is committed, every round
            cached = drafter.model.cache.tokens(state.slot)  # type: ignore[attr-defined]
            assert cached == request.ids[: len(cached)]
            assert len(request.ids) - len(cached) <= 2
    stats = request.stats
    assert stats.num_accepted_draft_tokens == stats.num_draft_tokens > 0
    assert request.written == 200


def test_drafter_with_zero_rounds_keeps_full_acceptance() -> None:
    """k = 3, 0, 0, 3: rounds that draft nothing feed the drafter too, when it next drafts."""
    drafter = ModelDrafter(model())
    engine = Engine(target=model(), drafter=drafter, k=3)
    request = engine.submit([3, 1], SamplingParams(max_tokens=200))
    schedule = [3, 0, 0, 3]
    choose, step = engine.controller.choose, {"n": 0}

    def scripted(candidates, base_rows):  # type: ignore[no-untyped-def]
        ks = choose(candidates, base_rows)
        step["n"] += 1
        return [min(k, schedule[step["n"] % 4]) for k in ks]

    engine.controller.choose = scripted  # type: ignore[method-assign]
    while not request.finished:
        engine.step()
    assert request.stats.num_accepted_draft_tokens == request.stats.num_draft_tokens > 0
    assert {s.drafted for s in request.stats.trace} >= {0, 3}


def test_batched_equals_alone_with_ragged_acceptance_and_late_arrivals() -> None:
    rng = random.Random(3)
    prompts = [[rng.randrange(V) for _ in range(rng.randint(1, 30))] for _ in range(20)]
    params = [SamplingParams(max_tokens=rng.randint(0, 30)) for _ in prompts]
    drafter = oracle(wrong=lambda position: position % 4 == 1)
    engine = Engine(target=model(), drafter=drafter, k=5, max_batch=3, max_step_tokens=7)
    results = engine.generate(prompts, params)
    assert [r.token_ids for r in results] == [plain(p, s) for p, s in zip(prompts, params, strict=True)]
    engine.reset()
    assert engine.target.cache.slots_in_use == 0


def test_aborted_between_draft_and_verification() -> None:
    """The draft in flight is dropped whole; counters stay consistent, the neighbour is untouched."""
    holder: dict[str, object] = {}
    inner = oracle()

    def propose(prefix: tuple[int, ...], k: int) -> list[int]:
        if len(prefix) > 12 and prefix[0] == 5:
            holder["victim"].cancelled = True  # type: ignore[attr-defined]
        return list(inner.propose_fn(prefix, k))  # type: ignore[arg-type]

    engine = Engine(target=model(), drafter=ScriptedDrafter(propose), k=4)
    victim = engine.submit([5, 5], PARAMS)
    other = engine.submit([1, 2], PARAMS)
    holder["victim"] = victim
    while not (victim.finished and other.finished):
        engine.step()
    assert victim.finish_reason == "cancelled"
    assert list(victim.output) == plain([5, 5], PARAMS)[: victim.written]
    assert sum(s.accepted for s in victim.stats.trace) + victim.stats.num_steps == victim.written
    assert list(other.output) == plain([1, 2], PARAMS)
    engine.reset()
    assert engine.target.cache.slots_in_use == 0
