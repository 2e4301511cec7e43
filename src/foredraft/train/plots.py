"""Loss and acceptance of a training run as a picture."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from matplotlib.figure import Figure

if TYPE_CHECKING:
    from foredraft.train.measure import Measure


def draw_history(history: Sequence[Measure], path: Path) -> None:
    """Loss on the left, acceptance by position and tokens a pass on the right, over optimiser steps."""
    steps = [entry.step for entry in history]
    figure = Figure(figsize=(9, 3.4), layout="constrained")
    left, middle, right = figure.subplots(1, 3)
    left.plot(steps, [entry.loss for entry in history])
    left.set(title="Training loss", xlabel="step", ylabel="nats a token")
    for position in range(len(history[0].alpha)):
        middle.plot(steps, [entry.alpha[position] for entry in history], label=f"position {position + 1}")
    middle.set(title="Acceptance, held-out text", xlabel="step", ylim=(0, 1))
    middle.legend(fontsize=7)
    right.plot(steps, [entry.tau for entry in history])
    right.set(title="Tokens a target pass", xlabel="step")
    for axes in (left, middle, right):
        axes.grid(alpha=0.3)
    figure.savefig(path, dpi=110)
