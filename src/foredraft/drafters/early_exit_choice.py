"""After how many layers to leave: agreement and cost of some exits, measured on the target itself."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor

from foredraft.errors import ConfigError
from foredraft.models.base import Segment
from foredraft.models.decoder import Decoder
from foredraft.models.tokenizer import Tokenizer

LONGEST = 8
"""Draft lengths up to here are weighed."""
SHARES = (1 / 8, 1 / 4, 3 / 8, 1 / 2, 5 / 8, 3 / 4, 7 / 8)
"""Candidates, as shares of the layers."""
SAMPLE = (
    "The harbour was quiet that morning, and the boats that had left before dawn were not yet back. She asked the old "
    "man what he thought of the weather; he looked at the sky for a while and said that it would hold until noon.\n\n"
    "def mean(values):\n    total = 0.0\n    for value in values:\n        total += value\n"
    "    return total / len(values)\n"
)
"""What agreement is measured on: a little prose and a little code."""


@dataclass(frozen=True, slots=True)
class Exit:
    """One candidate.

    Attributes:
        layers: Layers that it runs.
        agreement: Share of positions of the sample where its likeliest token is the target's, 0 to 1.
        cost: Time of drafting one token over the target's time for one.
        k: Draft length that promises most.
        speed: Expected tokens a second over plain decoding's, greedy, with that length.
    """

    layers: int
    agreement: float
    cost: float
    k: int
    speed: float


def choose_exit(
    target: Decoder, tokenizer: Tokenizer | None, clock: Callable[[], float] = time.perf_counter
) -> list[Exit]:
    """Measures some exits, first layers first. Takes about as long as 60 plain tokens.

    Expected speed is Leviathan's ``(1 - a^(k+1)) / (1 - a)`` over ``k cost + verify(k + 1)`` (arXiv 2211.17192), where
    verify is the measured cost of that many rows.

    Raises:
        ConfigError: There is no tokenizer, so no text to measure on.
    """
    if tokenizer is None:
        raise ConfigError(
            "the target has no tokenizer, so exits cannot be tried on text",
            field="drafter early-exit",
            remedy="name a number of layers: early-exit:E",
        )
    ids = tokenizer.encode(SAMPLE)[: target.max_context - LONGEST - 1]
    total = target.shape.layers
    counts = sorted({min(max(round(share * total), 1), total) for share in SHARES})
    slot = target.cache.allocate()
    try:
        agreements = _agreements(target, slot, ids, counts)
        few, many = counts[0], counts[-1]
        plain = _seconds(target, slot, ids[:1], clock)
        verify = {rows: _seconds(target, slot, ids[:rows], clock) / plain for rows in (2, LONGEST + 1)}
        costs = {n: _seconds(target.first_layers(n, rounded=True), slot, ids[:1], clock) / plain for n in (few, many)}
    finally:
        target.cache.free(slot)
    slope = (costs[many] - costs[few]) / max(many - few, 1)
    return [
        _judge(n, agreement, costs[few] + slope * (n - few), verify)
        for n, agreement in zip(counts, agreements, strict=True)
    ]


def _agreements(target: Decoder, slot: int, ids: Sequence[int], counts: Sequence[int]) -> list[float]:
    """One pass over the sample; its committed rows stay in the slot."""
    output = target.forward([Segment(slot, ids)], counts)
    target.cache.commit(slot, len(ids))
    right = output.logits[0].argmax(-1)

    def agreement(tap: Tensor) -> float:
        return float((target.logits(tap).argmax(-1) == right).double().mean())

    return [agreement(output.taps[0][:, i]) for i in range(len(counts))]


def _seconds(model: Decoder, slot: int, ids: Sequence[int], clock: Callable[[], float]) -> float:
    """The least of four passes over a few rows behind the sample."""
    best = float("inf")
    for _ in range(4):
        start = clock()
        model.forward([Segment(slot, ids)])
        best = min(best, clock() - start)
        model.cache.commit(slot, 0)
    return best


def _judge(layers: int, agreement: float, cost: float, verify: dict[int, float]) -> Exit:
    (low, cheap), (high, dear) = sorted(verify.items())

    def speed(k: int) -> float:
        tokens = sum(agreement**i for i in range(k + 1))
        return tokens / (k * cost + cheap + (dear - cheap) * (k + 1 - low) / (high - low))

    k = max(range(1, LONGEST + 1), key=speed)
    return Exit(layers, agreement, cost, k, speed(k))
