"""Penalties, bias, bans and custom processors at every draft position, against the naive reference."""

from __future__ import annotations

import math
import time
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_sampling_reference import reference_filtered, reference_law, reference_scores
from torch import Tensor

from foredraft.config import SamplingParams
from foredraft.errors import ConfigError, NumericalError
from foredraft.sampling import TokenLaw

V = 6
EOS = frozenset({5})
TOKENS = st.lists(st.integers(0, V - 1), max_size=7)
SEQUENCES = st.lists(st.lists(st.integers(0, V - 1), min_size=1, max_size=3).map(tuple), max_size=4).map(tuple)
CONTROLS = st.fixed_dictionaries(
    {"temperature": st.sampled_from([0.0, 0.7, 1.0])},
    optional={
        "repetition_penalty": st.sampled_from([0.5, 1.3, 2.0]),
        "presence_penalty": st.sampled_from([-1.0, 0.5, 2.0]),
        "frequency_penalty": st.sampled_from([-0.5, 0.3, 1.0]),
        "logit_bias": st.dictionaries(st.integers(0, V - 1), st.floats(-3, 3), max_size=3),
        "bad_token_ids": SEQUENCES,
        "allowed_token_ids": st.sets(st.integers(0, V - 1), min_size=1).map(tuple),
        "min_tokens": st.integers(0, 9),
        "stop_token_ids": st.sets(st.integers(0, V - 1), max_size=2).map(tuple),
    },
)


@settings(max_examples=300, deadline=None)
@given(CONTROLS, TOKENS, st.lists(TOKENS, max_size=3), TOKENS, st.integers(0, 2**31))
def test_every_row_of_a_draft_equals_the_naive_definition(
    controls: dict[str, Any], prompt: list[int], commits: list[list[int]], draft: list[int], seed: int
) -> None:
    """Committed in pieces, then a chain: row i follows prompt, output and the first i drafted tokens."""
    params = SamplingParams(**controls)
    law = TokenLaw(params, prompt, V, eos_ids=EOS)
    for tokens in commits:
        law.commit(tokens)
    output = [token for tokens in commits for token in tokens]
    logits = torch.randn(len(draft) + 1, V, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) * 2
    before = logits.clone()
    paths = [draft[:i] for i in range(len(draft) + 1)]
    scores = [
        reference_scores(params, prompt, [*output, *path], row.tolist(), EOS)
        for path, row in zip(paths, logits, strict=True)
    ]
    if min(max(row) for row in scores) == -math.inf:
        for ask in (law.argmax, law.probs):
            with pytest.raises(NumericalError, match="no token left"):
                ask(logits, paths)
        return
    assert law.argmax(logits, paths) == [max(range(V), key=lambda x, row=row: (row[x], -x)) for row in scores]
    for got, row in zip(law.probs(logits, paths).tolist(), scores, strict=True):
        assert got == pytest.approx(reference_filtered(params, row), abs=1e-12)
    assert torch.equal(logits, before)


def test_paths_may_be_branches_of_a_tree() -> None:
    params = SamplingParams(temperature=1.0, frequency_penalty=1.0, repetition_penalty=1.5, bad_token_ids=((1, 2),))
    law = TokenLaw(params, [0], V)
    law.commit([3, 3])
    logits = torch.randn(4, V, dtype=torch.float64)
    paths = [(), (1,), (2,), (2, 2)]
    for got, path, row in zip(law.probs(logits, paths), paths, logits, strict=True):
        assert got.tolist() == pytest.approx(reference_law(params, [0], [3, 3, *path], row.tolist()), abs=1e-12)


def test_end_is_allowed_from_token_seven_on() -> None:
    """min_tokens=6: six tokens without end, inside a draft as well as across steps."""
    law = TokenLaw(SamplingParams(temperature=1.0, min_tokens=6, stop_token_ids=(2,)), [5, 2], V, eos_ids=EOS)
    law.commit([0] * 4)
    rows = law.probs(torch.zeros(4, V), [[0] * i for i in range(4)])
    assert [bool(row[5] > 0) for row in rows] == [False, False, True, True]
    assert [bool(row[2] > 0) for row in rows] == [False, False, True, True]


