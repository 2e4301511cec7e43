"""The demo: figures that add up, and plain words when something is not as hoped."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import pytest
from cli_support import Cli, fake_load, stand_in

from foredraft.cli import demo as demo_module
from foredraft.cli.demo_prompts import PROMPTS
from foredraft.cli.demo_table import Row, Run, remarks, total_of
from foredraft.cli.stats import Tally, footer
from foredraft.config import SamplingParams
from foredraft.engine.engine import Engine
from foredraft.engine.result import Result, Timings, Usage
from foredraft.engine.stats import SpecStats


def result(ids: list[int], steps: list[tuple[int, int]], decode_s: float = 1.0) -> Result:
    """A result of ``steps``: (drafted, accepted) each."""
    stats = SpecStats()
    for drafted, accepted in steps:
        stats.add(drafted, accepted)
    usage, timings = Usage(3, len(ids)), Timings(decode_s=decode_s)
    return Result("r", [1, 2, 3], "", ids, [], None, "length", 0, usage, timings, stats, "exact")


PLAIN = Run(result([1, 2, 3, 4, 5, 6], [(0, 0)] * 6), 5.0, 5)
FAST = Run(result([1, 2, 3, 4, 5, 6], [(0, 0), (4, 3), (2, 0)]), 2.5, 5)


@pytest.fixture
def cli(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Cli:
    stand_in(monkeypatch)
    monkeypatch.setattr("foredraft.engine.watch.WINDOW", 10**6)
    monkeypatch.setenv("COLUMNS", "80")
    return Cli(capsys)


def test_rates_are_ratios_of_sums() -> None:
    one = result([0] * 4, [(0, 0), (3, 2)], decode_s=1.0)
    two = result([0] * 7, [(0, 0), (1, 1), (4, 0), (4, 3), (0, 0)], decode_s=3.0)
    tally = Tally([one, two])
    assert (tally.tokens, tally.calls, tally.calls_saved) == (11, 7, 4)
    assert tally.rate == (3 + 6) / 4.0  # the first token of each is not timed
    assert tally.alpha == 6 / 12
    assert tally.tau == 1 + 6 / 4
    assert tally.by_position == [3 / 4, 2 / 4, 1 / 4, 0]
    assert sum(tally.by_position) == pytest.approx(tally.tau - 1)


def test_nothing_drafted_has_no_rates() -> None:
    tally = Tally([result([0], [(0, 0)], decode_s=0.0)])
    assert (tally.rate, tally.alpha, tally.tau, tally.by_position) == (None, None, None, [])
    assert footer(tally) == "1 token in 0.00 s · nothing drafted"
    assert Tally().to_dict()["draft_acceptance_rate"] is None


def test_a_row_compares_tokens_and_speed() -> None:
    row = Row("p", PLAIN, FAST)
    assert row.first_difference is None
    assert row.speed_up == 2.0
    assert remarks([row]) == []
    assert total_of([row, row])["speed_up"] == 2.0
    assert total_of([row, row])["speculative"]["target_calls_saved"] == 6


def test_a_difference_is_named_with_its_gap() -> None:
    other = Run(replace(FAST.result, token_ids=[1, 2, 9, 4, 5, 6]), 2.5, 5)
    [tie] = remarks([Row("p", PLAIN, other, gap=0.01)])
    assert "part at token 3" in tie
    assert "0.0100" in tie
    assert "near-tie" in tie
    [wrong] = remarks([Row("p", PLAIN, other, gap=2.0)])
    assert "near-tie" not in wrong
    assert "report it" in wrong
    shorter = Run(replace(FAST.result, token_ids=[1, 2, 3]), 2.5, 5)
    assert Row("p", PLAIN, shorter).first_difference == 3


def test_slower_is_said_and_so_is_too_fast() -> None:
    [slow] = remarks([Row("chat", PLAIN, replace(FAST, seconds=10.0))])
    assert slow == "Speculation was slower here: chat (0.50x)."
    [noisy] = remarks([Row("chat", PLAIN, replace(FAST, seconds=1.0))])  # 5x, where 6 tokens took 3 calls
    assert "The machine's speed changed" in noisy


def test_the_report_adds_up(cli: Cli) -> None:
    done = cli("demo", "--max-tokens", "40", "--k", "4", "--json")
    assert (done.code, done.err) == (0, "")
    report = done.json
    assert [row["name"] for row in report["prompts"]] == [prompt.name for prompt in PROMPTS]
    assert report["rounds"] == 2
    assert all(row["same_text"] and row["first_difference"] is None for row in report["prompts"])
    assert all(row["plain"]["tokens"] == row["speculative"]["completion_tokens"] == 40 for row in report["prompts"])
    total = report["total"]["speculative"]
    for count in ("completion_tokens", "target_calls", "num_draft_tokens", "num_accepted_draft_tokens"):
        assert total[count] == sum(row["speculative"][count] for row in report["prompts"])
    assert total["num_accepted_draft_tokens"] > 0
    assert total["target_calls_saved"] == total["completion_tokens"] - total["target_calls"]


@pytest.mark.parametrize("columns", ["60", "80", "120"])
def test_the_page_for_people(cli: Cli, monkeypatch: pytest.MonkeyPatch, columns: str) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    done = cli("demo", "--max-tokens", "40", "--k", "4")
    assert done.code == 0
    for prompt in PROMPTS:
        assert prompt.name in done.out
    for word in ("plain", "spec.", "α", "τ", "saved", "% accepted", "4/4"):
        assert word in done.out, word
    tables = done.out[done.out.rindex("prompt") :]
    assert "…" not in tables
    assert max(map(len, tables.splitlines())) <= int(columns)


def test_nothing_carries_over_from_one_run_to_the_next(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    reused: list[int] = []
    follow = Engine.stream

    def spy(self: Engine, *args: Any, **kwargs: Any) -> Any:
        for delta in follow(self, *args, **kwargs):
            if delta.result:
                reused.append(delta.result.usage.cached_tokens)
            yield delta

    monkeypatch.setattr(Engine, "stream", spy)
    assert cli("demo", "--max-tokens", "4", "--json").code == 0
    assert reused == [0] * (1 + 4 * len(PROMPTS))  # the warm-up's too


def test_a_slow_machine_measures_once(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo_module, "ENOUGH_S", 0.0)
    assert cli("demo", "--max-tokens", "4", "--json").json["rounds"] == 1


def test_a_difference_is_found_and_its_gap_measured(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    """A broken engine: with drafts, the tenth token is another one."""
    stream = Engine.stream

    def broken(self: Engine, *args: Any, **kwargs: Any) -> Any:
        for delta in stream(self, *args, **kwargs):
            if delta.result and self.drafter is not None:
                delta.result.token_ids[9] = 0
            yield delta

    monkeypatch.setattr(Engine, "stream", broken)
    report = cli("demo", "--max-tokens", "20", "--json").json
    assert not report["total"]["same_text"]
    for row in report["prompts"]:
        assert row["first_difference"] == 9
        assert row["top2_logit_gap"] == pytest.approx(8.0, abs=1e-3)  # the reciter's one high logit


def test_the_time_of_showing_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine(fake_load()("reciter"))
    shown: list[int] = []

    def slow(delta: Any) -> None:
        time.sleep(0.05)
        shown.append(len(delta.tokens))

    run = demo_module.timed(engine, [1, 2, 3], SamplingParams(max_tokens=10), slow)
    assert (sum(shown), run.timed_tokens) == (10, 9)
    assert 0 < run.seconds < 0.05 * (len(shown) - 1)


def test_a_slow_machine_writes_less(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    assert demo_module.affordable(1e9) == demo_module.TOKENS
    for rate in (2.5, 5.0, 9.0):  # both ways, every prompt, no draft accepted
        assert demo_module.affordable(rate) * 2 * len(PROMPTS) / rate <= demo_module.BUDGET_S
    assert demo_module.affordable(0.01) == 16
    monkeypatch.setattr(demo_module, "warm_up", lambda _: 2.0)
    monkeypatch.setattr(demo_module, "ENOUGH_S", 0.0)
    done = cli("demo", "--json")
    assert all(row["plain"]["tokens"] == demo_module.affordable(2.0) for row in done.json["prompts"])
    assert done.err.startswith("warning: plain decoding runs at 2.0 tokens a second")
    assert cli("demo", "--json", "--max-tokens", "9").err == ""


def test_each_run_is_cold() -> None:
    engine = Engine(fake_load()("reciter"), "suffix", k=4)
    ids, params = [104, 105], SamplingParams(max_tokens=30)
    runs = [demo_module.timed(engine, ids, params, lambda delta: None) for _ in range(2)]
    assert runs[0].result.stats.num_steps == runs[1].result.stats.num_steps  # a pool of past answers would save some
