"""The compiled law and draws against the Python ones: the same tokens stay, the same token is drawn."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from foredraft import SamplingParams, kernels
from foredraft.errors import NumericalError
from foredraft.kernels import law as kernel
from foredraft.kernels import library
from foredraft.sampling import Purpose, RequestNoise, TokenLaw, draw
from foredraft.sampling.filters import active_filters, apply_filters
from foredraft.sampling.law import LazyLaws
from foredraft.types import Draft
from foredraft.verify import block, coupled, rejection

pytestmark = pytest.mark.skipif(not kernels.available(), reason=f"no kernels: {kernels.why_unavailable()}")

CONTROLS: list[dict[str, Any]] = [
    {"temperature": 1.0},
    {"temperature": 0.7},
    {"temperature": 1e-3},
    {"temperature": 0.8, "top_k": 1},
    {"temperature": 0.8, "top_k": 40},
    {"temperature": 1.0, "top_p": 0.9},
    {"temperature": 1.4, "top_p": 0.3},
    {"temperature": 1.0, "top_p": 0.999999},
    {"temperature": 1.0, "min_p": 0.02},
    {"temperature": 0.9, "top_k": 60, "top_p": 0.95, "min_p": 0.01},
    {"temperature": 0.9, "repetition_penalty": 1.3},
    {"temperature": 0.9, "repetition_penalty": 0.8, "presence_penalty": 0.4, "frequency_penalty": -0.3},
    {"temperature": 0.9, "logit_bias": {0: 5.0, 3: -100.0}, "frequency_penalty": 0.5, "top_p": 0.9},
    {"temperature": 1.0, "bad_token_ids": [[2]], "frequency_penalty": 0.5, "top_k": 30},
]
PATHS: list[tuple[int, ...]] = [(), (3,), (3, 1), (3, 1, 3), (3, 1, 3, 4)]


@contextmanager
def reference() -> Iterator[None]:
    """Inside, the Python implementation does the work."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernel, "suits", lambda rows: False)
        patch.setattr(kernels, "available", lambda: False)
        yield


@contextmanager
def instructions(isa: int) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(library, "isa", lambda: isa)
        yield


LESSER = [0, 1] if library.isa() == 2 else [0]
"""Instruction sets that this machine has beside its best: none, and AVX2."""


def scores(vocab: int, dtype: torch.dtype, seed: int = 0, spread: float = 2.5) -> Tensor:
    """Some of them equal, some impossible."""
    generator = torch.Generator().manual_seed(seed)
    rows = spread * torch.randn(len(PATHS), vocab, generator=generator, dtype=torch.float64)
    rows[:, ::3] = (rows[:, ::3] * 4).round() / 4
    rows[1:, 5::7] = -math.inf
    return rows.to(dtype)


def token_law(params: dict[str, Any], vocab: int) -> TokenLaw:
    law = TokenLaw(SamplingParams(**params), [0, 1, 1], vocab)
    law.commit([4, 1, 2, 2])
    return law


@pytest.mark.parametrize("params", CONTROLS, ids=str)
@pytest.mark.parametrize("vocab", [5, 8, 77, 1024, 5003])
def test_float64_laws_are_those_of_the_reference(params: dict[str, Any], vocab: int) -> None:
    for seed in range(6):
        logits, law = scores(vocab, torch.float64, seed), token_law(params, vocab)
        before = logits.clone()
        got = law.probs(logits, PATHS)
        assert torch.equal(logits, before)
        with reference():
            wanted = law.probs(logits, PATHS)
        assert torch.equal(got > 0, wanted > 0)
        assert torch.allclose(got, wanted, rtol=1e-12, atol=0)


@pytest.mark.parametrize("params", CONTROLS, ids=str)
@pytest.mark.parametrize("vocab", [5, 8, 77, 1024, 5003, 49152])
def test_float32_laws_are_those_of_float64_but_for_rounding(params: dict[str, Any], vocab: int) -> None:
    logits = scores(vocab, torch.float32)
    got = token_law(params, vocab).probs(logits, PATHS)
    wanted = token_law(params, vocab).probs(logits.double(), PATHS)
    assert got.dtype == torch.float32
    assert float((got.double() - wanted).abs().sum(-1).max()) < 1e-5 * (1 if params["temperature"] > 0.1 else 1000)
    wide = got.double().sum(-1)
    assert float((wide - 1).abs().max()) < 1e-6


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("filters", [{"top_k": 7}, {"top_k": 900}, {"top_p": 0.9}, {"top_p": 0.31}, {"min_p": 0.003}])
def test_filters_keep_the_same_tokens_of_the_same_probabilities(filters: dict[str, Any], dtype: torch.dtype) -> None:
    """Ties and cut-offs included: the Python filters see the compiled probabilities."""
    params = SamplingParams(temperature=1.0, **filters)
    for seed in range(40):
        logits = scores(3001, dtype, seed, spread=1.0 + seed % 4)
        whole = TokenLaw(SamplingParams(temperature=1.0), [], 3001).probs(logits, PATHS)
        got = TokenLaw(params, [], 3001).probs(logits, PATHS)
        for row, kept in zip(whole.numpy(), got, strict=True):
            ids, _ = apply_filters(row, active_filters(params))
            assert kept.nonzero()[:, 0].tolist() == ids[row[ids] > 0].tolist()


