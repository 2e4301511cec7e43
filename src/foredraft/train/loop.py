"""The training loop that all drafters share: steps, measurements, checkpoints, early stop, exact resume."""

from __future__ import annotations

import math
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from foredraft.errors import ConfigError
from foredraft.train.checkpoint import load_checkpoint, optimizer_tensors, restore_optimizer, save_checkpoint
from foredraft.train.config import LoopOptions
from foredraft.train.measure import Foreseen, Measure, add_up, conclude
from foredraft.train.shards import Sample
from foredraft.train.texts import Place, Texts, batches, first_place
from foredraft.train.workers import Workers


class Task(ABC):
    """What a run trains: weights, a loss, and what was foreseen of a text.

    Attributes:
        texts: What is trained on.
        held_out: What acceptance is measured on.
        device: Where the weights are.
        parameters: Weights by name, float32; those that ask for a gradient are trained.
        constants: What else a checkpoint keeps, by name; restored in place.
    """

    texts: Texts
    held_out: Sequence[Sample]
    device: torch.device
    parameters: Mapping[str, Tensor]
    constants: Mapping[str, Tensor]

    def prepare(self, batch: Sequence[Sample], step: int) -> Sequence[Sample]:
        """The texts that are trained on in place of ``batch``; may depend on nothing but its arguments and weights."""
        return batch

    @abstractmethod
    def loss(self, sample: Sample, step: int) -> tuple[Tensor, int]:
        """Loss summed over the tokens of a text, and how many there are. What it draws depends on nothing but the
        seed, the step and the text.
        """

    @abstractmethod
    def foreseen(self, sample: Sample) -> Foreseen:
        """What the weights foresee of a text."""

    @abstractmethod
    def weights(self) -> dict[str, Tensor]:
        """The weights under the names of the finished product, on the CPU."""


@dataclass(slots=True)
class Progress:
    """State of a run that changes from step to step."""

    place: Place
    step: int = 0
    seconds: float = 0.0
    tokens: int = 0
    losses: list[float] = field(default_factory=list)
    history: list[Measure] = field(default_factory=list)


