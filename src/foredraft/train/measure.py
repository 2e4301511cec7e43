"""Acceptance on held-out texts, measured alike for everything that is trained."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

CHAIN = 5
"""Length of the drafts that acceptance is measured with."""


@dataclass(slots=True)
class Measure:
    """Acceptance on held-out texts.

    Attributes:
        step: Optimiser steps before it.
        seconds: Time spent on training before it.
        tokens: Answer tokens trained on before it.
        loss: Mean training loss since the last one.
        alpha: For each position of a chain, how often its token is accepted where those before it are (greedy).
        tau: Tokens a target pass with chains of :data:`CHAIN`, bonus included (greedy).
        overlap: Mean of sum min(p, q) at the first position: acceptance at temperature 1, or 1 - TV(p, q).
    """

    step: int
    seconds: float
    tokens: int
    loss: float
    alpha: list[float]
    tau: float
    overlap: float


@dataclass(frozen=True, slots=True)
class Foreseen:
    """What was foreseen of one held-out text of ``m`` tokens.

    Attributes:
        matches: For each position j of a chain ``[>= m - j]`` bool: whether the j-th drafted token of the chain that
            starts at each place is the target's.
        overlap: Sum over the ``m`` tokens of sum min(p, q).
    """

    matches: Sequence[Tensor]
    overlap: float


def add_up(texts: Iterable[Foreseen]) -> Tensor:
    """``[2 * CHAIN + 3]`` float64 sums that can be added over processes: tried and accepted by position, starts,
    overlap, tokens.
    """
    sums = torch.zeros(2 * CHAIN + 3, dtype=torch.float64)
    for text in texts:
        length = len(text.matches[0])
        starts = max(length - CHAIN + 1, 0)
        alive = torch.ones(starts, dtype=torch.bool, device=text.matches[0].device)
        for j, match in enumerate(text.matches[:CHAIN]):
            sums[j] += int(alive.sum())
            alive = alive & match[:starts]
            sums[CHAIN + j] += int(alive.sum())
        sums[2 * CHAIN :] += torch.tensor([starts, text.overlap, length], dtype=torch.float64)
    return sums


def conclude(sums: Tensor) -> tuple[list[float], float, float]:
    """Alpha by position, tau and overlap, as in :class:`Measure`."""
    tried, accepted = sums[:CHAIN], sums[CHAIN : 2 * CHAIN]
    starts, overlap, tokens = sums[2 * CHAIN :].tolist()
    alpha = (accepted / tried.clamp(min=1)).tolist()
    return alpha, 1 + float(accepted.sum()) / max(starts, 1), overlap / max(tokens, 1)