@settings(max_examples=300, deadline=None)
@given(
    st.lists(st.sampled_from([0.0, 1.0, 2.0, 2.0, 3.5, -math.inf]), min_size=1, max_size=40).filter(
        lambda row: max(row) > -math.inf
    ),
    st.sampled_from([0, 1, 2, 3, 7]),
    st.sampled_from([1.0, 0.9, 0.5, 0.25, 0.1]),
    st.sampled_from([0.0, 0.1, 0.5, 1.0]),
)
def test_ties_fall_as_in_the_reference(row: list[float], top_k: int, top_p: float, min_p: float) -> None:
    law = TokenLaw(SamplingParams(temperature=1.0, top_k=top_k, top_p=top_p, min_p=min_p), [], len(row))
    logits = torch.tensor([row], dtype=torch.float64)
    got = law.probs(logits, [()])
    with reference():
        wanted = law.probs(logits, [()])
    assert torch.equal(got > 0, wanted > 0)
    assert torch.allclose(got, wanted, rtol=1e-12, atol=0)


@pytest.mark.parametrize("isa", LESSER)
@pytest.mark.parametrize("params", CONTROLS, ids=str)
def test_instruction_sets_and_threads_give_the_same_bits(params: dict[str, Any], isa: int) -> None:
    logits = scores(5003, torch.float32)
    law = token_law(params, 5003)
    p = law.probs(logits, PATHS)
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(3)
        assert torch.equal(law.probs(logits, PATHS), p)
        many = logits.repeat(30, 1)  # enough to be worth threads
        assert torch.equal(law.probs(many, PATHS * 30), p.repeat(30, 1))
        with instructions(isa):
            assert torch.equal(law.probs(logits, PATHS), p)
            assert kernel.masses(p) == (sums := kernel.masses(p))
        assert kernel.masses(p) == sums
    finally:
        torch.set_num_threads(threads)
    for u in (0.0, 0.3, 0.9999):
        with instructions(isa):
            slow = kernel.draw(p[0], u, 0.8, p[1], 1.1)
        assert kernel.draw(p[0], u, 0.8, p[1], 1.1) == slow


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("params", CONTROLS[:-1], ids=str)
def test_chances_and_draws_are_the_laws_own(params: dict[str, Any], dtype: torch.dtype) -> None:
    logits, law = scores(301, dtype), token_law(params, 301)
    p, lazy = law.probs(logits, PATHS), law.laws(logits, PATHS)
    assert isinstance(lazy, LazyLaws)
    for token in (0, 3, 4, 6, 299, 300):
        assert lazy.chances([token] * 5) == p[:, token].tolist()
        assert lazy.chances([token] * 2) == p[:2, token].tolist()
    for row in range(5):
        likeliest = int(p[row].argmax())
        for u in (-1.0, 0.0, 0.2, 0.7, 0.999):
            for weight, without in ((1.0, -1), (0.4, likeliest)):
                found = lazy.draw(row, u, weight, without)
                assert found == kernel.draw(p[row], u, weight, without=without)
        for noise in RequestNoise(row, kernels.race).rows(4, 20, 301):
            assert not isinstance(noise, Tensor)
            assert lazy.race(row, noise) == kernels.race(p[row], noise.seed, noise.position)
    with reference():
        slow = law.laws(logits, PATHS)
        assert isinstance(slow, LazyLaws)
        assert slow.draw(0, 0.5, 1.0, -1) is None
        assert slow.chances([3] * 5) == pytest.approx(p[:, 3].tolist(), rel=1e-4, abs=1e-6)


@pytest.mark.parametrize("vocab", [4, 77, 5003])
def test_a_row_is_the_same_alone(vocab: int) -> None:
    """A position's law depends on its logits alone, not on the rows beside it."""
    logits, law = scores(vocab, torch.float32), token_law(CONTROLS[9], vocab)
    p = law.probs(logits, PATHS)
    lazy = law.laws(logits, PATHS)
    assert isinstance(lazy, LazyLaws)
    for i in range(5):
        assert torch.equal(lazy[i], p[i])


@pytest.mark.parametrize("worst", [math.nan, math.inf])
def test_rows_without_a_law_are_refused_as_ever(worst: float) -> None:
    law = token_law({"temperature": 1.0, "frequency_penalty": 0.2}, 20)
    logits = torch.zeros(2, 20)
    logits[1, 19] = worst
    with pytest.raises(NumericalError, match="row 1 holds"):
        law.probs(logits, [(), (1,)])
    with pytest.raises(NumericalError, match="row 0 is -inf everywhere"):
        law.probs(torch.full((1, 20), -math.inf), [()])
    with pytest.raises(NumericalError, match="row 1 holds"):
        law.argmax(logits, [(), (1,)])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("vocab", [1, 3, 17, 1024, 4999])
