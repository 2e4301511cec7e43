"""A second, deliberately naive implementation of the sampling controls: plain Python, one row, whole prefix.

Other tests import :func:`reference_law` from here and compare the real one with it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
import torch

from foredraft.config import GREEDY_BELOW, SamplingParams

INF = math.inf


def reference_scores(
    params: SamplingParams,
    prompt: Sequence[int],
    output: Sequence[int],
    logits: Sequence[float],
    ends: frozenset[int] = frozenset(),
) -> list[float]:
    """Processed logits; ``output`` is everything after the prompt, drafted tokens included."""
    prefix = [*prompt, *output]
    scores = list(logits)
    for processor in params.processors:
        scores = processor(prefix, torch.tensor(scores, dtype=torch.float64)).tolist()
    for x in range(len(scores)):
        if x in prefix:
            r = params.repetition_penalty
            scores[x] = scores[x] / r if scores[x] > 0 else scores[x] * r
        if x in output:
            scores[x] -= params.presence_penalty
        scores[x] -= params.frequency_penalty * list(output).count(x)
        scores[x] += params.logit_bias.get(x, 0.0)
        if params.allowed_token_ids is not None and x not in params.allowed_token_ids:
            scores[x] = -INF
        for bad in params.bad_token_ids:
            before = list(bad[:-1])
            if bad[-1] == x and prefix[len(prefix) - len(before) :] == before:
                scores[x] = -INF
        if x in ends.union(params.stop_token_ids) and len(output) < params.min_tokens:
            scores[x] = -INF
    return scores


def normalised(p: Sequence[float]) -> list[float]:
    return [x / math.fsum(p) for x in p]


def keep_first(p: list[float], order: list[int], mass: float) -> list[float]:
    """Tokens in ``order`` while the mass before them is below ``mass``."""
    kept, before = [0.0] * len(p), 0.0
    for x in order:
        if before >= mass:
            break
        kept[x] = p[x]
        before += p[x]
    return normalised(kept)


def reference_filtered(params: SamplingParams, scores: Sequence[float]) -> list[float]:
    ids = range(len(scores))
    if params.temperature < GREEDY_BELOW:
        best = max(ids, key=lambda x: (scores[x], -x))
        return [float(x == best) for x in ids]
    top = max(scores)
    p = normalised([math.exp((s - top) / params.temperature) for s in scores])
    by_p = sorted(ids, key=lambda x: (-p[x], x))
    if params.top_k:
        p = normalised([p[x] if x in by_p[: params.top_k] else 0.0 for x in ids])
    if params.top_p < 1:
        p = keep_first(p, sorted(ids, key=lambda x: (-p[x], x)), params.top_p)
    if params.min_p > 0:
        p = normalised([x if x >= params.min_p * max(p) else 0.0 for x in p])
    if params.typical_p < 1:
        entropy = -math.fsum(x * math.log(x) for x in p if x > 0)
        distance = [abs(-math.log(x) - entropy) if x > 0 else INF for x in p]
        p = keep_first(p, sorted(ids, key=lambda x: (distance[x], x)), params.typical_p)
    return p


def reference_law(
    params: SamplingParams,
    prompt: Sequence[int],
    output: Sequence[int],
    logits: Sequence[float],
    ends: frozenset[int] = frozenset(),
) -> list[float]:
    return reference_filtered(params, reference_scores(params, prompt, output, logits, ends))


# The reference itself, against numbers worked out by hand.


def law(probs: Sequence[float], **controls: object) -> list[float]:
    logits = [math.log(p) if p else -INF for p in probs]
    return reference_law(SamplingParams(temperature=1.0, **controls), [0], [1, 1], logits, frozenset({3}))


@pytest.mark.parametrize(
    ("controls", "expected"),
    [
        ({}, [0.4, 0.3, 0.2, 0.1]),
        ({"top_k": 2}, [4 / 7, 3 / 7, 0, 0]),
        ({"top_p": 0.69}, [4 / 7, 3 / 7, 0, 0]),
        ({"top_p": 0.71}, [4 / 9, 3 / 9, 2 / 9, 0]),
        ({"min_p": 0.5}, [4 / 9, 3 / 9, 2 / 9, 0]),
        # Entropy 1.28; surprisals .92 1.20 1.61 2.30.
        ({"typical_p": 0.4}, [0, 0.6, 0.4, 0]),
        ({"typical_p": 0.29}, [0, 1, 0, 0]),
        ({"presence_penalty": math.log(2)}, [0.4 / 0.85, 0.15 / 0.85, 0.2 / 0.85, 0.1 / 0.85]),
        ({"frequency_penalty": math.log(2)}, [0.4 / 0.775, 0.075 / 0.775, 0.2 / 0.775, 0.1 / 0.775]),
        ({"repetition_penalty": 2.0}, [0.16 / 0.55, 0.09 / 0.55, 0.2 / 0.55, 0.1 / 0.55]),
        ({"logit_bias": {2: math.log(2)}}, [4 / 12, 3 / 12, 4 / 12, 1 / 12]),
        ({"allowed_token_ids": (0, 2)}, [2 / 3, 0, 1 / 3, 0]),
        ({"bad_token_ids": ((2,), (1, 1, 0), (2, 1, 3))}, [0, 3 / 4, 0, 1 / 4]),
        ({"min_tokens": 3}, [4 / 9, 3 / 9, 2 / 9, 0]),
        ({"min_tokens": 2}, [0.4, 0.3, 0.2, 0.1]),
    ],
)
def test_reference_agrees_with_hand_calculation(controls: dict[str, object], expected: list[float]) -> None:
    assert law([0.4, 0.3, 0.2, 0.1], **controls) == pytest.approx(expected, abs=1e-12)
