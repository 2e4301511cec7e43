"""Prompts, options, tables and scripts in every container that a caller may hold, or a refusal that names the field."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from rig import V, chain, model, oracle, plain

from foredraft import Engine, SamplingParams
from foredraft.drafters import LookupDrafter, ModelDrafter
from foredraft.errors import ConfigError, ContextLengthError
from foredraft.testing import ScriptedDrafter, TableModel

PARAMS = SamplingParams(max_tokens=12)


@pytest.mark.parametrize(
    "prompts",
    [
        [1, 2],
        (1, 2),
        range(1, 3),
        np.array([1, 2]),
        torch.tensor([1, 2]),
        [np.int64(1), np.int32(2)],
        list(torch.tensor([1, 2])),
        [[1, 2]],
        [(1, 2)],
        [np.array([1, 2])],
        [torch.tensor([1, 2])],
        np.array([[1, 2]]),
        (prompt for prompt in [[1, 2]]),
        [iter([1, 2])],
    ],
)
def test_prompts(prompts: Any) -> None:
    results = Engine(target=model(), drafter=oracle(), k=3).generate(prompts, PARAMS)
    assert [result.token_ids for result in results] == [plain([1, 2], PARAMS)]
    assert all(type(token) is int for token in results[0].prompt_ids)


def test_prompts_of_one_token_each_in_arrays() -> None:
    prompts: list[Any] = [torch.tensor([1]), torch.tensor([2])]
    results = Engine(target=model()).generate(prompts, PARAMS)
    assert [result.token_ids for result in results] == [plain([1], PARAMS), plain([2], PARAMS)]
    assert Engine(target=model()).generate([], PARAMS) == []


@pytest.mark.parametrize(
    "prompts", [5, None, [1.5, 2], [[1.5]], [[[1]]], b"\x01", [b"\x01"], [1, "a"], [None], [["1"]]]
)
def test_what_is_no_prompt_is_named(prompts: Any) -> None:
    engine = Engine(target=model())
    with pytest.raises(ConfigError, match="prompt"):
        engine.generate(prompts, PARAMS)
    assert not engine.scheduler.busy


@pytest.mark.parametrize(
    ("arguments", "field"),
    [
        ({"params": {"temperature": 1.0}}, "params"),
        ({"params": [{"temperature": 1.0}]}, "params"),
        ({"params": "hot"}, "params"),
        ({"params": 1}, "params"),
        ({"params": [PARAMS, PARAMS]}, "params"),
        ({"speculation": {"k": 1}}, "speculation"),
        ({"speculation": 4}, "speculation"),
        ({"speculation": [PARAMS]}, "speculation"),
    ],
)
def test_options_of_the_wrong_kind_are_named(arguments: dict[str, Any], field: str) -> None:
    with pytest.raises(ConfigError, match=field):
        Engine(target=model()).generate([[1]], **arguments)


@pytest.mark.parametrize("target", [None, 3, object()])
def test_what_is_no_target_is_named(target: Any) -> None:
    with pytest.raises(ConfigError, match="target"):
        Engine(target=target)


@pytest.mark.parametrize("drafter", [3, LookupDrafter, lambda prefix, k: []])
def test_what_is_no_drafter_is_named(drafter: Any) -> None:
    with pytest.raises(ConfigError, match="drafter"):
        Engine(target=model(), drafter=drafter)


def test_a_minimum_that_the_context_cannot_hold_is_refused() -> None:
    engine = Engine(target=model(max_context=8))
    with pytest.raises(ContextLengthError, match="min_tokens"):
        engine.generate([[1, 2]], SamplingParams(min_tokens=7))
    assert len(engine.generate([[1, 2]], SamplingParams(min_tokens=6))[0].token_ids) == 6


@pytest.mark.parametrize(
    "convert",
    [
        list,
        tuple,
        np.array,
        torch.tensor,
        lambda row: np.array(row, dtype=np.float32),
        lambda row: torch.tensor(row, requires_grad=True),
        lambda row: [torch.tensor(x) for x in row],
    ],
)
def test_logits(convert: Callable[[list[float]], Any]) -> None:
    target = TableModel(lambda prefix: convert(chain()(prefix)), V)
    params = SamplingParams(max_tokens=12, logprobs=2)
    assert Engine(target=target, drafter=oracle(), k=3).generate([[1, 2]], params)[0].token_ids == plain([1, 2], params)


def test_logits_in_a_buffer_that_is_used_again() -> None:
    buffer = np.zeros(V)

    def logits(prefix: tuple[int, ...]) -> Any:
        buffer[:] = chain()(prefix)
        return buffer

    result = Engine(target=TableModel(logits, V), drafter=oracle(), k=3).generate([[1, 2]], PARAMS)[0]
    assert result.token_ids == plain([1, 2], PARAMS)


def rows(tokens: list[int]) -> list[list[float]]:
    return [[float(i == token) for i in range(V)] for token in tokens]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize(
    "answer",
    [
        lambda ids: ids,
        tuple,
        iter,
        np.array,
        torch.tensor,
        lambda ids: tuple(np.array(ids)),
        lambda ids: tuple(torch.tensor(ids)),
        lambda ids: (ids, None),
        lambda ids: (ids, rows(ids)),
        lambda ids: (iter(ids), rows(ids)),
        lambda ids: (tuple(ids), tuple(map(tuple, rows(ids)))),
        lambda ids: (np.array(ids), np.array(rows(ids), dtype=np.float32)),
        lambda ids: (torch.tensor(ids), torch.tensor(rows(ids), dtype=torch.float64)),
        lambda ids: (ids, [torch.tensor(row) for row in rows(ids)]),
        lambda ids: (ids, [np.array(row) for row in rows(ids)]),
        lambda ids: (ids[:1], rows(ids)[0]),
        lambda ids: (ids[:1], torch.tensor(rows(ids)[0])),
    ],
)
def test_scripts(answer: Callable[[list[int]], Any], temperature: float) -> None:
    """Two tokens at most, since a tuple of two ids looks like a pair of ids and q."""
    script = ScriptedDrafter(lambda prefix, k: answer(list(oracle().propose_fn(prefix, min(k, 2)))))  # type: ignore[arg-type]
    params = SamplingParams(max_tokens=12, temperature=temperature, seed=1)
    result = Engine(target=model(), drafter=script, k=4).generate([[1, 2]], params)[0]
    assert result.stats.num_accepted_draft_tokens > 0
    assert result.stats.num_spec_steps > len(result.stats.trace) - 3  # the drafter was never dismissed
    assert result.token_ids == plain([1, 2], params)


@pytest.mark.parametrize("nothing", [[], (), ([], []), ([], None), ([], torch.empty(0, V)), np.array([], dtype=int)])
def test_scripts_that_propose_nothing_are_asked_again(nothing: Any) -> None:
    asked: list[int] = []

    def propose(prefix: tuple[int, ...], k: int) -> Any:
        asked.append(len(prefix))
        return nothing

    result = Engine(target=model(), drafter=ScriptedDrafter(propose), k=3).generate([[1, 2]], PARAMS)[0]
    assert result.token_ids == plain([1, 2], PARAMS)
    assert len(asked) == 10


def test_scripts_with_fractions_for_ids_are_refused(caplog: pytest.LogCaptureFixture) -> None:
    script = ScriptedDrafter(lambda prefix, k: [1.5] * k)  # type: ignore[list-item]
    assert Engine(target=model(), drafter=script, k=3).generate([[1, 2]], PARAMS)[0].token_ids == plain([1, 2], PARAMS)
    assert "goes on without its drafter" in caplog.text


@pytest.mark.parametrize("vocab", [1, 2])
@pytest.mark.parametrize("seed", [0, 2**63 - 1])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_small_vocabularies_and_extreme_seeds(vocab: int, seed: int, temperature: float) -> None:
    def flat() -> TableModel:
        return TableModel(lambda prefix: [0.0] * vocab, vocab)

    params = SamplingParams(max_tokens=6, temperature=temperature, seed=seed, logprobs=3)
    result = Engine(target=flat(), drafter=ModelDrafter(flat()), k=3).generate([[0]], params)[0]
    assert result.token_ids == plain([0], params, flat())
    assert result.logprobs is not None
    assert {len(entry.top) for entry in result.logprobs} == {vocab}
