"""Training of the studies' small models, safe against interruption: AdamW, warm-up, cosine decay.

The batch of step i depends on the seed and i alone, and the optimiser's state is saved with the weights, so that
a run which was cut off and resumed ends with the same weights as one which was not.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from foredraft.lab.corpus import Corpus
from foredraft.lab.progress import Progress

CHECKPOINT = "training.safetensors"


@dataclass(frozen=True, slots=True)
class Schedule:
    """How a model is trained.

    Attributes:
        steps: Optimiser steps.
        batch: Sequences a step.
        context: Characters a sequence; also the longest context of the trained model.
        learning_rate: Peak of AdamW's.
        warmup: Steps until the peak.
        weight_decay: On matrices only.
        save_every_s: Seconds between checkpoints.
    """

    steps: int
    batch: int = 16
    context: int = 256
    learning_rate: float = 4e-3
    warmup: int = 40
    weight_decay: float = 0.05
    save_every_s: float = 15.0

    def rate(self, step: int) -> float:
        """Learning rate of step ``step``, counted from 0."""
        if step < self.warmup:
            return self.learning_rate * (step + 1) / self.warmup
        done = (step - self.warmup) / max(1, self.steps - self.warmup)
        return self.learning_rate * (0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * done)))


@dataclass(frozen=True, slots=True)
class TrainResult:
    """Cross-entropy on held-out text (nats a character) and seconds spent, earlier interrupted runs included."""

    held_out_loss: float
    seconds: float


def train(
    model: nn.Module, corpus: Corpus, schedule: Schedule, *, seed: int, folder: Path, progress: Progress
) -> TrainResult:
    """Trains ``model`` in place on the corpus's training part, resuming from ``folder`` if a checkpoint lies there."""
    ids, held_out = corpus.split()
    text = torch.tensor(ids)
    seconds = fit(model, lambda step: _loss(model, _batch(text, schedule, seed, step)), schedule, folder, progress)
    return TrainResult(held_out_loss(model, held_out, schedule.context), seconds)


def fit(
    model: nn.Module, loss_of: Callable[[int], Tensor], schedule: Schedule, folder: Path, progress: Progress
) -> float:
    """Trains ``model`` in place and returns the seconds that it took, earlier interrupted runs included.

    Args:
        model: In float32; afterwards in evaluation mode.
        loss_of: The loss of a step, which must depend on the step's number and on the weights alone.
        schedule: How many steps, and how fast.
        folder: Where the checkpoint lies, and is looked for.
        progress: Told every step's loss.
    """
    matrices = [parameter for parameter in model.parameters() if parameter.ndim > 1]
    others = [parameter for parameter in model.parameters() if parameter.ndim <= 1]
    groups = [{"params": matrices, "weight_decay": schedule.weight_decay}, {"params": others, "weight_decay": 0.0}]
    optimiser = torch.optim.AdamW(groups, lr=schedule.learning_rate, betas=(0.9, 0.98))
    step, spent = _resume(model, optimiser, folder / CHECKPOINT)
    started = saved = time.perf_counter()
    parameters = sum(parameter.numel() for parameter in model.parameters())
    progress.stage(f"training {folder.name.split('-')[0]} ({parameters:,} parameters)", schedule.steps)
    progress.advance(step)
    model.train()
    while step < schedule.steps:
        for group in optimiser.param_groups:
            group["lr"] = schedule.rate(step)
        loss = loss_of(step)
        optimiser.zero_grad(set_to_none=True)
        loss.backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimiser.step()
        step += 1
        progress.advance(1, f"loss {loss.item():.3f}")
        if time.perf_counter() - saved >= schedule.save_every_s:
            saved = time.perf_counter()
            _save(model, optimiser, folder / CHECKPOINT, step, spent + saved - started)
    model.eval()
    return spent + time.perf_counter() - started


@torch.no_grad()
def held_out_loss(model: nn.Module, blocks: list[list[int]], context: int) -> float:
    """Mean cross-entropy over held-out windows, nats a character."""
    windows = [block[i : i + context + 1] for block in blocks for i in range(0, len(block) - context, context)]
    losses = [
        _loss(model, torch.tensor(windows[i : i + 32])).item() * len(windows[i : i + 32])
        for i in range(0, len(windows), 32)
    ]
    return sum(losses) / max(1, len(windows))


def _batch(text: Tensor, schedule: Schedule, seed: int, step: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed * 1_000_003 + step)
    starts = torch.randint(len(text) - schedule.context, (schedule.batch, 1), generator=generator)
    return text[starts + torch.arange(schedule.context + 1)]


def _loss(model: nn.Module, batch: Tensor) -> Tensor:
    logits = model(input_ids=batch[:, :-1], use_cache=False).logits
    return nn.functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())


def _save(model: nn.Module, optimiser: torch.optim.Optimizer, path: Path, step: int, seconds: float) -> None:
    tensors: dict[str, Tensor] = {}
    for name, parameter in model.named_parameters():
        tensors[f"weight.{name}"] = parameter.detach()
        for key in ("exp_avg", "exp_avg_sq", "step"):
            tensors[f"{key}.{name}"] = optimiser.state[parameter][key]
    unfinished = path.with_suffix(".part")
    save_file(tensors, unfinished, metadata={"step": str(step), "seconds": repr(seconds)})
    unfinished.replace(path)


def _resume(model: nn.Module, optimiser: torch.optim.Optimizer, path: Path) -> tuple[int, float]:
    """Restores weights and optimiser; returns the steps done and the seconds they took."""
    if not path.is_file():
        return 0, 0.0
    with safe_open(path, framework="pt") as file:
        for name, parameter in model.named_parameters():
            parameter.data.copy_(file.get_tensor(f"weight.{name}"))
            state = {key: file.get_tensor(f"{key}.{name}") for key in ("exp_avg", "exp_avg_sq", "step")}
            optimiser.state[parameter].update(state)
        facts = file.metadata()
    return int(facts["step"]), float(facts["seconds"])
