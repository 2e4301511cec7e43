"""Draft length follows measured costs and acceptance, down to plain decoding and back (fault 26), and says so."""

from __future__ import annotations

import logging
import math
import random
import statistics
from collections.abc import Callable

import pytest
from rig import V, chain, oracle, plain

from foredraft import Engine, SamplingParams
from foredraft.config import SpeculationConfig
from foredraft.drafters import ModelDrafter
from foredraft.engine.controller import Acceptance, Candidate, Controller
from foredraft.engine.costs import PassCosts
from foredraft.testing import ScriptedDrafter, TableModel


class Clock:
    """Seconds that pass only when a model says so."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class CostlyModel(TableModel):
    """A table whose passes take ``cost(rows)`` seconds of a fake clock."""

    def __init__(self, clock: Clock, cost: Callable[[int], float]) -> None:
        super().__init__(chain(), V)
        self.clock, self.cost = clock, cost

    def forward(self, segments, taps=()):  # type: ignore[no-untyped-def]
        self.clock.now += self.cost(sum(len(s.tokens) for s in segments))
        return super().forward(segments, taps)


def engine(cost: Callable[[int], float], drafter: ScriptedDrafter, **options: object) -> tuple[Engine, CostlyModel]:
    clock = Clock()
    target = CostlyModel(clock, cost)
    return Engine(target=target, drafter=drafter, clock=clock, **options), target  # type: ignore[arg-type]


def test_dear_verification_is_given_up_within_bounded_rounds_and_said(caplog: pytest.LogCaptureFixture) -> None:
    """Verifying two tokens costs five plain steps."""
    made, target = engine(lambda rows: 1.0 if rows == 1 else 3.0 + rows, oracle())
    with caplog.at_level(logging.WARNING, logger="foredraft"):
        result = made.generate([[1]], SamplingParams(max_tokens=200))[0]
    drafted = [i for i, step in enumerate(result.stats.trace) if step.drafted]
    assert len([i for i in drafted if i < 40]) <= 3
    assert [record.message for record in caplog.records if "does not pay" in record.message] == [made.watch.message]
    assert made.speculation_pays is False
    assert result.metrics["speculative_decoding"]["plain_steps_by_choice"] > 150
    assert target.clock.now < 1.1 * 200
    assert result.token_ids == plain([1], SamplingParams(max_tokens=200))


def test_free_verification_and_a_perfect_drafter_reach_the_longest_draft() -> None:
    made, target = engine(lambda rows: 1.0, oracle(), max_k=8)
    result = made.generate([[1]], SamplingParams(max_tokens=200))[0]
    assert [step.drafted for step in result.stats.trace][8:-2].count(8) >= 15
    assert target.clock.now < 45
    assert made.speculation_pays


def test_a_drafter_that_is_always_wrong_is_dropped_and_costs_little() -> None:
    made, target = engine(lambda rows: 1.0 + 0.1 * (rows - 1), oracle(wrong=lambda p: True))
    made.generate([[1]], SamplingParams(max_tokens=400))
    assert target.clock.now < 1.03 * 400


def test_it_comes_back_when_acceptance_does() -> None:
    """Wrong for 150 tokens, perfect afterwards."""
    made, _ = engine(lambda rows: 1.0 + 0.1 * (rows - 1), oracle(wrong=lambda p: p < 150))
    result = made.generate([[1]], SamplingParams(max_tokens=400))[0]
    position, late = 1, []
    for step in result.stats.trace:
        if position > 250:
            late.append(step)
        position += step.accepted + 1
    assert sum(step.drafted > 0 for step in late) > 0.8 * len(late)


def test_a_fixed_length_that_loses_is_kept_but_said(caplog: pytest.LogCaptureFixture) -> None:
    made, _ = engine(lambda rows: float(rows), oracle(wrong=lambda p: p % 2 == 0), k=3)
    with caplog.at_level(logging.WARNING, logger="foredraft"):
        first = made.generate([[1]], SamplingParams(max_tokens=20), speculation=SpeculationConfig(k=0))[0]
        second = made.generate([[1]], SamplingParams(max_tokens=80))[0]
    assert not first.stats.num_draft_tokens
    assert {step.drafted for step in second.stats.trace[1:-3]} == {3}
    assert "times the speed of plain decoding" in caplog.text


def test_requests_of_one_batch_get_their_own_lengths() -> None:
    good, bad = Acceptance(accepted=19, rejected=1), Acceptance(accepted=1, rejected=19)
    controller = Controller()
    for rows in (2, 4, 8, 16):
        controller.passes.observe(rows, 1.0 + 0.05 * rows)
    auto = SpeculationConfig()
    ks = controller.choose([Candidate(good, 16, auto), Candidate(bad, 16, auto)], base_rows=2)
    assert ks[0] >= 5
    assert ks[1] == 0


@pytest.mark.parametrize(("requests", "a_row"), [(1, 0.0), (1, 0.05), (16, 0.0), (16, 1 / 16)])
def test_trial_drafts_of_a_batch_take_a_small_share_of_the_time(requests: int, a_row: float) -> None:
    """Requests that began together try together: where a trial's rows have a price they wait longer."""
    controller = Controller()
    for rows in (requests, requests + 2, 3 * requests):
        for _ in range(3):
            controller.passes.observe(rows, 1.0 + a_row * (rows - requests))
    for _ in range(3):
        controller.drafts.observe(1, 0.01)
    hopeless = [Acceptance(accepted=0.0, rejected=100.0) for _ in range(requests)]
    steps, tried, extra = 200, [], 0.0
    for step in range(steps):
        ks = controller.choose([Candidate(state, 8, SpeculationConfig()) for state in hopeless], requests)
        tried += [step] * any(ks)
        extra += a_row * sum(ks)
    assert extra <= 0.021 * steps or not a_row
    assert tried  # but it does try
    assert (tried[0] <= 16) == (a_row < 1 / 16 or requests == 1)