def test_draws_are_those_of_the_reference(vocab: int, dtype: torch.dtype) -> None:
    p = scores(vocab, dtype, seed=3)[0].softmax(-1)
    p[1::5] = 0.0
    uniforms = torch.rand(700, generator=torch.Generator().manual_seed(1), dtype=torch.float64).tolist()
    edges = torch.cumsum(p.double(), 0) / p.double().sum()
    uniforms += [min(max(float(edge) + e, 0.0), 1.0 - 2.0**-53) for edge in edges[:200] for e in (-1e-9, 1e-9)]
    uniforms += [0.0, 1.0 - 2.0**-53]
    got = [draw(p, u) for u in uniforms]
    with reference():
        assert got == [draw(p, u) for u in uniforms]
    assert all(p[token] > 0 for token in set(got))


def test_draws_from_nothing_are_refused() -> None:
    for row in ([0.0, 0.0], [0.5, math.nan], [math.inf, 0.5]):
        with pytest.raises(NumericalError, match="sums to"):
            draw(torch.tensor(row), 0.5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("rule", [block, rejection])
@pytest.mark.parametrize("one_hot", [True, False])
@pytest.mark.parametrize("vocab", [4, 1500])
def test_verdicts_are_those_of_the_reference(rule: Any, dtype: torch.dtype, one_hot: bool, vocab: int) -> None:
    """From the whole p and from laws that make rows when asked, over thousands of drafts and numbers."""
    generator = torch.Generator().manual_seed(5)
    law = TokenLaw(SamplingParams(temperature=1.0), [], vocab)
    ends = set()
    for _ in range(400):
        logits = 2 * torch.randn(4, vocab, generator=generator, dtype=dtype)
        near = logits[:3] + 0.5 * torch.randn(3, vocab, generator=generator, dtype=dtype)
        q = near.softmax(-1)
        tokens = tuple(torch.multinomial(q, 1, generator=generator)[:, 0].tolist())
        if one_hot:
            tokens = tuple(torch.multinomial(logits[:3].softmax(-1) ** 3, 1, generator=generator)[:, 0].tolist())
        draft = Draft(tokens, None if one_hot else q)
        *uniforms, last = torch.rand(4, generator=generator, dtype=torch.float64).tolist()
        paths = [draft.path(i) for i in range(4)]
        p = law.probs(logits, paths)
        with reference():
            wanted = rule(draft, p, uniforms, last)
        assert rule(draft, p, uniforms, last) == wanted
        assert rule(draft, law.laws(logits, paths), uniforms, last) == wanted
        ends.add(wanted.accepted)
    assert ends >= {0, 1, 2}


def test_coupled_makes_no_row_that_it_does_not_need() -> None:
    law = TokenLaw(SamplingParams(temperature=1.0), [], 50)
    logits = torch.randn(4, 50, generator=torch.Generator().manual_seed(2))
    logits[2:] = math.nan  # never reached
    noise = RequestNoise(3)
    first = coupled(Draft(), law.probs(logits[:1], [()]), noise.rows(7, 1, 50)).next_token
    draft = Draft((first, 0 if first else 1, 0))
    paths = [draft.path(i) for i in range(4)]
    second = coupled(Draft(), law.probs(logits[1:2], paths[1:2]), noise.rows(8, 1, 50)).next_token
    draft = Draft((first, (second + 1) % 50, 0))
    verdict = coupled(draft, law.laws(logits, paths), noise.rows(7, 4, 50))
    assert (verdict.accepted, verdict.next_token) == (1, second)


def test_uniforms_are_the_words_of_the_generator() -> None:
    for seed in (0, 7, 2**63 - 1):
        noise = RequestNoise(seed)
        for purpose in Purpose:
            got = noise.uniforms(purpose, 5, 3, 9)
            with reference():
                assert noise.uniforms(purpose, 5, 3, 9) == got


@pytest.mark.parametrize("vocab", [33, 40000])
def test_the_race_is_the_same_by_any_threads_and_instructions(vocab: int) -> None:
    generator = torch.Generator().manual_seed(8)
    threads = torch.get_num_threads()
    for position in range(40):
        p = (3 * torch.randn(vocab, generator=generator)).softmax(-1)
        p = torch.where(torch.rand(vocab, generator=generator) < position / 50, 0.0, p)
        p[0] = 1e-6
        try:
            torch.set_num_threads(1)
            with instructions(0):
                plain = kernels.race(p, 9, position)
            assert kernels.race(p, 9, position) == plain
            torch.set_num_threads(3)
            assert kernels.race(p, 9, position) == plain
        finally:
            torch.set_num_threads(threads)