@pytest.mark.parametrize(
    ("controls", "field"),
    [
        ({"logit_bias": {6: 1.0}}, "logit_bias"),
        ({"logit_bias": {-1: 1.0}}, "logit_bias"),
        ({"allowed_token_ids": (0, 6)}, "allowed_token_ids"),
        ({"bad_token_ids": ((0,), (1, 9))}, "bad_token_ids"),
        ({"stop_token_ids": (6,)}, "stop_token_ids"),
    ],
)
def test_ids_outside_the_vocabulary_are_refused_by_name(controls: dict[str, Any], field: str) -> None:
    with pytest.raises(ConfigError) as caught:
        TokenLaw(SamplingParams(**controls), [0], V)
    assert caught.value.field == field
    with pytest.raises(ConfigError) as caught:
        TokenLaw(SamplingParams(), [0, V], V)
    assert caught.value.field == "prompt"
    with pytest.raises(ConfigError) as caught:
        TokenLaw(SamplingParams(), [0], V, bad_words_ids=[[1, V]])
    assert caught.value.field == "bad_words"


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("controls", [{}, {"frequency_penalty": 1.0}, {"top_k": 2, "top_p": 0.5}])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_broken_logits_are_named_by_row(temperature: float, controls: dict[str, Any], bad: float) -> None:
    logits = torch.zeros(3, V)
    logits[1, 4] = bad
    law = TokenLaw(SamplingParams(temperature=temperature, **controls), [0], V)
    for ask in (law.probs, law.argmax):
        with pytest.raises(NumericalError, match="row 1") as caught:
            ask(logits, [(), (1,), (1, 2)])
        assert caught.value.field == "logits"


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_rows_without_a_token_name_what_emptied_them(temperature: float) -> None:
    cases: list[tuple[dict[str, Any], dict[str, Any], str]] = [
        ({"allowed_token_ids": (5,), "min_tokens": 1}, {}, "allowed_token_ids or min_tokens"),
        ({"bad_token_ids": tuple((x,) for x in range(V))}, {}, "bad_token_ids"),
        ({"bad_words": ("x",)}, {"bad_words_ids": [(x,) for x in range(V)]}, "bad_words"),
        ({"processors": (lambda ids, logits: logits - float("inf"),)}, {}, "processors"),
        ({"processors": (lambda ids, logits: logits * float("nan"),)}, {}, "processors"),
    ]
    for controls, extra, field in cases:
        law = TokenLaw(SamplingParams(temperature=temperature, **controls), [0], V, eos_ids=EOS, **extra)
        with pytest.raises(NumericalError) as caught:
            law.probs(torch.zeros(1, V), [()])
        assert caught.value.field == field
    with pytest.raises(NumericalError) as caught:
        TokenLaw(SamplingParams(), [0], V).argmax(torch.full((1, V), float("-inf")), [()])
    assert caught.value.field == "logits"


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_precision_is_float32_or_better(dtype: torch.dtype) -> None:
    law = TokenLaw(SamplingParams(temperature=1.0, presence_penalty=0.5), [0], V)
    law.commit([1])
    probs = law.probs(torch.zeros(2, V, dtype=dtype), [(), (2,)])
    assert probs.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert probs.sum(-1).tolist() == pytest.approx([1.0, 1.0])


def test_wrong_shapes_are_refused() -> None:
    law = TokenLaw(SamplingParams(), [0], V)
    with pytest.raises(ConfigError):
        law.probs(torch.zeros(2, V), [()])
    with pytest.raises(ConfigError):
        law.argmax(torch.zeros(1, V + 1), [()])


