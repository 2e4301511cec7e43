"""The filters of sampling as pure functions: which tokens of a row stay.

They are applied in the order of :class:`~foredraft.config.SamplingParams`: temperature, top-k, top-p, min-p, typical-p;
each sees what the previous one left, renormalised. float32 in gives float32 out, float64 gives float64.

A filter takes one row of probabilities ``[m]`` that sum to one and returns the indices that it keeps, ascending, at
least one. Ties are never broken by chance: among equally likely tokens the lowest ids are kept. Since survivors stay in
the order of their ids, a filter may be applied to them alone, and ties fall as they would in the whole row.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from foredraft.config import GREEDY_BELOW, SamplingParams

# Rows are numpy arrays here, because numpy sorts and searches them several times faster than torch on a CPU.
Row = NDArray[Any]
"""``[m]`` probabilities, float32 or float64."""
Ids = NDArray[np.intp]
Filter = Callable[[Row], Ids]

_SHORTLIST = 4096
"""Best tokens that typical-p tries to do with before it sorts a whole row."""
_RESERVE = 0.5
"""Share of what top-p could leave unsorted that it does, so that rounding cannot cut a token off."""


def filtered(logits: Tensor, params: SamplingParams) -> Tensor:
    """``[n, V]`` processed logits -> the ``[n, V]`` law of each row.

    Args:
        logits: On the CPU; rows without NaN and +inf, with at least one finite number. Not changed.
        params: Where temperature and filters are read from.
    """
    probs = softmax(logits, params.temperature)
    filters = active_filters(params)
    if not filters:
        return probs
    for row in probs.numpy():  # shares the memory of probs
        ids, kept = apply_filters(row, filters)
        row.fill(0.0)
        row[ids] = kept
    return probs


def softmax(logits: Tensor, temperature: float) -> Tensor:
    """``[n, V]`` logits -> probabilities; under ``GREEDY_BELOW`` one-hot at the argmax, lowest id on ties."""
    if temperature < GREEDY_BELOW:
        return torch.zeros_like(logits).scatter_(-1, logits.argmax(-1, keepdim=True), 1.0)
    if temperature == 1.0:
        return torch.softmax(logits, -1)
    if temperature < 1e-2:  # shifted first, so that nothing overflows
        logits = logits - logits.amax(-1, keepdim=True)
    return torch.softmax(logits / temperature, -1)


def active_filters(params: SamplingParams) -> list[Filter]:
    """The filters that may remove something, in their order."""
    filters: list[Filter] = []
    if params.greedy:
        return filters
    if params.top_k > 0:
        filters.append(partial(top_k, k=params.top_k))
    if params.top_p < 1.0:
        filters.append(partial(top_p, p=params.top_p))
    if params.min_p > 0.0:
        filters.append(partial(min_p, p=params.min_p))
    if params.typical_p < 1.0:
        filters.append(partial(typical_p, p=params.typical_p))
    return filters


def apply_filters(row: Row, filters: list[Filter]) -> tuple[Ids, Row]:
    """``[V]`` -> ids of the tokens that pass every filter, ascending, and their renormalised probabilities."""
    ids: Ids | None = None
    for keep in filters:
        passed = keep(row)
        ids, row = passed if ids is None else ids[passed], row[passed]
        row = row / row.sum()
    return np.arange(row.shape[0]) if ids is None else ids, row


def top_k(row: Row, k: int) -> Ids:
    """The k likeliest tokens, exactly k; all if there are fewer."""
    if k >= row.shape[0]:
        return np.arange(row.shape[0])
    return _from(row, np.partition(row, -k)[-k], k)


def _from(row: Row, least: Any, k: int) -> Ids:
    """The k likeliest tokens, ``least`` being the last one's probability."""
    ids = np.flatnonzero(row >= least)
    if ids.shape[0] > k:
        above, level = np.flatnonzero(row > least), np.flatnonzero(row == least)
        ids = np.sort(np.concatenate((above, level[: k - above.shape[0]])))
    return ids


def top_p(row: Row, p: float) -> Ids:
    """The fewest likeliest tokens whose probability reaches p.

    A token is kept while the float64 sum of all tokens before it, likeliest first, is below p.
    """
    # All tokens under this share together have less than 1 - p, so that the others reach p and only they are sorted.
    short = row[row >= _RESERVE * (1.0 - p) / row.shape[0]]
    short = np.sort(short)[::-1]
    k = int(np.searchsorted(np.cumsum(short, dtype=np.float64), p)) + 1
    return _from(row, short[k - 1], k) if k < short.shape[0] else top_k(row, k)


def min_p(row: Row, p: float) -> Ids:
    """Tokens at least p times as likely as the likeliest."""
    return np.flatnonzero(row >= p * row.max())


def typical_p(row: Row, p: float) -> Ids:
    """The fewest tokens with surprisal nearest to the entropy whose probability reaches p (arXiv 2202.00666).

    A token is kept while the float64 sum of all tokens before it, nearest first, is below p.
    """
    with np.errstate(divide="ignore", invalid="ignore"):
        surprisal = -np.log(row)
        entropy = np.sum(row * surprisal, where=row > 0)
    distance = np.abs(surprisal - entropy)  # infinite without mass
    near = np.arange(row.shape[0])
    if row.shape[0] > 2 * _SHORTLIST:
        # The list holds every token under some distance, hence its order is the beginning of the full order.
        short = np.flatnonzero(distance < np.partition(distance, _SHORTLIST)[_SHORTLIST])
        if row[short].sum(dtype=np.float64) >= p:
            near = short
    near = near[np.argsort(distance[near], kind="stable")]
    reached = np.cumsum(row[near], dtype=np.float64)
    return np.sort(near[: int(np.searchsorted(reached, p)) + 1])
