"""Trains an EAGLE-3 head on recorded texts of its target (Li 2025, arXiv 2503.01840)."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from foredraft.drafters.eagle_head import HeadShape
from foredraft.models.base import Target
from foredraft.train.checkpoint import load_checkpoint, optimizer_tensors, restore_optimizer, save_checkpoint
from foredraft.train.config import EagleTraining
from foredraft.train.eagle_net import EagleNet
from foredraft.train.shards import Sample
from foredraft.train.start import initial_weights
from foredraft.train.target_parts import TargetParts
from foredraft.train.texts import Place, batches, first_place, held_out_texts, start_texts, usual_sizes

CHAIN = 5
"""Length of the drafts that acceptance is measured with."""


FC_SLOWER = 3.0
"""What the inputs of ``fc`` are divided by besides their usual size: it has three times as many as the other products,
and learns too fast otherwise."""


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
        overlap: Mean of sum min(p, q) at the first position: acceptance at temperature 1.
    """

    step: int
    seconds: float
    tokens: int
    loss: float
    alpha: list[float]
    tau: float
    overlap: float


@dataclass(frozen=True, slots=True)
class _Text:
    """One text as the net reads it; the ``m`` tokens to foresee begin with the second of the answer.

    Attributes:
        taps: ``[T, len(taps), target_hidden]``.
        embeddings: ``[T, d]``, of the token after each position.
        first: First row that foresees something.
        law: ``[m, D]`` the target's law of each token.
        wanted: ``[m]`` draft id of the token that was written, -1 if it has none.
    """

    taps: Tensor
    embeddings: Tensor
    first: int
    law: Tensor
    wanted: Tensor

    @property
    def known(self) -> Tensor:
        """``[m]``: 1 where the token that was written can be proposed, else 0."""
        return (self.wanted >= 0).float()


@dataclass(slots=True)
class Progress:
    """State of a run that changes from step to step."""

    place: Place
    step: int = 0
    seconds: float = 0.0
    tokens: int = 0
    losses: list[float] = field(default_factory=list)
    history: list[Measure] = field(default_factory=list)


