"""The guard: what an attacker can waste is bounded, texts are unchanged, others do not notice, honest drafts stay."""

from __future__ import annotations

import logging
import random

import pytest
from rig import V, model, oracle, plain

from foredraft import Engine, SamplingParams, SpeculationConfig
from foredraft.config import EngineConfig
from foredraft.engine.controller import Controller
from foredraft.engine.guard import FIRST_PAUSE, PROBE_K, PROBES, TENANTS, Account, Guard, GuardEvent
from foredraft.errors import ConfigError
from foredraft.testing import ScriptedDrafter

K = 4
PROMPT = [1, 2, 3]
wrong = oracle(wrong=lambda position: True)


def engine(drafter: ScriptedDrafter, **options: object) -> Engine:
    return Engine(target=model(), drafter=drafter, **{"k": K, "guard": True, "guard_rate": 0.25, **options})


def rejected(engine: Engine) -> int:
    return engine.stats.num_draft_tokens - engine.stats.num_accepted_draft_tokens


def test_a_drafter_that_is_always_wrong_wastes_little_and_changes_nothing() -> None:
    params = SamplingParams(max_tokens=900)
    guarded, free = engine(wrong), engine(wrong, guard=False)
    for one in (guarded, free):
        [result] = one.generate([PROMPT], params)
        assert result.token_ids == plain(PROMPT, params)
    probes = 4  # pauses of 64, 128, 256 and 512 tokens
    assert rejected(guarded) <= 64 + K + probes * PROBES * PROBE_K
    assert rejected(free) > 3000


def test_new_requests_of_the_same_tenant_do_not_start_anew() -> None:
    """Ever new requests, each too short to be caught alone: the tenant's account stops them."""
    params = SamplingParams(max_tokens=12)
    guarded = engine(wrong, guard_request_waste=1000, guard_false_alarm=1e-6)
    for _ in range(100):
        guarded.generate([PROMPT], params)
    written = 100 * 12
    assert rejected(guarded) <= 256 + K + 4 * PROBES * PROBE_K
    assert guarded.guard.counts["tenant", "paused"]
    assert guarded.stats.num_steps >= written - rejected(guarded)


def mixed(prefix: tuple[int, ...], k: int) -> list[int]:
    """Right for prompts that begin with 1, wrong for all others."""
    right = oracle().propose_fn(prefix, k)
    return list(right) if prefix[0] == 1 else [(token + 1) % V for token in right]  # type: ignore[operator]


def trace(together: bool) -> list[list[tuple[int, int]]]:
    """Draft lengths and acceptances of three honest requests, with or without an attacker beside them."""
    one = engine(ScriptedDrafter(mixed), max_batch=8)
    params = SamplingParams(max_tokens=150)
    honest = [one.submit([1, 2, n], params, tenant="honest") for n in range(3)]
    if together:
        for n in range(4):
            one.submit([2, 2, n], params, tenant="attacker")
    while one.scheduler.busy:
        one.step()
    assert (one.guard.counts["tenant", "paused"] > 0) == together
    return [[(step.drafted, step.accepted) for step in request.stats.trace] for request in honest]


def test_an_attacker_changes_nothing_for_others() -> None:
    assert trace(together=True) == trace(together=False)


def test_other_requests_of_a_tenant_are_judged_by_their_own_acceptance() -> None:
    """One hopeless request beside good ones: it alone is stopped, as long as the tenant as a whole pays."""
    one = engine(ScriptedDrafter(mixed), guard_tenant_waste=100_000)
    params = SamplingParams(max_tokens=150)
    good, bad = one.submit([1, 2, 3], params), one.submit([2, 2, 3], params)
    while one.scheduler.busy:
        one.step()
    assert all(step.drafted for step in good.stats.trace[1:-1])
    assert sum(step.drafted > 0 for step in bad.stats.trace) < 40
    assert one.guard.counts["request", "paused"] == 1


def test_speculation_comes_back_when_the_text_becomes_predictable() -> None:
    turn = 200
    late = oracle(wrong=lambda position: position < turn)
    params = SamplingParams(max_tokens=800)
    one = engine(late)
    [result] = one.generate([PROMPT], params)
    assert result.token_ids == plain(PROMPT, params)
    trace = result.stats.trace
    assert any(step.drafted == 0 for step in trace[1:])
    assert [step.drafted for step in trace[-20:-3]] == [K] * 17
    assert one.guard.counts["request", "restored"] == 1


def test_events_are_told_and_hold_no_text(caplog: pytest.LogCaptureFixture) -> None:
    one, events = engine(wrong), []
    one.guard.listeners.append(events.append)
    one.guard.listeners.append(lambda event: 1 / 0)  # a broken listener is its own affair
    with caplog.at_level(logging.WARNING, "foredraft"):
        one.generate([PROMPT], SamplingParams(max_tokens=200), tenant="t")
    assert [(event.kind, event.scope, event.tenant) for event in events][:1] == [("paused", "request", "t")]
    assert all(isinstance(event, GuardEvent) for event in events)
    assert "0 of" in events[0].message
    assert any("guard: drafting paused" in record.message for record in caplog.records)


