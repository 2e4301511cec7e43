"""What training an EAGLE-3 head on recorded texts of its target is (Li 2025, arXiv 2503.01840)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional

from foredraft.drafters.eagle_head import HeadShape
from foredraft.models.base import Target
from foredraft.train.config import EagleTraining
from foredraft.train.eagle_net import EagleNet
from foredraft.train.loop import Task
from foredraft.train.measure import CHAIN, Foreseen
from foredraft.train.shards import Sample
from foredraft.train.start import initial_weights
from foredraft.train.target_parts import TargetParts
from foredraft.train.texts import ShardTexts, held_out_texts, start_texts, usual_sizes

FC_SLOWER = 3.0
"""What the inputs of ``fc`` are divided by besides their usual size: it has three times as many as the other products,
and learns too fast otherwise."""


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


class Eagle3Task(Task):
    """An EAGLE-3 head in training.

    Args:
        target: The model that the head drafts for; one of our decoders.
        shape: The head's sizes.
        token_ids: ``[D]`` draft vocabulary.
        config: Options.
        data: Folder of recorded texts, with taps ``(*shape.taps, last layer)``.
        fresh: Set the weights to start from; else they come from a checkpoint.
        start: Weights of a trained head to start from; None solves for them.
    """

    def __init__(
        self,
        target: Target,
        shape: HeadShape,
        token_ids: Tensor,
        config: EagleTraining,
        data: Path,
        fresh: bool = True,
        start: Mapping[str, Tensor] | None = None,
    ) -> None:
        self.config, self.shape, self.grown = config, shape, start is not None
        torch.manual_seed(config.seed)
        self.parts = TargetParts(target, token_ids)
        self.taps = (*shape.taps, self.parts.decoder.shape.layers)
        self.device = self.parts.decoder.device
        self.texts = ShardTexts(data, self.taps)
        self.index = torch.full((shape.vocab,), -1, dtype=torch.int64)
        self.index[token_ids] = torch.arange(len(token_ids))
        self.index = self.index.to(self.device)
        scale = usual_sizes(data, self.taps)[: len(shape.taps) * shape.target_hidden]
        self.net = EagleNet(shape, FC_SLOWER * scale, self.device, config.round_weights)
        if fresh:
            found = start or initial_weights(self.parts, shape, start_texts(self.texts), scale)
            for name, value in found.items():
                self.net.set(name, value)
        self.net.weights["lm_head"].requires_grad_(config.train_lm_head)
        self.parameters = dict(self.net.named_parameters())
        self.constants = {"token_ids": self.parts.token_ids, "tap_scale": self.net.tap_scale}
        self.held_out = held_out_texts(self.texts, config.held_out)

    def weights(self) -> dict[str, Tensor]:
        return self.net.state()

    def loss(self, sample: Sample, step: int) -> tuple[Tensor, int]:
        """Cross-entropy to the target's own law, summed over positions, averaged over the drafted tokens."""
        config = self.config
        rollout = config.rollout if self.grown else min(config.rollout, 1 + config.rollout * step // config.steps)
        text = self._text(sample)
        tokens, correction = candidates(text.law, config.candidates, seed_of(config.seed, step, sample.number))
        law = text.law[:, tokens]
        loss, weights = torch.zeros((), device=self.device), 0.0
        for j, row in enumerate(self._draft(text, rollout, tokens)):
            each = -(law[j:] * functional.log_softmax(row + correction, -1)).sum(-1)
            loss = loss + config.decay**j * (each * text.known[j:]).sum()
            weights += config.decay**j
        return loss / weights, len(sample.ids) - sample.prompt_length

    def foreseen(self, sample: Sample) -> Foreseen:
        """Drafts from every position of the text."""
        text = self._text(sample)
        logits = self._draft(text, CHAIN)
        matches = [row.argmax(-1) == text.wanted[j:] for j, row in enumerate(logits)]
        return Foreseen(matches, float(torch.minimum(text.law, logits[0].softmax(-1)).sum()))

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


def seed_of(*parts: int) -> int:
    """A seed made of several numbers."""
    return hash(parts) % 2**62


def candidates(law: Tensor, count: int, seed: int) -> tuple[Tensor, Tensor]:
    """Draft tokens that a softmax runs over ``[C]``, and what is added to their logits so that its sum is right on
    average.

    They are the tokens that are likely anywhere in ``law [m, D]``, and as many others drawn at random, which stand for
    all the rest (sampled softmax, Jean 2015, arXiv 1412.2007).
    """
    half, size = count // 2, law.shape[1]
    if 2 * half >= size:
        return torch.arange(size, device=law.device), torch.zeros(size, device=law.device)
    generator = torch.Generator().manual_seed(seed)
    rest = torch.ones(size)
    likely = law.amax(0).topk(half).indices.cpu()
    rest[likely] = 0
    drawn = rest.multinomial(half, generator=generator)
    correction = torch.cat([torch.zeros(half), torch.full((half,), math.log(size / half - 1))])
    return torch.cat([likely, drawn]).to(law.device), correction.to(law.device)
