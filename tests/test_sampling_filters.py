"""Filters against the naive reference, and where they must not move: ties, extremes, precision, big vocabularies."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_sampling_reference import reference_filtered

from foredraft.config import SamplingParams
from foredraft.sampling import filters
from foredraft.sampling.filters import filtered

# Few distinct values, so that ties are common.
LOGIT = st.one_of(st.sampled_from([-2.0, -1.0, 0.0, 0.5, 1.0]), st.floats(-8, 8), st.just(-math.inf))
ROWS = st.lists(LOGIT, min_size=1, max_size=9).filter(lambda row: max(row) > -math.inf)
CONTROLS = st.fixed_dictionaries(
    {},
    optional={
        "temperature": st.sampled_from([0.0, 1e-6, 0.3, 0.7, 1.0, 1.5]),
        "top_k": st.integers(0, 10),
        "top_p": st.floats(0.05, 1.0),
        "min_p": st.floats(0.0, 1.0),
        "typical_p": st.floats(0.05, 1.0),
    },
)


def boundary(params: SamplingParams, row: list[float]) -> bool:
    """Whether a hair's change of a threshold changes the answer: there rounding may decide either way."""
    near = [
        params.model_copy(
            update={
                "top_p": min(1.0, params.top_p * (1 + e)) if params.top_p < 1 else 1.0,
                "min_p": min(1.0, params.min_p * (1 + e)),
                "typical_p": min(1.0, params.typical_p * (1 + e)) if params.typical_p < 1 else 1.0,
            }
        )
        for e in (-1e-9, 1e-9)
    ]
    return reference_filtered(near[0], row) != reference_filtered(near[1], row)


@settings(max_examples=400, deadline=None)
@given(ROWS, CONTROLS)
def test_law_equals_the_naive_definition(row: list[float], controls: dict[str, Any]) -> None:
    params = SamplingParams(**{"temperature": 1.0, **controls})
    got = filtered(torch.tensor([row], dtype=torch.float64), params)[0]
    assert float(got.sum()) == pytest.approx(1.0, abs=1e-12)
    # Typical-p ranks by a computed distance, where equal distances may differ in the last digit.
    if boundary(params, row) or params.typical_p < 1:
        return
    assert got.tolist() == pytest.approx(reference_filtered(params, row), abs=1e-12)


@settings(max_examples=200, deadline=None)
@given(st.lists(st.floats(-6, 6), min_size=1, max_size=9, unique=True), st.floats(0.05, 0.99))
def test_typical_p_equals_the_naive_definition(row: list[float], p: float) -> None:
    params = SamplingParams(temperature=1.0, typical_p=p)
    law = torch.tensor(row, dtype=torch.float64).softmax(-1)
    distance = (-law.log() - torch.special.entr(law).sum()).abs().sort().values
    if boundary(params, row) or float(distance.diff().min() if len(row) > 1 else 1.0) < 1e-9:
        return
    got = filtered(torch.tensor([row], dtype=torch.float64), params)[0]
    assert got.tolist() == pytest.approx(reference_filtered(params, row), abs=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_dtype_stays_and_rows_are_independent(dtype: torch.dtype) -> None:
    params = SamplingParams(temperature=0.8, top_k=5, top_p=0.9, min_p=0.05, typical_p=0.95)
    logits = torch.randn(4, 11, generator=torch.Generator().manual_seed(1), dtype=dtype)
    before = logits.clone()
    law = filtered(logits, params)
    assert law.dtype == dtype
    assert torch.equal(logits, before)
    assert torch.equal(law, torch.cat([filtered(row[None], params) for row in logits]))


@pytest.mark.parametrize("k", [1, 2, 3, 5])
def test_top_k_keeps_exactly_k_and_the_lowest_ids_on_ties(k: int) -> None:
    row = np.array([0.1, 0.2, 0.2, 0.1, 0.2, 0.2])
    assert filters.top_k(row, k).tolist() == sorted([1, 2, 4, 5, 0][:k])


def test_top_p_keeps_the_lowest_ids_on_ties() -> None:
    assert filters.top_p(np.full(8, 0.125), 0.3).tolist() == [0, 1, 2]
    assert filters.top_p(np.full(8, 0.125), 0.25).tolist() == [0, 1]
    assert filters.typical_p(np.full(8, 0.125), 0.3).tolist() == [0, 1, 2]


@pytest.mark.parametrize("spread", [0.5, 2.0, 6.0])
@pytest.mark.parametrize("p", [0.01, 0.5, 0.9, 0.999999])
def test_big_rows_equal_the_plain_definition_exactly(spread: float, p: float) -> None:
    rng = np.random.default_rng(3)
    # Rounded to few digits, so that thousands of tokens tie and the cut falls among them.
    logits = np.round(rng.normal(size=20_000) * spread, 2).astype(np.float32)
    row = torch.from_numpy(logits).softmax(-1).numpy()
    with np.errstate(divide="ignore"):
        surprisal = -np.log(row)
    distance = np.abs(surprisal - np.sum(row * surprisal, where=row > 0))
    for keep, key in ((filters.top_p, -row), (filters.typical_p, distance)):
        order = np.lexsort((np.arange(row.shape[0]), key))
        before = np.concatenate(([0.0], np.cumsum(row[order], dtype=np.float64)[:-1]))
        assert keep(row, p).tolist() == sorted(order[before < p].tolist())


@pytest.mark.parametrize("temperature", [0.0, 1e-8, 1e-6])
def test_tiny_temperatures_are_greedy(temperature: float) -> None:
    law = filtered(torch.tensor([[1.0, 3e38, 3e38, -math.inf]]), SamplingParams(temperature=temperature, top_p=0.5))
    assert law.tolist() == [[0.0, 1.0, 0.0, 0.0]]


@pytest.mark.parametrize("temperature", [1.1e-5, 1e-3, 1.0, 100.0])
def test_extreme_logits_never_give_nan(temperature: float) -> None:
    law = filtered(torch.tensor([[3e38, -3e38, 0.0, -math.inf]]), SamplingParams(temperature=temperature))
    assert law[0, 0] == 1.0
    assert torch.isfinite(law).all()
