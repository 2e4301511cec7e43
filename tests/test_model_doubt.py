"""A draft ends when its model is in doubt, where the law allows it."""

from __future__ import annotations

import pytest
from rig import V, chain, model, plain

from foredraft import Engine, SamplingParams
from foredraft.drafters import ModelDrafter, create
from foredraft.drafters.base import DrafterContext
from foredraft.errors import ConfigError
from foredraft.testing import TableModel

PROMPTS = [[0], [1, 2, 3], list(range(V)) * 3]


def unsure(position: int) -> bool:
    return position % 4 == 0


def hedging() -> TableModel:
    """Right and sure, except at every fourth position: there it is wrong, and knows it."""
    good = chain()

    def logits(prefix: tuple[int, ...]) -> list[float]:
        row = good(prefix)
        best = max(range(V), key=row.__getitem__)
        if unsure(len(prefix)):
            return [0.1 * (i == (best + 1) % V) for i in range(V)]
        return [20.0 * (i == best) for i in range(V)]

    return TableModel(logits, V)


def test_a_greedy_draft_ends_with_the_first_doubtful_token() -> None:
    params = SamplingParams(max_tokens=60)
    engine = Engine(target=model(), drafter=ModelDrafter(hedging(), doubt=0.5), k=8)
    results = engine.generate(PROMPTS, params)
    assert [r.token_ids for r in results] == [plain(p, params) for p in PROMPTS]
    for result in results:
        steps = [step for step in result.stats.trace if step.drafted][:-3]
        assert {step.drafted - step.accepted for step in steps} == {1}  # never a token behind the doubtful one
        assert max(step.drafted for step in steps) == 4


@pytest.mark.parametrize("verify", ["block", "rejection"])
def test_a_sampled_draft_is_written_to_its_end(verify: str) -> None:
    """Its length would tell what was drawn."""
    params = SamplingParams(max_tokens=60, temperature=1.0, seed=1)
    engine = Engine(target=model(), drafter=ModelDrafter(hedging(), doubt=0.5), k=8, verify=verify)  # type: ignore[arg-type]
    for result in engine.generate(PROMPTS, params):
        assert {step.drafted for step in result.stats.trace[1:-8]} == {8}


def test_a_seeded_text_does_not_depend_on_doubt() -> None:
    params = SamplingParams(max_tokens=40, temperature=0.8, seed=4)
    for doubt in (0.1, 0.9):
        engine = Engine(target=model(), drafter=ModelDrafter(hedging(), doubt=doubt), k=5)
        assert [r.token_ids for r in engine.generate(PROMPTS, params)] == [plain(p, params) for p in PROMPTS]


@pytest.mark.parametrize("argument", ["smollm2-135m,doubt=x", "smollm2-135m,doubt="])
def test_values_that_make_no_sense_are_refused(argument: str) -> None:
    with pytest.raises(ConfigError, match="doubt"):
        create(f"model:{argument}", DrafterContext(model(), None))
    for doubt in (0.0, 1.0, float("nan")):
        with pytest.raises(ConfigError, match="doubt"):
            ModelDrafter(model(), doubt=doubt)
