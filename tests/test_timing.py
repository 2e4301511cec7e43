"""What a draft takes by its length: a beginning and a price a token, and no disturbance that stays."""

from __future__ import annotations

import pytest

from foredraft.config import SpeculationConfig
from foredraft.drafters.timing import DraftTimes, Team
from foredraft.engine.controller import Acceptance, Candidate, Controller


def learnt(*drafts: tuple[int, float]) -> tuple[float, float]:
    times = DraftTimes()
    assert not times
    for tokens, seconds in drafts:
        times.observe(tokens, seconds)
    return times.setup, times.each


def test_nothing_costs_nothing_and_one_length_has_no_beginning() -> None:
    assert learnt() == (0.0, 0.0)
    assert learnt((4, 2.0), (4, 9.0), (4, 2.0)) == (0.0, 0.5)


@pytest.mark.parametrize("quicker", [1, 4])
def test_the_quicker_team_runs_and_the_other_is_tried_again(quicker: int) -> None:
    now, calls = [0.0], list[int]()
    team = Team(clock=lambda: now[0])

    def call(threads: int) -> str:
        calls.append(threads)
        now[0] += 1.0 if threads == quicker else 2.0
        return "drafted"

    assert {team.run(4, call, len) for _ in range(320)} == {"drafted"}
    assert calls[:4] == [4, 1, 4, 1]
    assert calls[10:].count(quicker) >= 300
    assert calls[10:].count(5 - quicker) >= 9
    quicker, calls = 5 - quicker, []  # another program comes or goes
    for _ in range(640):
        team.run(4, call, len)
    assert calls[-200:].count(quicker) >= 190
    calls.clear()
    team.run(1, call, len)
    assert calls == [1]


def test_two_lengths_show_the_beginning() -> None:
    assert learnt((1, 1.0), (5, 3.0)) == pytest.approx((0.5, 0.5))
    assert learnt((2, 1.0), (6, 3.0), (4, 2.0)) == pytest.approx((0.0, 0.5))
    assert learnt((1, 2.0), (3, 2.0)) == pytest.approx((2.0, 0.0))


@pytest.mark.parametrize("disturbed", [(3, 60.0), (9, 60.0)])
def test_one_disturbed_draft_makes_no_price(disturbed: tuple[int, float]) -> None:
    setup, each = learnt(*[(1, 1.0)] * 5, (5, 3.0), disturbed)
    for tokens, seconds in ((1, 1.0), (5, 3.0)):
        assert setup + tokens * each <= seconds + 1e-9
    latest = learnt(*[(1, 1.0)] * 5, (5, 30.0), *[(5, 3.0)] * 9)  # and medians forget
    assert latest == pytest.approx((0.5, 0.5))


@pytest.mark.parametrize("rate", [0.5, 0.7, 0.9])
def test_short_drafts_do_not_make_long_ones_look_dear(rate: float) -> None:
    """The length that is chosen is the best one by true prices, though most drafts that were seen had one token."""
    controller, plain, row, setup, each = Controller(), 5.0, 0.2, 0.8, 0.3
    for rows in range(1, 17):
        for _ in range(10):
            controller.passes.observe(rows, plain + row * (rows - 1))
    for tokens in (4, 2, 4, 2, *[1] * 50):
        controller.drafts.observe(tokens, setup + each * tokens)
    acceptance = Acceptance(accepted=1000 * rate, rejected=1000 * (1 - rate))
    [chosen] = controller.choose([Candidate(acceptance, 12, SpeculationConfig())], 1)

    def speed(k: int) -> float:
        cost = plain + row * k + (setup + each * k if k else 0.0)
        return sum(rate**j for j in range(k + 1)) / cost

    assert speed(chosen) == pytest.approx(max(map(speed, range(13))), rel=0.01)
    assert chosen > 1
