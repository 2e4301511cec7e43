"""Combined drafters: plain text, the better drafter in every stretch, and no worse than it overall."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
from rig import V, chain, model, oracle, plain

from foredraft import Engine, SamplingParams
from foredraft.drafters import CombinedDrafter, Drafter, LookupDrafter, ModelDrafter, SuffixDrafter
from foredraft.drafters.part import Costs, Record
from foredraft.errors import ConfigError
from foredraft.testing import ScriptedDrafter, TableModel

PROMPTS = [[0], [1, 2, 3], [7, 7, 7, 7, 1], list(range(V)) * 3]
PARAMS = SamplingParams(max_tokens=40)


class Clock:
    """Seconds that pass only when a model says so."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class Costly(TableModel):
    """A table whose passes take ``base + each · rows`` seconds of a fake clock."""

    def __init__(self, clock: Clock, logits: Callable[..., list[float]], base: float, each: float) -> None:
        super().__init__(logits, V)
        self.clock, self.base, self.each = clock, base, each

    def forward(self, segments, taps=()):  # type: ignore[no-untyped-def]
        self.clock.now += self.base + self.each * sum(len(s.tokens) for s in segments)
        return super().forward(segments, taps)


def combinations() -> dict[str, Callable[[], CombinedDrafter]]:
    return {
        "suffix, perfect model": lambda: CombinedDrafter([SuffixDrafter(), ModelDrafter(model())]),
        "lookup, poor model": lambda: CombinedDrafter([LookupDrafter(3, 1), ModelDrafter(model(seed=9))]),
        "short model, two copies": lambda: CombinedDrafter(
            [ModelDrafter(model(max_context=20)), LookupDrafter(), SuffixDrafter(pool=0)]
        ),
        "two scripts": lambda: CombinedDrafter([oracle(wrong=lambda p: p % 3 == 0), oracle(wrong=lambda p: True)]),
    }


@pytest.mark.parametrize("k", [0, 1, 3, 8, "auto"])
@pytest.mark.parametrize("which", list(combinations()))
def test_greedy_is_plain(which: str, k: int | str) -> None:
    engine = Engine(target=model(), drafter=combinations()[which](), k=k)  # type: ignore[arg-type]
    want = [plain(p, PARAMS) for p in PROMPTS]
    for _ in range(2):
        assert [r.token_ids for r in engine.generate(PROMPTS, PARAMS)] == want


@pytest.mark.parametrize("which", ["suffix, perfect model", "short model, two copies"])
@pytest.mark.parametrize("verify", ["coupled", "block", "rejection"])
def test_seeds_and_rules(which: str, verify: str) -> None:
    params = SamplingParams(max_tokens=30, temperature=1.0, seed=5)
    runs = [
        [
            r.token_ids
            for r in Engine(target=model(), drafter=combinations()[which](), k=4, verify=verify).generate(
                PROMPTS, params
            )
        ]
        for _ in range(2)
    ]
    assert runs[0] == runs[1] or verify != "coupled"
    if verify == "coupled":
        assert runs[0] == [plain(p, params) for p in PROMPTS]


def test_each_stretch_is_drafted_by_the_drafter_that_is_right_there() -> None:
    """One drafter is right up to position 150, the other from there on; the switch must be noticed."""
    clock = Clock()
    first, second = oracle(wrong=lambda p: p >= 150), oracle(wrong=lambda p: p < 150)
    drafter = CombinedDrafter([first, second], clock)
    engine = Engine(target=Costly(clock, chain(), 1.0, 0.05), drafter=drafter, clock=clock, max_k=8)
    request = engine.submit([1], SamplingParams(max_tokens=400))
    chosen: dict[bool, list[int]] = {False: [], True: []}
    while not request.finished:
        engine.step()
        if request.id in drafter._states:
            chosen[len(request.ids) > 170].append(drafter._states[request.id].chosen)
    assert chosen[False].count(0) > 0.8 * len(chosen[False])
    assert chosen[True].count(1) > 0.8 * len(chosen[True])
    assert request.stats.tokens_per_step is not None
    assert request.stats.tokens_per_step > 5


class Timed(ScriptedDrafter):
    """A script that takes time for every token, and more for text that it has not read."""

    def __init__(self, clock: Clock, inner: ScriptedDrafter, each: float) -> None:
        def propose(prefix: tuple[int, ...], k: int) -> list[int]:
            clock.now += each * k
            return list(inner.propose_fn(prefix, k))  # type: ignore[arg-type]

        super().__init__(propose)


def seconds(make: Callable[[Clock], Drafter | None]) -> float:
    clock = Clock()
    engine = Engine(target=Costly(clock, chain(), 1.0, 0.05), drafter=make(clock), clock=clock)
    engine.generate([[1]], SamplingParams(max_tokens=600))
    return clock.now


@pytest.mark.parametrize("good", [0.1, 0.4, 0.6, 0.8, 1.0])
def test_a_short_text_takes_at_most_five_per_cent_longer_than_with_the_better_one(good: float) -> None:
    """A dear drafter that is right at a share ``good`` of positions, and a cheap one that is right at half of them.

    The first trials are included; what is lost after them is in ``test_combined_regret.py``.
    """

    def dear(clock: Clock) -> Drafter:
        return Timed(clock, oracle(wrong=lambda p: random.Random(p).random() >= good), 0.15)

    def cheap(clock: Clock) -> Drafter:
        return Timed(clock, oracle(wrong=lambda p: random.Random(-1 - p).random() >= 0.5), 0.001)

    def both(clock: Clock) -> Drafter:
        return CombinedDrafter([cheap(clock), dear(clock)], clock)

    assert seconds(both) < 1.05 * min(seconds(make) for make in (cheap, dear, lambda clock: None))


