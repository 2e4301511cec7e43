"""What distilling a small causal model from the target is: token-level, sequence-level, on- and off-policy.

Forward and reverse KL and total variation are those of DistillSpec (Zhou 2023, arXiv 2310.08461); on-policy texts are
written by the student and scored by the target (GKD, Agarwal 2023, arXiv 2306.13649); sequence-level distillation is
cross-entropy on the target's answers (Kim 2016, arXiv 1606.07947). 1 - TV is the acceptance rate itself.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from foredraft.config import SamplingParams
from foredraft.engine.engine import Engine
from foredraft.errors import ConfigError
from foredraft.models.base import Segment, Target
from foredraft.models.decoder import Decoder
from foredraft.models.info import LoadedModel
from foredraft.train.config import DraftTraining
from foredraft.train.eagle import seed_of
from foredraft.train.loop import Task
from foredraft.train.measure import CHAIN, Foreseen
from foredraft.train.shards import Sample
from foredraft.train.student import Student
from foredraft.train.texts import Texts, held_out_texts


class DraftTask(Task):
    """A small causal model in training.

    Args:
        loaded: The target.
        student: What is trained.
        config: Options.
        texts: Answers of the target, with the states of its last layer where they were recorded.
    """

    def __init__(self, loaded: LoadedModel, student: Student, config: DraftTraining, texts: Texts) -> None:
        self.config, self.student, self.texts = config, student, texts
        self.target = loaded.target
        self.device = student.model.device
        self.parameters = student.parameters()
        self.constants = {}
        self.held_out = held_out_texts(texts, config.held_out)
        writer = LoadedModel(student.model, loaded.tokenizer, loaded.info)
        self._writer = Engine(writer, k=0, prefix_reuse=False) if config.on_policy else None

    def weights(self) -> dict[str, Tensor]:
        return self.student.weights()

    def prepare(self, batch: Sequence[Sample], step: int) -> Sequence[Sample]:
        """On some texts the student writes the answer itself, at temperature 1 and at most as long."""
        if self._writer is None:
            return batch
        seeds = [seed_of(self.config.seed, step, sample.number) for sample in batch]
        chosen = [i for i, seed in enumerate(seeds) if random.Random(seed).random() < self.config.on_policy]
        params = [SamplingParams(max_tokens=_answer(batch[i]), temperature=1.0, seed=seeds[i]) for i in chosen]
        prompts = [batch[i].ids[: batch[i].prompt_length] for i in chosen]
        found = list(batch)
        if chosen:
            for i, result in zip(chosen, self._writer.generate(prompts, params), strict=True):
                found[i] = replace(batch[i], ids=[*result.prompt_ids, *result.token_ids], taps=torch.empty(0))
        return [sample for sample in found if _answer(sample)]

    def loss(self, sample: Sample, step: int) -> tuple[Tensor, int]:
        """The divergence of ``config.loss``, summed over the tokens of the answer."""
        q = self._student(sample)
        if self.config.loss == "sequence":
            written = torch.tensor(sample.ids[-len(q) :], device=self.device)
            return -q.gather(1, written[:, None]).sum(), len(q)
        return divergence(self.config.loss, self._teacher(sample), q).sum(), len(q)

    def foreseen(self, sample: Sample) -> Foreseen:
        """Whether student and target would write the same token at each place, and the overlap of their laws."""
        p, q = self._teacher(sample), self._student(sample)
        same = p.argmax(-1) == q.argmax(-1)
        return Foreseen([same[j:] for j in range(CHAIN)], float(torch.minimum(p.exp(), q.exp()).sum()))

    def _student(self, sample: Sample) -> Tensor:
        """``[m, V]`` log-probabilities of the answer's ``m`` tokens."""
        ids = torch.tensor([sample.ids[:-1]], device=self.device)
        logits, _ = self.student.model.full(ids, logits_from=max(sample.prompt_length - 1, 0))
        return logits[0].float().log_softmax(-1)

    @torch.no_grad()
    def _teacher(self, sample: Sample) -> Tensor:
        """``[m, V]`` the target's log-probabilities, from recorded states or from a pass."""
        first = max(sample.prompt_length - 1, 0)
        if len(sample.taps):
            assert isinstance(self.target, Decoder)
            final = sample.taps[first:, -1].to(self.target.device, self.target.dtype)
            logits = self.target.logits(final)
        else:
            logits = scored(self.target, sample.ids[:-1], first)
        return logits.to(self.device).float().log_softmax(-1)


def divergence(kind: str, p: Tensor, q: Tensor) -> Tensor:
    """``[m]``: KL(p, q) for ``kl``, KL(q, p) for ``reverse-kl``, half the sum of absolute differences for ``tv``.

    Args:
        p: ``[m, V]`` log-probabilities of the target.
        q: ``[m, V]`` log-probabilities of the student.
    """
    if kind == "kl":
        return (p.exp() * (p - q)).sum(-1)
    if kind == "reverse-kl":
        return (q.exp() * (q - p)).sum(-1)
    return (p.exp() - q.exp()).abs().sum(-1) / 2


def scored(target: Target, ids: Sequence[int], first: int) -> Tensor:
    """``[n - first, V]`` logits of one pass over ``ids``, from row ``first`` on.

    Raises:
        ConfigError: The text is longer than the target's context.
    """
    if target.max_context is not None and len(ids) > target.max_context:
        raise ConfigError(
            f"a text of {len(ids)} tokens does not fit the target's context of {target.max_context}", field="data"
        )
    slot = target.cache.allocate()
    try:
        return target.forward([Segment(slot, ids, logits_from=first)]).logits[0].clone()
    finally:
        target.cache.free(slot)


def _answer(sample: Sample) -> int:
    """Tokens of the answer."""
    return len(sample.ids) - sample.prompt_length
