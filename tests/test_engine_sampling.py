"""Sampled output through the whole engine: its law, its seeds, its processors (faults 1-3, 5, 6, 19-22)."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Sequence

import pytest
import torch
from rig import V, chain, model, oracle, plain

from foredraft import Engine, SamplingParams
from foredraft.config import SpeculationConfig
from foredraft.drafters import LookupDrafter, ModelDrafter
from foredraft.errors import NumericalError, RequestFailedError
from foredraft.sampling.law import TokenLaw
from foredraft.testing import ScriptedDrafter, TableModel
from foredraft.testing.stats import goodness_of_fit

DRAWS = 1500
SMALL = 4


def table(seed: int) -> TableModel:
    return TableModel(chain(seed, SMALL, spread=1.0), SMALL)


def argmax_draft(prefix: tuple[int, ...], k: int) -> list[int]:
    logits, ids = chain(7, SMALL, spread=1.0), list(prefix)
    for _ in range(k):
        row = logits(tuple(ids))
        ids.append(row.index(max(row)))
    return ids[len(prefix) :]


@pytest.mark.parametrize("verify", ["rejection", "block", "coupled"])
@pytest.mark.parametrize("which", ["model", "argmax"])
@pytest.mark.parametrize(
    "controls",
    [{}, {"top_k": 2}, {"temperature": 0.7, "top_p": 0.8, "frequency_penalty": 1.0}],
    ids=["T=1", "top-k", "mixed"],
)
def test_the_law_of_the_first_tokens(verify: str, which: str, controls: dict[str, float]) -> None:
    params = SamplingParams(**{"temperature": 1.0, "max_tokens": 4, **controls})
    each = [params.model_copy(update={"seed": seed}) for seed in range(DRAWS)]
    drafter = ModelDrafter(table(7)) if which == "model" else ScriptedDrafter(argmax_draft)
    engine = Engine(target=table(2), drafter=drafter, k=2, verify=verify, max_batch=64)
    # the first token comes from the prompt's pass; the two after it from one verified block
    prompt = [1, 2, 0]
    outputs = [result.token_ids for result in engine.generate([prompt] * DRAWS, each)]
    common = Counter(first for first, *_ in outputs).most_common(1)[0][0]
    counts = Counter((a, b) for first, a, b, _ in outputs if first == common)
    assert engine.stats.to_dict()["num_spec_tokens"] == 2
    law = exact_pairs_after(params, prompt, common)
    pairs = list(law)
    assert goodness_of_fit([counts[pair] for pair in pairs], [law[pair] for pair in pairs]).p_value > 1e-3


def exact_pairs_after(params: SamplingParams, prompt: list[int], first: int) -> dict[tuple[int, int], float]:
    logits = chain(2, SMALL, spread=1.0)

    def row(output: list[int]) -> list[float]:
        law = TokenLaw(params, prompt, SMALL)
        law.commit(output)
        return law.probs(torch.tensor([logits((*prompt, *output))], dtype=torch.float64), [()])[0].tolist()  # type: ignore[no-any-return]

    a_law = row([first])
    return {(a, b): a_law[a] * row([first, a])[b] for a, b in itertools.product(range(SMALL), repeat=2)}


def test_coupled_text_is_a_function_of_the_seed_alone() -> None:
    params = SamplingParams(temperature=1.0, max_tokens=40, seed=11)
    reference = plain([1, 2], params)
    for drafter in (oracle(), LookupDrafter(2, 1), ModelDrafter(model(seed=4)), ModelDrafter(model())):
        for k in (0, 1, 3, 8, "auto"):
            result = Engine(target=model(), drafter=drafter, k=k).generate([[1, 2]], params)[0]  # type: ignore[arg-type]
            assert result.token_ids == reference
    assert plain([1, 2], params.model_copy(update={"seed": 12})) != reference


def test_seeded_and_unseeded_rows_share_a_batch() -> None:
    """Seeded rows are the same alone and batched; unseeded rows return fresh seeds that reproduce them."""
    seeded = SamplingParams(temperature=1.0, max_tokens=30, seed=7)
    free = SamplingParams(temperature=1.0, max_tokens=30)
    alone = Engine(target=model(), drafter=ModelDrafter(model(4)), k=3).generate([[1, 2]], seeded)[0]
    engine = Engine(target=model(), drafter=ModelDrafter(model(4)), k=3)
    batch = engine.generate([[1, 2]] * 5, [free, seeded, free, seeded, free])
    assert batch[1].token_ids == batch[3].token_ids == alone.token_ids
    others = [batch[i] for i in (0, 2, 4)]
    assert len({r.seed for r in others}) == 3
    assert len({tuple(r.token_ids) for r in others}) == 3
    for result in others:
        again = Engine(target=model(), drafter=ModelDrafter(model(4)), k=3).generate(
            [[1, 2]], free.model_copy(update={"seed": result.seed}), speculation=SpeculationConfig(k=3, verify="block")
        )[0]
        assert again.token_ids == result.token_ids


@pytest.mark.parametrize("temperature", [0.0, 1e-8, 1e-6])
def test_tiny_temperatures_are_greedy(temperature: float) -> None:
    params = SamplingParams(temperature=temperature, max_tokens=30)
    result = Engine(target=model(), drafter=ModelDrafter(model(4)), k=4).generate([[1, 2]], params)[0]
    assert result.token_ids == plain([1, 2], SamplingParams(max_tokens=30))
    assert result.verify == "exact"


@pytest.mark.parametrize("k", [1, 2, 4, 7])
def test_penalties_bans_and_minimum_length_hold_inside_a_block(k: int) -> None:
    base = SamplingParams(max_tokens=30)
    first = plain([1, 2], base)
    for controls in (
        {"frequency_penalty": 1.0},
        {"presence_penalty": 1.5, "repetition_penalty": 1.3},
        {"stop_token_ids": (first[1],), "min_tokens": 6},
        {"bad_token_ids": ((first[0], first[1]), (first[3],))},
        {"logit_bias": {first[0]: -5.0}},
        {"allowed_token_ids": (0, 2, 5)},
    ):
        params = SamplingParams(**{"max_tokens": 30, **controls})  # type: ignore[arg-type]
        expected = plain([1, 2], params)
        assert expected != first, controls
        for drafter in (oracle(), ModelDrafter(model()), LookupDrafter(2, 1)):
            result = Engine(target=model(), drafter=drafter, k=k).generate([[1, 2]], params)[0]
            assert result.token_ids == expected, controls


class Recorder:
    """A stateful processor: bans whatever it saw chosen twice in a row, and remembers each prefix."""

    def __init__(self) -> None:
        self.seen: list[tuple[int, ...]] = []

    def snapshot(self) -> object:
        return tuple(self.seen)

    def restore(self, state: object) -> None:
        self.seen = list(state)  # type: ignore[call-overload]

    def __call__(self, ids: Sequence[int], logits: torch.Tensor) -> torch.Tensor:
        self.seen.append(tuple(ids))
        logits = logits.clone()
        logits[len(self.seen) % V] -= 3.0
        return logits


@pytest.mark.parametrize("k", [0, 1, 3, 6])
def test_a_stateful_processor_sees_each_prefix_once(k: int) -> None:
    mine, reference = Recorder(), Recorder()
    expected = plain([1, 2], SamplingParams(max_tokens=25, processors=(reference,)))
    drafter = ModelDrafter(model(4)) if k % 2 else oracle(wrong=lambda position: position % 3 == 0)
    result = Engine(target=model(), drafter=drafter, k=k).generate(
        [[1, 2]], SamplingParams(max_tokens=25, processors=(mine,))
    )[0]
    assert result.token_ids == expected
    assert mine.seen == reference.seen
    assert mine.seen == [(1, 2, *expected[:i]) for i in range(25)]


@pytest.mark.parametrize("k", [0, 1, 4])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_logprobs_match_teacher_forcing(k: int, temperature: float) -> None:
    params = SamplingParams(max_tokens=25, temperature=temperature, seed=3, logprobs=2, top_k=3)
    drafter = oracle(wrong=lambda position: position % 7 == 0)
    result = Engine(target=model(), drafter=drafter, k=k).generate([[1, 2]], params)[0]
    assert result.logprobs is not None
    assert len(result.logprobs) == len(result.token_ids)
    assert k == 0 or {"accepted", "correction", "bonus"} <= set(result.kinds)
    logits = chain()
    for i, entry in enumerate(result.logprobs):
        row = torch.tensor(logits((1, 2, *result.token_ids[:i])), dtype=torch.float64).log_softmax(-1)
        assert entry.token_id == result.token_ids[i]
        assert abs(entry.logprob - float(row[entry.token_id])) < 1e-9
        assert [i for i, _ in entry.top] == row.topk(2).indices.tolist()


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_row_that_is_no_law_fails_its_request_alone(bad: float, temperature: float) -> None:
    good = chain()
    target = TableModel(lambda ids: [bad] * V if ids[0] == 6 and len(ids) > 5 else good(ids), V)
    params = SamplingParams(max_tokens=12, temperature=temperature, seed=1)
    engine = Engine(target=target, drafter=oracle(), k=3)
    with pytest.raises(RequestFailedError) as caught:
        engine.generate([[1, 2], [6, 2], [3]], params)
    left, failed, right = caught.value.results
    assert failed.finish_reason == "error"
    assert isinstance(failed.error, NumericalError)
    assert all(0 <= token < V for token in failed.token_ids)
    assert [left.token_ids, right.token_ids] == [plain([1, 2], params), plain([3], params)]
    engine.reset()
    assert target.cache.slots_in_use == 0


def test_a_bad_row_that_only_a_rejected_draft_reaches_does_no_harm() -> None:
    good = chain()
    expected = plain([1, 2], SamplingParams(max_tokens=20))
    honest = {(1, 2, *expected[:i]) for i in range(21)}
    target = TableModel(lambda ids: good(ids) if tuple(ids) in honest else [math.nan] * V, V)
    drafter = oracle(wrong=lambda position: position % 3 == 0)
    result = Engine(target=target, drafter=drafter, k=4).generate([[1, 2]], SamplingParams(max_tokens=20))[0]
    assert result.token_ids == expected


def test_broken_rows_end_a_text_exactly_where_plain_decoding_ends() -> None:
    """A fifth of all prefixes is broken: drafts run into them all the time, texts only when they get there."""
    good = chain()
    target = TableModel(lambda ids: [math.nan] * V if len(ids) > 4 and sum(ids) % 5 == 0 else good(ids), V)
    reached = 0
    for seed in range(60):
        params = SamplingParams(temperature=1.0, max_tokens=12, seed=seed)
        results = [
            Engine(target=target, drafter=drafter, k=4).generate([[1, 2]], params, raise_errors=False)[0]
            for drafter in (None, ModelDrafter(model()), oracle())
        ]
        assert len({(tuple(r.token_ids), r.finish_reason) for r in results}) == 1
        reached += results[0].finish_reason == "error"
    assert 20 < reached < 60


def test_a_drafter_whose_rows_are_no_law_costs_nothing_but_speed() -> None:
    params = SamplingParams(max_tokens=20, temperature=1.0, seed=5)
    broken = TableModel(lambda ids: [math.nan] * V if len(ids) > 8 else [0.0] * V, V)
    for seeded in (params, SamplingParams(max_tokens=20)):
        result = Engine(target=model(), drafter=ModelDrafter(broken), k=3).generate([[1, 2]], seeded)[0]
        assert result.token_ids == plain([1, 2], seeded)