class Trainer:
    """One training run; :meth:`run` starts it or goes on where a checkpoint left it, to the bit.

    Args:
        task: What is trained.
        config: Options.
        out: Folder of the checkpoint and of the best weights.
        workers: The processes that train together; each reads all texts and computes on its share of a batch.

    Raises:
        ConfigError: Fewer texts a step than processes.
    """

    def __init__(self, task: Task, config: LoopOptions, out: Path, workers: Workers | None = None) -> None:
        self.task, self.config, self.out = task, config, out
        self.workers = workers or Workers()
        if config.batch < self.workers.count:
            raise ConfigError(
                f"must be at least the number of processes, {self.workers.count} (got {config.batch})", field="batch"
            )
        self.trained = {name: value for name, value in task.parameters.items() if value.requires_grad}
        self.optimizer = torch.optim.AdamW(
            list(self.trained.values()), lr=config.lr, betas=(0.9, 0.95), weight_decay=config.weight_decay
        )
        self.progress = Progress(first_place(task.texts, config.seed))
        if self.checkpoint.exists():
            self._restore()
        with torch.no_grad():
            self.workers.same(task.parameters.values())

    @property
    def checkpoint(self) -> Path:
        return self.out / "checkpoint.safetensors"

    @property
    def best(self) -> Path:
        return self.out / "best.safetensors"

    def run(self, report: Callable[[Measure], None] = lambda _: None, until: float = math.inf) -> list[Measure]:
        """Trains to the last step, to an early stop, or to the first step after time ``until`` (epoch seconds).

        Returns:
            All measurements, those before a restart included.
        """
        config, progress = self.config, self.progress
        feed = batches(self.task.texts, progress.place, config.batch, config.seed)
        while progress.step < config.steps and not self._stale() and self._in_time(until):
            started = time.monotonic()
            batch, progress.place = next(feed)
            progress.losses.append(self._step(batch))
            progress.step += 1
            progress.seconds += time.monotonic() - started
            last = progress.step == config.steps
            if progress.step % config.measure_every == 0 or last:
                report(self._measured())
            if progress.step % config.save_every == 0 or last:
                self.save()
        return progress.history

    def best_weights(self) -> dict[str, Tensor]:
        """The weights of the best measurement; the present ones if there was none."""
        return load_checkpoint(self.best)[0] if self.best.exists() else self.task.weights()

    @torch.no_grad()
    def measure(self) -> tuple[list[float], float, float]:
        """Acceptance by position, tokens a pass, and overlap, as in :class:`Measure`."""
        sums = add_up(self.task.foreseen(sample) for sample in self.workers.share(self.task.held_out))
        return conclude(self.workers.sum(sums.to(self.task.device)).cpu())

    def _in_time(self, until: float) -> bool:
        return until == math.inf or self.workers.agree(time.time() < until, self.task.device)

    def _measured(self) -> Measure:
        """Measures, and keeps the weights if they are the best so far."""
        progress = self.progress
        alpha, tau, overlap = self.measure()
        loss = sum(progress.losses) / len(progress.losses)
        progress.losses.clear()
        found = Measure(progress.step, progress.seconds, progress.tokens, loss, alpha, tau, overlap)
        better = all(tau > earlier.tau for earlier in progress.history)
        progress.history.append(found)
        if better and self.workers.writes:
            save_checkpoint(self.best, self.task.weights(), asdict(found))
        return found

    def _stale(self) -> bool:
        taus = [m.tau for m in self.progress.history]
        return bool(taus) and len(taus) - 1 - taus.index(max(taus)) >= self.config.patience

    def _step(self, batch: Sequence[Sample]) -> float:
        """One optimiser step; the mean loss of a token."""
        config, step, device = self.config, self.progress.step, self.task.device
        for group in self.optimizer.param_groups:
            group["lr"] = config.lr * _schedule(step, config.warmup, config.steps)
        total, tokens = 0.0, 0
        for sample in self.task.prepare(self.workers.share(batch), step):
            with torch.autocast(device.type, torch.bfloat16, config.precision == "bfloat16"):
                loss, size = self.task.loss(sample, step)
            if size:
                loss.backward()  # type: ignore[no-untyped-call]
                total += float(loss.detach())
                tokens += size
        total, tokens = self._share_gradients(total, tokens)
        torch.nn.utils.clip_grad_norm_(self.trained.values(), config.clip)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.progress.tokens += tokens
        return total / max(tokens, 1)

    def _share_gradients(self, total: float, tokens: int) -> tuple[float, int]:
        """Adds gradients, losses and tokens of all processes up and makes the gradients those of the mean."""
        for value in self.trained.values():
            if value.grad is None:
                value.grad = torch.zeros_like(value)
        gradients = [value.grad for value in self.trained.values() if value.grad is not None]
        if self.workers.count > 1:
            sums = self.workers.sum(torch.tensor([total, tokens], dtype=torch.float64, device=self.task.device))
            total, tokens = float(sums[0]), int(sums[1])
            for gradient in gradients:
                self.workers.sum(gradient)
        for gradient in gradients:
            gradient /= max(tokens, 1)
        return total, tokens

    # --- checkpoints

    def save(self) -> None:
        """Writes the checkpoint; only process 0 does."""
        if not self.workers.writes:
            return
        tensors = {f"net.{name}": value.detach() for name, value in self.task.parameters.items()}
        tensors |= optimizer_tensors(self.optimizer, self.trained) | dict(self.task.constants)
        save_checkpoint(self.checkpoint, tensors, asdict(self.progress) | {"config": self.config.model_dump()})

    def _restore(self) -> None:
        tensors, state = load_checkpoint(self.checkpoint)
        kept = {f"net.{name}": value for name, value in self.task.parameters.items()} | dict(self.task.constants)
        with torch.no_grad():
            for name, value in kept.items():
                if name not in tensors or tensors[name].shape != value.shape:
                    raise ConfigError(
                        f"belongs to a run of other sizes ({name} differs)",
                        field=str(self.checkpoint),
                        remedy="give the sizes of that run, or another folder",
                    )
                value.copy_(tensors[name])
        if state["step"]:
            restore_optimizer(self.optimizer, self.trained, tensors)
        place: dict[str, Any] = state["place"]
        self.progress = Progress(
            Place(place["epoch"], tuple(place["shards"]), place["done"]),
            state["step"],
            state["seconds"],
            state["tokens"],
            state["losses"],
            [Measure(**entry) for entry in state["history"]],
        )


def _schedule(step: int, warmup: int, steps: int) -> float:
    """Linear rise, then a cosine down to a twentieth."""
    if step < warmup:
        return (step + 1) / warmup
    along = (step - warmup) / max(steps - warmup, 1)
    return 0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * min(along, 1.0)))