class Recorder:
    """A stateful processor: it remembers the prefixes that it saw, and bans as many tokens as it saw rows."""

    def __init__(self) -> None:
        self.seen: list[tuple[int, ...]] = []
        self.calls: list[tuple[int, ...]] = []

    def __call__(self, ids: list[int], logits: Tensor) -> Tensor:
        self.seen.append(tuple(ids))
        self.calls.append(tuple(ids))
        logits[: len(self.seen) % 3] = float("-inf")
        return logits

    def snapshot(self) -> object:
        return list(self.seen)

    def restore(self, state: object) -> None:
        assert isinstance(state, list)
        self.seen = list(state)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_stateful_processor_sees_committed_text_and_is_restored(temperature: float) -> None:
    recorder = Recorder()
    law = TokenLaw(SamplingParams(temperature=temperature, processors=(recorder,)), [0, 1], V)
    ask = law.argmax if temperature == 0 else law.probs
    logits = torch.zeros(3, V)

    # Drafting: two tokens, one row at a time; then the state goes back.
    ask(logits[:1], [()])
    ask(logits[:1], [(4,)])
    assert recorder.seen == [(0, 1), (0, 1, 4)]
    law.rewind()
    assert recorder.seen == []
    # Verification: three rows in one pass; one drafted token is accepted, so rows 0 and 1 count.
    recorder.calls.clear()
    ask(logits, [(), (4,), (4, 5)])
    assert recorder.calls == [(0, 1), (0, 1, 4), (0, 1, 4, 5)]
    law.settle((4,))
    law.commit([4, 2])
    assert recorder.seen == [(0, 1), (0, 1, 4)]
    # The next step goes on from there; a draft that is dropped leaves nothing behind.
    ask(logits[:1], [()])
    law.rewind()
    assert recorder.seen == [(0, 1), (0, 1, 4)]
    ask(logits[:1], [()])
    law.settle(())
    assert recorder.seen == [(0, 1), (0, 1, 4), (0, 1, 4, 2)]
    # In plain decoding it would have seen the same, a row a token.


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_in_a_tree_the_state_before_a_row_is_the_one_after_its_parent(temperature: float) -> None:
    recorder = Recorder()
    law = TokenLaw(SamplingParams(temperature=temperature, processors=(recorder,)), [0, 1], V)
    ask = law.argmax if temperature == 0 else law.probs
    paths = [(), (3,), (4,), (3, 5), (4, 5), (3, 4)]

    def states(calls: list[list[tuple[int, ...]]]) -> list[list[tuple[int, ...]]]:
        """What the processor had seen after each row."""
        seen = []
        for call in calls:
            for path in call:
                ask(torch.zeros(len(call), V), call) if path == call[0] else None
            seen.append(list(recorder.seen))
        return seen

    one_by_one = states([[path] for path in paths])
    assert one_by_one == [[(0, 1, *path[:i]) for i in range(len(path) + 1)] for path in paths]
    law.rewind()
    recorder.calls.clear()
    ask(torch.zeros(len(paths), V), paths)
    assert recorder.calls == [(0, 1, *path) for path in paths]  # each row once, in order
    law.settle((3, 5))
    assert recorder.seen == [(0, 1), (0, 1, 3), (0, 1, 3, 5)]


def test_a_processor_may_write_in_place_and_must_keep_the_shape() -> None:
    def ban_zero(ids: list[int], logits: Tensor) -> Tensor:
        logits[0] = float("-inf")
        return logits

    logits = torch.zeros(1, V)
    assert TokenLaw(SamplingParams(processors=(ban_zero,)), [0], V).argmax(logits, [()]) == [1]
    assert torch.equal(logits, torch.zeros(1, V))
    for wrong in (lambda ids, logits: logits[:2], lambda ids, logits: None):
        with pytest.raises(ConfigError, match="processors"):
            TokenLaw(SamplingParams(processors=(wrong,)), [0], V).argmax(logits, [()])


def test_cost_of_a_step_does_not_grow_with_the_text() -> None:
    """Twenty thousand committed tokens against two hundred: the same distinct ids, the same work."""
    params = SamplingParams(temperature=1.0, frequency_penalty=0.1, repetition_penalty=1.1, bad_token_ids=((1, 2, 3),))

    def seconds(length: int) -> float:
        law = TokenLaw(params, [0], 1000)
        law.commit([i % 100 for i in range(length)])
        logits = torch.zeros(5, 1000)
        paths = [[1] * i for i in range(5)]
        times = []
        for _ in range(60):
            start = time.process_time()
            law.probs(logits, paths)
            times.append(time.process_time() - start)
        return sorted(times)[15]

    assert seconds(20_000) < 3 * seconds(200) + 1e-4


def test_bad_sequences_are_found_across_prompt_output_and_draft() -> None:
    """1 2 3 is bad, wherever the committed text ends; a part of it, or another order, is not."""
    params = SamplingParams(temperature=1.0, bad_token_ids=((1, 2, 3), (0,)))
    for prompt, output, path, banned in (
        ([1, 2], [], [], True),
        ([1], [2], [], True),
        ([1], [], [2], True),
        ([4], [1], [2], True),
        ([4], [], [1, 2], True),
        ([2], [], [], False),
        ([2], [1], [], False),
        ([1, 2], [4], [], False),
    ):
        law = TokenLaw(params, prompt, V)
        law.commit(output)
        row = law.probs(torch.zeros(1, V), [path])[0]
        assert bool(row[3] == 0) is banned, (prompt, output, path)
        assert row[0] == 0