def test_a_drafter_that_has_to_catch_up_is_charged_for_it() -> None:
    costs = Costs()
    costs.observe(4, 100, 10.4)  # reads a prompt first
    assert costs.draft == 0.0  # not known, so it is tried again
    costs.observe(4, 0, 0.4)
    assert costs.draft == pytest.approx(0.1)
    costs.observe(4, 10, 1.4)
    assert costs.read == pytest.approx(0.1, rel=0.1)
    many = Costs()
    for _ in range(3):
        many.observe(2, 50, 5.0)
    assert many.draft == pytest.approx(2.5)  # a bound, where nothing else can be had


def test_what_was_seen_long_ago_is_believed_less() -> None:
    """One that failed is given up for another only until what was seen of it is old."""
    failed, other = Record(tokens=10.0, seconds=10.0), Record(tokens=150.0, seconds=100.0)
    assert failed.promise(lambda: 9.0) < other.promise(lambda: 9.0)  # 9.0 counts before the first draft only
    for _ in range(300):
        failed.fade()
        other.fade()
        other.tokens, other.seconds = other.tokens + 1.5, other.seconds + 1.0
    assert failed.promise(lambda: 9.0) > other.promise(lambda: 9.0)


def test_one_that_falls_silent_leaves_its_place_to_the_other() -> None:
    """Promised much, then nothing to propose: a step in which it was asked in vain counts against it."""
    silent, other = oracle(), oracle(wrong=lambda p: p % 4 == 0)
    silent.max_context = 60
    engine = Engine(target=model(), drafter=CombinedDrafter([silent, other]), k=3)
    result = engine.generate([[1]], SamplingParams(max_tokens=200))[0]
    assert result.stats.tokens_per_step is not None
    assert result.stats.tokens_per_step > 1.8


def test_nothing_is_left_of_ended_cancelled_and_failed_requests() -> None:
    class Fails(Drafter):
        name = "fails"

        def start(self, request) -> None:  # type: ignore[no-untyped-def]
            raise RuntimeError("no start")

    lookup = LookupDrafter()
    inner = ModelDrafter(model())
    drafter = CombinedDrafter([lookup, inner])
    engine = Engine(target=model(), drafter=drafter, k=4, prefix_reuse=False)
    stream = engine.stream([1, 2, 3], PARAMS)
    next(stream)
    next(stream)
    stream.close()
    engine.generate(PROMPTS, PARAMS)
    inner._pool.clear()
    assert (drafter._states, lookup._copying, inner._states) == ({}, {}, {})
    assert inner.model.cache.slots_in_use == 0  # type: ignore[attr-defined]

    failing = CombinedDrafter([lookup, Fails()])
    results = Engine(target=model(), drafter=failing, k=4).generate(PROMPTS, PARAMS)
    assert [r.token_ids for r in results] == [plain(p, PARAMS) for p in PROMPTS]
    assert (failing._states, lookup._copying) == ({}, {})


@pytest.mark.parametrize("failing", [0, 1])
def test_a_part_that_breaks_costs_only_its_request_the_drafter(failing: int) -> None:
    def breaks(prefix: tuple[int, ...], k: int) -> list[int]:
        if len(prefix) > 10 and prefix[0] == 1:
            raise RuntimeError("no more")
        return [0] * k

    parts: list[Drafter] = [oracle(wrong=lambda p: p % 2 == 0)]
    parts.insert(failing, ScriptedDrafter(breaks))
    results = Engine(target=model(), drafter=CombinedDrafter(parts), k=3).generate(PROMPTS, PARAMS)
    assert [r.token_ids for r in results] == [plain(p, PARAMS) for p in PROMPTS]


def test_every_part_gets_its_own_taps() -> None:
    import torch

    seen: dict[str, list[list[float]]] = {}

    class Taps(Drafter):
        def __init__(self, name: str, taps: tuple[int, ...]) -> None:
            self.label, self.taps = name, taps

        def observe(self, request, verdict, taps) -> None:  # type: ignore[no-untyped-def]
            seen.setdefault(self.label, []).append([] if taps is None else taps[0, :, 0].tolist())

    drafter = CombinedDrafter([Taps("a", (5, 1)), Taps("b", ()), Taps("c", (3, 5))])
    assert drafter.taps == (1, 3, 5)
    engine = Engine(target=model(), drafter=None)
    request = engine.submit([1], PARAMS)
    drafter.start(request)
    drafter.observe(request, None, torch.tensor([[[1.0], [3.0], [5.0]]]))
    assert seen == {"a": [[5.0, 1.0]], "b": [[]], "c": [[3.0, 5.0]]}


def test_it_is_asked_for_by_name() -> None:
    engine = Engine(target=model(), drafter="combined:lookup:3,1+suffix:factor=2,pool=1")
    assert isinstance(engine.drafter, CombinedDrafter)
    assert [type(part.drafter) for part in engine.drafter.parts] == [LookupDrafter, SuffixDrafter]


@pytest.mark.parametrize("argument", ["", ":lookup", ":lookup+combined:suffix", ":lookup+no"])
def test_names_that_make_no_sense_are_refused(argument: str) -> None:
    with pytest.raises(ConfigError):
        Engine(target=model(), drafter=f"combined{argument}")


def test_an_unknown_name_is_refused_by_itself() -> None:
    with pytest.raises(ConfigError, match="no drafter is called 'eagle9'"):
        Engine(target=model(), drafter="combined:suffix+eagle9")