def test_the_optimum_is_leviathans() -> None:
    """With α, a draft cost c and verification at the price of one row, k maximises (1-α^(k+1)) / ((1-α)(kc+1))."""
    for alpha, c in [(0.5, 0.05), (0.7, 0.1), (0.8, 0.05), (0.9, 0.2), (0.3, 0.4)]:
        controller = Controller()
        for rows in range(1, 18):
            controller.passes.observe(rows, 1.0)
        controller.drafts.observe(1, c)
        state = Acceptance(accepted=alpha * 100, rejected=(1 - alpha) * 100)
        k = controller.choose([Candidate(state, 16, SpeculationConfig())], base_rows=1)[0]

        def gain(k: int, alpha: float = alpha, c: float = c) -> float:
            return (1 - alpha ** (k + 1)) / ((1 - alpha) * (k * c + 1))

        best = max(range(17), key=gain)
        assert k == (best if gain(best) > 1.02 else 0)


def test_costs_follow_the_level_and_keep_the_shape() -> None:
    costs = PassCosts()
    assert costs.estimate(1) is None
    for rows, seconds in [(1, 1.0), (4, 2.0), (16, 5.0)] * 2:
        costs.observe(rows, seconds)
    assert costs.estimate(4) == pytest.approx(2.0)
    assert costs.estimate(10) == pytest.approx(3.5)
    assert costs.estimate(28) == pytest.approx(8.0)
    for _ in range(60):  # the machine slows down by half: only one row count is run, all estimates follow
        costs.observe(4, 4.0)
    assert costs.estimate(4) == pytest.approx(4.0, rel=0.01)
    assert costs.estimate(1) / costs.estimate(16) == pytest.approx(0.2)  # type: ignore[operator]
    assert 1.2 < costs.estimate(1) < 2.1  # type: ignore[operator]


def test_noise_does_not_make_further_rows_cheap() -> None:
    """A large batch has another number of rows in every step: the least of many noisy costs must not be believed."""
    ratios = []
    for seed in range(8):
        rng, costs = random.Random(seed), PassCosts()
        for _ in range(60):
            for rows in (16, rng.randint(17, 40)):
                costs.observe(rows, (1 + 0.1 * rows) * math.exp(rng.gauss(0, 0.1)))
        base = costs.estimate(16)
        assert base is not None
        for rows in range(18, 40):
            found = costs.estimate(rows)
            assert found is not None
            ratios.append(found / base / ((1 + 0.1 * rows) / 2.6))
    assert statistics.mean(ratios) == pytest.approx(1.0, abs=0.03)
    assert statistics.quantiles(ratios, n=10)[0] > 0.93


def test_one_outlier_does_not_stand() -> None:
    costs = PassCosts()
    costs.observe(1, 1.0)
    costs.observe(2, 9.0)  # disturbed
    costs.observe(4, 1.5)
    assert costs.estimate(2) == pytest.approx(1.5)


def test_a_fixed_length_is_what_was_asked_for() -> None:
    made, _ = engine(lambda rows: 1.0, oracle(), k=20, max_k=4)
    result = made.generate([[1]], SamplingParams(max_tokens=64))[0]
    assert [step.drafted for step in result.stats.trace][:4] == [0, 20, 20, 20]


