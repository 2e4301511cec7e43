"""What training an EAGLE-1 head on recorded texts of its target is (Li 2024, arXiv 2401.15077)."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional

from foredraft.drafters.eagle_head import HeadShape
from foredraft.models.base import Target
from foredraft.train.config import Eagle1Training
from foredraft.train.eagle import FC_SLOWER, candidates, seed_of
from foredraft.train.eagle1_net import Eagle1Net
from foredraft.train.loop import Task
from foredraft.train.measure import CHAIN, Foreseen
from foredraft.train.shards import Sample
from foredraft.train.start import QUIET, RIDGE
from foredraft.train.target_parts import TargetParts
from foredraft.train.texts import ShardTexts, held_out_texts, start_texts


class Eagle1Task(Task):
    """An EAGLE-1 head in training: smooth L1 distance to the target's next feature, and a little cross-entropy.

    Args:
        target: The model that the head drafts for; one of our decoders.
        shape: The head's sizes; its one tap is the last layer.
        config: Options.
        data: Folder of recorded texts; their last tap is the last layer's.
        fresh: Solve for the weights to start from; else they come from a checkpoint.
    """

    def __init__(
        self, target: Target, shape: HeadShape, config: Eagle1Training, data: Path, fresh: bool = True
    ) -> None:
        self.config, self.shape = config, shape
        torch.manual_seed(config.seed)
        self.parts = TargetParts(target, torch.arange(shape.vocab))
        decoder = self.parts.decoder
        self.device = decoder.device
        self.texts = ShardTexts(data, last=decoder.shape.layers)
        start = start_texts(self.texts)
        scale, solved = _linear_head(self, start) if fresh else (torch.ones(2 * shape.hidden), None)
        self.net = Eagle1Net(
            shape,
            decoder.final_norm,
            self.parts.rows,
            decoder.shape.logit_softcap,
            FC_SLOWER * scale,
            None,
            self.device,
        )
        if solved is not None:
            self.net.set("fc.weight", solved)
            for name in ("self_attn.o_proj", "mlp.down_proj"):
                weight = self.net.weights[self.net.names[f"layers.0.{name}.weight"]]
                weight.data.mul_(QUIET)
        self.parameters = dict(self.net.named_parameters())
        self.constants = {"fc_scale": self.net.tap_scale}
        self.held_out = held_out_texts(self.texts, config.held_out)

    def weights(self) -> dict[str, Tensor]:
        return self.net.state()

    def loss(self, sample: Sample, step: int) -> tuple[Tensor, int]:
        """Feature regression and cross-entropy to the target's own law, summed over positions."""
        config, seed = self.config, seed_of(self.config.seed, step, sample.number)
        features, embeddings, first = self._text(sample)
        law = self._law(features[first + 1 :])
        tokens, correction = candidates(law, config.candidates, seed)
        noise = torch.rand(features[:-1].shape, generator=torch.Generator().manual_seed(seed)) - 0.5
        noisy = features[:-1] + 2 * config.noise * noise.to(self.device)
        hidden = self.net.roll(noisy, embeddings, first, 1)[0]
        distance = functional.smooth_l1_loss(hidden.float(), features[first + 1 :], reduction="none").mean(-1).sum()
        logits = self.net.logits(hidden, tokens).float() + correction
        entropy = -(law[:, tokens] * functional.log_softmax(logits, -1)).sum()
        return distance + config.token_weight * entropy, hidden.shape[0]

    def foreseen(self, sample: Sample) -> Foreseen:
        """Drafts from every position of the text."""
        features, embeddings, first = self._text(sample)
        law = self._law(features[first + 1 :])
        hidden = self.net.roll(features[:-1], embeddings, first, min(CHAIN, len(law)))
        logits = [self.net.logits(rows) for rows in hidden]
        wanted = torch.tensor(sample.ids[first + 2 :], device=self.device)
        matches = [row.argmax(-1) == wanted[j:] for j, row in enumerate(logits)]
        return Foreseen(matches, float(torch.minimum(law, logits[0].softmax(-1)).sum()))

    @torch.no_grad()
    def _text(self, sample: Sample) -> tuple[Tensor, Tensor, int]:
        """Features ``[T + 1, d]``, embeddings ``[T, d]`` of the token after each, and the first row that foresees
        something: the second token of the answer.
        """
        ids = torch.tensor(sample.ids, device=self.device)
        features = self.parts.decoder.final_norm(sample.taps[:, -1].to(self.device).float())
        return features, self.parts.embed(ids[1:-1]), max(sample.prompt_length - 1, 0)

    @torch.no_grad()
    def _law(self, features: Tensor) -> Tensor:
        logits = functional.linear(features, self.parts.rows)
        cap = self.parts.decoder.shape.logit_softcap
        return (logits if cap is None else (logits / cap).tanh() * cap).softmax(-1)


def _linear_head(task: Eagle1Task, samples: Iterable[Sample]) -> tuple[Tensor, Tensor]:
    """Usual sizes ``[2 d]`` of embedding and feature, and the best linear map ``[d, 2 d]`` from them to the next
    feature: with it, a head foresees something from the first step on.
    """
    d = task.shape.hidden
    pairs, to_next, rows = torch.zeros(2 * d, 2 * d), torch.zeros(2 * d, d), 0
    for sample in samples:
        features, embeddings, first = task._text(sample)
        pair = torch.cat([embeddings, features[:-1]], 1)[first:].cpu()
        pairs += pair.T @ pair
        to_next += pair.T @ features[first + 1 :].cpu()
        rows += len(pair)
    scale = (pairs.diagonal() / max(rows, 1)).sqrt().clamp(min=1e-3)
    scaled = pairs / scale / scale[:, None]
    scaled += torch.eye(2 * d) * (RIDGE * float(scaled.diagonal().mean()) + 1e-12)
    return scale, (torch.linalg.solve(scaled, to_next / scale[:, None]) / scale[:, None]).T