def test_off_means_off() -> None:
    [result] = engine(wrong).generate([PROMPT], SamplingParams(max_tokens=50), speculation=SpeculationConfig(k=0))
    assert result.stats.num_draft_tokens == 0
    assert Engine(target=model(), drafter=wrong, k=K).guard.enabled is False


def ever_stops(rate: float, true: float, k: int, steps: int, rng: random.Random) -> bool:
    """Whether the test alone stops a request whose drafted tokens are accepted one by one with chance ``a``."""
    account = Account(0.05, float("inf"))
    for _ in range(steps):
        accepted = 0
        while accepted < k and rng.random() < true:
            accepted += 1
        if account.update("r", k, accepted, accepted + 1, rate) == "paused":
            return True
    return False


def test_false_alarms_are_as_rare_as_stated() -> None:
    """At the break-even rate itself, over 400 steps, the test stops at most the stated share; well below, all."""
    rng, runs, k, chance = random.Random(1), 600, 4, 0.5
    break_even = sum(chance**j for j in range(1, k + 1)) / k
    alarms = sum(ever_stops(break_even, chance, k, 400, rng) for _ in range(runs))
    assert alarms <= runs * 0.05 + 3 * (runs * 0.05 * 0.95) ** 0.5
    assert sum(ever_stops(break_even, 0.1, k, 400, rng) for _ in range(50)) == 50


def test_the_budget_holds_by_itself() -> None:
    """With a test that would hardly ever stop anybody; written tokens pay a little back."""
    account, drafted = Account(1e-12, 64.0), 0
    while account.limit("r") is None:
        account.update("r", K, 0, 1, 0.25)
        drafted += K
    assert 64 < drafted <= 64 + K


def test_pauses_grow_while_nothing_improves() -> None:
    account, lengths, paused = Account(0.01, 64.0), [], 0
    for _ in range(20_000):
        limit = account.limit("r")
        if limit == 0:
            paused += 1
        elif paused:
            lengths.append(paused)
            paused = 0
        account.update("r", K if limit is None else min(K, limit), 0, 1, 0.25)
    long = [length for length in lengths if length >= FIRST_PAUSE]
    assert long[:4] == [FIRST_PAUSE * 2**n for n in range(4)]
    assert max(long) == 2048


def test_being_good_now_and_then_does_not_buy_waste() -> None:
    """An account that pays until drafting is given back, then wastes until it is taken: pauses still grow."""
    account, wasted, written = Account(0.01, 64.0), 0, 30_000
    for _ in range(written):
        limit = account.limit("r")
        k = K if limit is None else min(K, limit)
        good = account.state == "probing"
        account.update("r", k, k if good else 0, 1 + k * good, 0.25)
        wasted += 0 if good else k
    assert wasted / written < 0.05


def test_one_request_at_a_time_tries_for_its_tenant() -> None:
    account = Account(0.01, 10.0)
    while account.state == "open":
        account.update("a", K, 0, 1, 0.25)
    account.update("a", 0, 0, FIRST_PAUSE, 0.25)
    assert (account.limit("a"), account.limit("b")) == (PROBE_K, 0)
    for _ in range(40):  # a has gone; b takes over
        account.update("b", 0, 0, 1, 0.25)
    assert (account.limit("a"), account.limit("b")) == (0, PROBE_K)


def test_the_break_even_rate_follows_measured_costs() -> None:
    controller = Controller()
    guard = Guard(EngineConfig(guard=True), controller)
    assert guard.rate(4, 1) == pytest.approx(0.2)  # nothing measured yet
    for _ in range(5):
        for rows, seconds in ((1, 1.0), (5, 1.4)):
            controller.passes.observe(rows, seconds)
    assert guard.rate(4, 1) == pytest.approx(0.1, abs=0.01)  # four rows cost 0.4 of a pass
    controller.drafts.observe(1, 0.3)
    assert guard.rate(4, 1) == pytest.approx(0.4, abs=0.02)
    assert Guard(EngineConfig(guard_rate=0.4), controller).rate(4, 1) == 0.4


def test_accounts_of_tenants_do_not_pile_up() -> None:
    guard = Guard(EngineConfig(guard=True), Controller())
    first = guard.tenant("t0")
    for n in range(1, TENANTS):
        guard.tenant(f"t{n}")
    assert guard.tenant("t0") is first
    guard.tenant("one more")
    assert len(guard._tenants) == TENANTS
    assert guard.tenant("t0") is first  # t1 had to go


@pytest.mark.parametrize("field", ["guard_rate", "guard_false_alarm", "guard_request_waste", "guard_tenant_waste"])
def test_nonsense_is_refused(field: str) -> None:
    with pytest.raises(ConfigError) as caught:
        EngineConfig(**{field: 0})
    assert field in str(caught.value)