class EagleTrainer:
    """One training run; :meth:`run` starts it or goes on where a checkpoint left it, to the bit.

    Args:
        target: The model that the head drafts for; one of our decoders.
        shape: The head's sizes.
        token_ids: ``[D]`` draft vocabulary.
        config: Options.
        data: Folder of recorded texts, with taps ``(*shape.taps, last layer)``.
        out: Folder of the checkpoint and of the best weights.
    """

    def __init__(
        self,
        target: Target,
        shape: HeadShape,
        token_ids: Tensor,
        config: EagleTraining,
        data: Path,
        out: Path,
    ) -> None:
        self.config, self.shape, self.data, self.out = config, shape, data, out
        torch.manual_seed(config.seed)
        self.parts = TargetParts(target, token_ids)
        self.taps = (*shape.taps, self.parts.decoder.shape.layers)
        self.device = self.parts.decoder.device
        self.index = torch.full((shape.vocab,), -1, dtype=torch.int64)
        self.index[token_ids] = torch.arange(len(token_ids))
        self.index = self.index.to(self.device)
        scale = usual_sizes(data, self.taps)[: len(shape.taps) * shape.target_hidden]
        self.net = EagleNet(shape, FC_SLOWER * scale, self.device)
        if not self.checkpoint.exists():
            for name, value in initial_weights(self.parts, shape, start_texts(data, self.taps), scale).items():
                self.net.set(name, value)
        self.net.weights["lm_head"].requires_grad_(config.train_lm_head)
        self.optimizer = torch.optim.AdamW(
            [p for p in self.net.parameters() if p.requires_grad],
            lr=config.lr,
            betas=(0.9, 0.95),
            weight_decay=config.weight_decay,
        )
        self.progress = Progress(first_place(data, config.seed))
        self.held_out = held_out_texts(data, self.taps, config.held_out)
        if self.checkpoint.exists():
            self._restore()

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
        feed = batches(self.data, self.taps, progress.place, config.batch, config.seed)
        while progress.step < config.steps and not self._stale() and time.time() < until:
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

    def _measured(self) -> Measure:
        """Measures, and keeps the weights if they are the best so far."""
        progress = self.progress
        alpha, tau, overlap = self.measure()
        loss = sum(progress.losses) / len(progress.losses)
        progress.losses.clear()
        found = Measure(progress.step, progress.seconds, progress.tokens, loss, alpha, tau, overlap)
        better = all(tau > earlier.tau for earlier in progress.history)
        progress.history.append(found)
        if better:
            save_checkpoint(self.best, self.net.state(), asdict(found))
        return found

    def _stale(self) -> bool:
        taus = [m.tau for m in self.progress.history]
        return bool(taus) and len(taus) - 1 - taus.index(max(taus)) >= self.config.patience

    # --- one step

    def _step(self, batch: list[Sample]) -> float:
        config, step = self.config, self.progress.step
        for group in self.optimizer.param_groups:
            group["lr"] = config.lr * _schedule(step, config.warmup, config.steps)
        rollout = min(config.rollout, 1 + config.rollout * step // config.steps)
        tokens = sum(len(sample.ids) - sample.prompt_length for sample in batch)
        total = 0.0
        self.net.train()
        for sample in batch:
            with torch.autocast(self.device.type, torch.bfloat16, config.precision == "bfloat16"):
                loss = self._loss(sample, rollout) / tokens
            loss.backward()  # type: ignore[no-untyped-call]
            total += float(loss.detach())
        torch.nn.utils.clip_grad_norm_(self.net.parameters(), config.clip)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.progress.tokens += tokens
        return total

    def _loss(self, sample: Sample, rollout: int) -> Tensor:
        """Cross-entropy to the target's own law, summed over positions, averaged over the drafted tokens.

        The softmax runs over a part of the draft vocabulary: the tokens that are likely anywhere in the text, and as
        many others drawn at random, which stand for all the rest (sampled softmax, Jean 2015, arXiv 1412.2007).
        """
        text = self._text(sample)
        tokens, correction = self._candidates(text.law, sample.number)
        law = text.law[:, tokens]
        loss, weights = torch.zeros((), device=self.device), 0.0
        for j, row in enumerate(self._draft(text, rollout, tokens)):
            each = -(law[j:] * functional.log_softmax(row + correction, -1)).sum(-1)
            loss = loss + self.config.decay**j * (each * text.known[j:]).sum()
            weights += self.config.decay**j
        return loss / weights

    def _candidates(self, law: Tensor, number: int) -> tuple[Tensor, Tensor]:
        """Draft tokens of a softmax ``[C]``, and what is added to their logits so that the sum is right on average."""
        half, size = self.config.candidates // 2, law.shape[1]
        if 2 * half >= size:
            return torch.arange(size, device=self.device), torch.zeros(size, device=self.device)
        generator = torch.Generator().manual_seed(hash((self.config.seed, self.progress.step, number)) % 2**62)
        rest = torch.ones(size)
        likely = law.amax(0).topk(half).indices.cpu()
        rest[likely] = 0
        drawn = rest.multinomial(half, generator=generator)
        return torch.cat([likely, drawn]), torch.cat(
            [torch.zeros(half), torch.full((half,), math.log(size / half - 1))]
        )

    def _text(self, sample: Sample) -> _Text:
        ids = torch.tensor(sample.ids, device=self.device)
        length = len(ids) - 2  # row t joins position t with token t+1 and foresees token t+2
        first = max(sample.prompt_length - 1, 0)
        taps = sample.taps[: length + 1].to(self.device).float()
        with torch.no_grad():
            law = self.parts.law(taps[first + 1 :, -1])
            embeddings = self.parts.embed(ids[1 : length + 1])
        wanted = self.index[ids[first + 2 :]]
        return _Text(taps[:length, :-1], embeddings, first, law, wanted)

    def _draft(self, text: _Text, rollout: int, tokens: Tensor | None = None) -> list[Tensor]:
        return self.net(text.taps, text.embeddings, text.first, min(rollout, len(text.wanted)), tokens)  # type: ignore[no-any-return]

    # --- measuring

    @torch.no_grad()
    def measure(self) -> tuple[list[float], float, float]:
        """Acceptance by position, tokens a pass, and overlap, as in :class:`Measure`, by drafting from every position
        of the held-out texts.
        """
        self.net.eval()
        tried, accepted = torch.zeros(CHAIN), torch.zeros(CHAIN)
        starts, overlap, rows = 0, 0.0, 0
        for sample in self.held_out:
            text = self._text(sample)
            logits, wanted = self._draft(text, CHAIN), text.wanted
            overlap += float(torch.minimum(text.law, logits[0].softmax(-1)).sum())
            rows += len(wanted)
            starts += max(len(wanted) - CHAIN + 1, 0)
            alive = torch.ones(max(len(wanted) - CHAIN + 1, 0), dtype=torch.bool, device=self.device)
            for j, row in enumerate(logits):
                match = (row.argmax(-1) == wanted[j:])[: len(alive)]
                tried[j] += int(alive.sum())
                alive = alive & match
                accepted[j] += int(alive.sum())
        alpha = (accepted / tried.clamp(min=1)).tolist()
        return alpha, 1 + float(accepted.sum()) / max(starts, 1), overlap / max(rows, 1)

    # --- checkpoints

    def save(self) -> None:
        """Writes the checkpoint."""
        named = dict(self.net.named_parameters())
        tensors = {f"net.{name}": value.detach() for name, value in named.items()}
        tensors |= optimizer_tensors(self.optimizer, named) | {"token_ids": self.parts.token_ids}
        tensors["tap_scale"] = self.net.tap_scale
        state = asdict(self.progress) | {"config": self.config.model_dump()}
        save_checkpoint(self.checkpoint, tensors, state)

    def _restore(self) -> None:
        tensors, state = load_checkpoint(self.checkpoint)
        named = dict(self.net.named_parameters())
        with torch.no_grad():
            for name, parameter in named.items():
                parameter.copy_(tensors[f"net.{name}"])
            self.net.tap_scale.copy_(tensors["tap_scale"])
        restore_optimizer(self.optimizer, {n: p for n, p in named.items() if p.requires_grad}, tensors)
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