@pytest.mark.parametrize("factor", [20, 1000])
def test_a_slow_first_pass_of_every_length_does_not_end_speculation_for_good(factor: int) -> None:
    """Whatever is run for the first time takes longer by far, as where kernels are compiled or memory is mapped."""
    seen: set[int] = set()

    def cost(rows: int) -> float:
        known = rows in seen
        seen.add(rows)
        return (1.0 + 0.02 * (rows - 1)) * (1 if known else factor)

    made, _ = engine(cost, oracle(), max_k=4)
    result = made.generate([[1]], SamplingParams(max_tokens=2000))[0]
    late = [step.drafted for step in result.stats.trace][-60:-5]
    assert sorted(late)[len(late) // 2] >= 3


@pytest.mark.parametrize("jump", [0.0, -50.0, 80.0])
def test_a_clock_that_stands_still_or_jumps(jump: float) -> None:
    count = iter(range(10**6))

    def cost(rows: int) -> float:
        return jump if next(count) % 7 == 3 else 1.0 + 0.02 * (rows - 1)

    made, _ = engine(cost, oracle(), max_k=8)
    result = made.generate([[1]], SamplingParams(max_tokens=800))[0]
    assert result.token_ids == plain([1], SamplingParams(max_tokens=800))
    late = [step.drafted for step in result.stats.trace][-40:-3]
    assert sorted(late)[len(late) // 2] >= 6


def test_reading_the_prompt_is_not_taken_for_the_price_of_drafting() -> None:
    """A drafter's first draft reads the whole prompt: it says nothing about the next."""
    clock = Clock()
    inner = oracle()
    read: set[tuple[int, ...]] = set()

    def propose(prefix: tuple[int, ...], k: int) -> list[int]:
        clock.now += 0.05 * k + (0.0 if prefix[:2] in read else 30.0)
        read.add(prefix[:2])
        return list(inner.propose_fn(prefix, k))  # type: ignore[arg-type]

    target = CostlyModel(clock, lambda rows: 1.0)
    made = Engine(target=target, drafter=ScriptedDrafter(propose), clock=clock, max_k=8)
    for first in range(3):
        result = made.generate([[first, 1]], SamplingParams(max_tokens=40))[0]
        assert result.plain_steps <= 3, result.stats.trace


def test_a_cheap_sampled_draft_is_not_judged_by_equality() -> None:
    """Draft and target agree on a flat law: two independent draws differ mostly, yet all drafts are accepted."""
    clock = Clock()

    class Flat(TableModel):
        def __init__(self, price: float) -> None:
            super().__init__(lambda prefix: [0.0] * 32, 32)
            self.price = price

        def forward(self, segments, taps=()):  # type: ignore[no-untyped-def]
            clock.now += self.price
            return super().forward(segments, taps)

    made = Engine(target=Flat(1.0), drafter=ModelDrafter(Flat(0.001)), clock=clock)
    request = made.submit([1], SamplingParams(max_tokens=4, temperature=1.0))
    made.controller.passes.observe(1, 1.0)
    made.controller.drafts.observe(1, 0.001)
    assert made.controller.shadow(1)
    made.controller.choose = lambda candidates, base_rows: [0]  # type: ignore[method-assign,assignment]
    before = request.acceptance.rate
    while not request.finished:
        made.step()
    assert request.acceptance.rate == before


def test_nothing_is_said_about_speculation_where_none_was_asked_for() -> None:
    made, _ = engine(lambda rows: 1.0, oracle(), k=0)
    made.generate([[1]], SamplingParams(max_tokens=60))
    assert made.speculation_pays is None


def test_what_a_drafter_must_catch_up_is_not_taken_for_the_price_of_drafting() -> None:
    """Wrong for 400 tokens, perfect afterwards; by then every lone draft has hundreds of plain tokens to read."""
    clock, good = Clock(), chain()

    class Reader(TableModel):
        def __init__(self) -> None:
            super().__init__(lambda prefix: good(prefix) if len(prefix) > 400 else [-x for x in good(prefix)], V)

        def forward(self, segments, taps=()):  # type: ignore[no-untyped-def]
            clock.now += 0.05 + 0.05 * sum(len(s.tokens) for s in segments)
            return super().forward(segments, taps)

    target = CostlyModel(clock, lambda rows: 1.0 + 0.02 * (rows - 1))
    made = Engine(target=target, drafter=ModelDrafter(Reader()), clock=clock, max_k=8)
    result = made.generate([[1]], SamplingParams(max_tokens=1200))[0]
    assert [step.drafted for step in result.stats.trace][-40:-3].count(8) >= 35


def test_a_slow_first_draft_does_not_end_speculation_for_good() -> None:
    """The first draft that shows the price takes thirty times as long as all others."""
    clock, passes = Clock(), iter(range(10**6))

    class Reader(TableModel):
        def forward(self, segments, taps=()):  # type: ignore[no-untyped-def]
            rows = sum(len(s.tokens) for s in segments)
            clock.now += (0.05 + 0.2 * rows) * (30 if 1 <= next(passes) <= 3 else 1)
            return super().forward(segments, taps)

    target = CostlyModel(clock, lambda rows: 1.0)
    made = Engine(target=target, drafter=ModelDrafter(Reader(chain(), V)), clock=clock, max_k=8)
    result = made.generate([[1] * 50], SamplingParams(max_tokens=200))[0]
    assert result.plain_steps < 40


def test_drafting_has_a_price_where_every_step_has_a_newcomer() -> None:
    """Requests of three tokens, one after the other: all drafts are first drafts, and drafting is dear."""
    clock = Clock()
    inner = oracle()

    def propose(prefix: tuple[int, ...], k: int) -> list[int]:
        clock.now += 5.0 * k
        return list(inner.propose_fn(prefix, k))  # type: ignore[arg-type]

    made = Engine(target=CostlyModel(clock, lambda rows: 1.0), drafter=ScriptedDrafter(propose), clock=clock)
    results = [made.generate([[i % V]], SamplingParams(max_tokens=3))[0] for i in range(40)]
    assert sum(result.stats.num_spec_steps for result in results) < 8
