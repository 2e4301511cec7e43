"""The filters of sampling as pure functions on rows: logits or probabilities in, probabilities out.

They are applied in the order of :class:`~foredraft.config.SamplingParams`: temperature, top-k, top-p, min-p,
typical-p; each sees what the previous one left, renormalised. float32 in gives float32 out, float64 gives
float64. Ties are never broken by chance: among equally likely tokens the lowest ids are kept.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from foredraft.config import GREEDY_BELOW, SamplingParams

_SHORTLIST = 1024
"""Tokens that top-p and typical-p sort at first."""


def one_hot(logits: Tensor) -> Tensor:
    """``[n, V]`` -> all mass on the argmax of each row, the lowest id on ties."""
    return torch.zeros_like(logits).scatter_(-1, logits.argmax(-1, keepdim=True), 1.0)


def softmax(logits: Tensor, temperature: float) -> Tensor:
    """``[n, V]`` logits -> probabilities at a temperature; one-hot at the argmax under ``GREEDY_BELOW``."""
    if temperature < GREEDY_BELOW:
        return one_hot(logits)
    if temperature == 1.0:
        return torch.softmax(logits, -1)
    # Shifted first, so that a low temperature cannot overflow.
    return torch.softmax((logits - logits.amax(-1, keepdim=True)).div_(temperature), -1)


def top_k(probs: Tensor, k: int) -> Tensor:
    """Keeps exactly the k likeliest tokens (fewer only where fewer have mass). ``probs``: ``[n, V]``."""
    if k == 0 or k >= probs.shape[-1]:
        return probs
    ids = top_k_ids(probs, k)
    kept = probs.gather(-1, ids)
    return torch.zeros_like(probs).scatter_(-1, ids, kept / kept.sum(-1, keepdim=True))


def top_k_ids(probs: Tensor, k: int) -> Tensor:
    """``[n, V]`` -> ``[n, k]`` ids of the k likeliest tokens, ascending; ties at the boundary go to the lowest ids."""
    values, ids = probs.topk(k + 1, dim=-1)
    ids = ids[:, :k].sort(-1).values
    for row in (values[:, k - 1] == values[:, k]).nonzero().flatten().tolist():
        above = (probs[row] > values[row, k]).nonzero().flatten()
        level = (probs[row] == values[row, k]).nonzero().flatten()[: k - above.shape[0]]
        ids[row] = torch.cat((above, level)).sort().values
    return ids


def top_p(probs: Tensor, p: float) -> Tensor:
    """Keeps the smallest set of likeliest tokens whose probability reaches p. ``probs``: ``[n, V]``, rows sum to 1.

    A token is kept while the float64 sum of all tokens before it, likeliest first, is below p.
    """
    if p >= 1.0:
        return probs
    return _renormalise(torch.stack([_cover(row, row, p) for row in probs]))


def min_p(probs: Tensor, p: float) -> Tensor:
    """Keeps tokens at least p times as likely as the likeliest. ``probs``: ``[n, V]``."""
    if p <= 0.0:
        return probs
    return _renormalise(probs.masked_fill(probs < p * probs.amax(-1, keepdim=True), 0.0))


def typical_p(probs: Tensor, p: float) -> Tensor:
    """Keeps mass p of the tokens whose surprisal is nearest to the entropy (arXiv 2202.00666). ``probs``: ``[n, V]``.

    A token is kept while the float64 sum of all tokens before it, nearest first, is below p.
    """
    if p >= 1.0:
        return probs
    surprisal = -probs.log()
    entropy = torch.special.entr(probs).sum(-1, keepdim=True)
    nearness = -(surprisal - entropy).abs()  # -inf without mass
    return _renormalise(torch.stack([_cover(*rows, p) for rows in zip(nearness, probs, strict=True)]))


def filtered(logits: Tensor, params: SamplingParams) -> Tensor:
    """``[n, V]`` processed logits, at least one finite a row and none NaN or +inf -> the ``[n, V]`` law."""
    probs = softmax(logits, params.temperature)
    if params.greedy:
        return probs
    if not 0 < params.top_k < probs.shape[-1]:
        return _after_top_k(probs, params)
    # Compact: the other filters only see the survivors, in order of id, which keeps every tie as it would be.
    ids = top_k_ids(probs, params.top_k)
    kept = probs.gather(-1, ids)
    kept = _after_top_k(kept / kept.sum(-1, keepdim=True), params)
    return torch.zeros_like(probs).scatter_(-1, ids, kept)


def _after_top_k(probs: Tensor, params: SamplingParams) -> Tensor:
    return typical_p(min_p(top_p(probs, params.top_p), params.min_p), params.typical_p)


def _cover(score: Tensor, weight: Tensor, mass: float) -> Tensor:
    """``[V]`` weights of the fewest best-scored tokens whose weight reaches ``mass``, zero elsewhere."""
    best = None
    if score.shape[0] > 4 * _SHORTLIST:
        # Nearly always a short list of the best scores reaches the mass, and only that is sorted. It holds every
        # token above a floor, hence its order is the beginning of the full order.
        floor = float(np.partition(score.detach().cpu().numpy(), -_SHORTLIST)[-_SHORTLIST])
        best = (score > floor).nonzero().flatten()
        if float(weight[best].sum(dtype=torch.float64)) < mass:
            best = None
    if best is None:
        best = torch.arange(score.shape[0], device=score.device)
    order = best[score[best].sort(descending=True, stable=True).indices]
    reached = weight[order].cumsum(0, dtype=torch.float64)
    order = order[: int(torch.searchsorted(reached, mass)) + 1]
    return torch.zeros_like(weight).scatter_(0, order, weight[order])


def _renormalise(probs: Tensor) -> Tensor:
    return probs / probs.sum(-1, keepdim=True)
