"""What every drafter should show: the output does not change, and nothing is left behind."""

from __future__ import annotations

import pytest
from foredraft_echo import EchoDrafter

from foredraft import Engine, SamplingParams
from foredraft.errors import ConfigError
from foredraft.testing import TableModel

PROMPT = [1, 2, 3, 4, 1]


def repeats(prefix: tuple[int, ...]) -> list[float]:
    """Repeats the prompt, but stumbles over every seventh token."""
    stumble = len(prefix) % 7 == 0
    following = prefix[-1] % 4 + 1
    return [2.0 if token == 0 and stumble else float(token == following) for token in range(6)]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_output_does_not_change(temperature: float) -> None:
    params = SamplingParams(temperature=temperature, seed=5, max_tokens=40)
    [plain] = Engine(target=TableModel(repeats, 6)).generate([PROMPT], params)
    [drafted] = Engine(target=TableModel(repeats, 6), drafter=EchoDrafter(), k=4).generate([PROMPT], params)
    assert drafted.token_ids == plain.token_ids
    assert drafted.stats.num_accepted_draft_tokens > 0
    assert drafted.stats.num_steps < plain.stats.num_steps


def test_nothing_is_left_behind() -> None:
    drafter = EchoDrafter()
    Engine(target=TableModel(repeats, 6), drafter=drafter, k=4).generate([PROMPT], SamplingParams(max_tokens=9))
    assert drafter._after == {}


def test_an_argument_that_makes_no_sense_is_refused() -> None:
    with pytest.raises(ConfigError, match="echo:8"):
        EchoDrafter(0)
