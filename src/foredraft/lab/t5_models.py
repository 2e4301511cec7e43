"""The study's three small T5s: a target and two drafters, trained here, kept, and read back through our own adapter."""

from __future__ import annotations

import hashlib
import json
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError
from torch import Tensor
from transformers import T5Config, T5ForConditionalGeneration

from foredraft.errors import ForedraftError, ModelLoadError
from foredraft.files import replace_text
from foredraft.lab.char_models import DONE, lab_home
from foredraft.lab.progress import Progress
from foredraft.lab.t5_task import END, START, TASKS, VOCABULARY, Passages, batch
from foredraft.lab.training import CHECKPOINT, Schedule, fit
from foredraft.models.hf_load import quiet_transformers

HELD_OUT_ROWS = 64


@dataclass(frozen=True, slots=True)
class T5Spec:
    """The shape of one model.

    Attributes:
        name: ``target``, ``base`` or ``small``.
        encoder, decoder: Layers of each.
        width: Of the embeddings; heads have 16 channels.
    """

    name: str
    encoder: int
    decoder: int
    width: int

    def config(self) -> T5Config:
        return T5Config(
            vocab_size=VOCABULARY,
            d_model=self.width,
            d_kv=16,
            num_heads=self.width // 16,
            d_ff=2 * self.width,
            num_layers=self.encoder,
            num_decoder_layers=self.decoder,
            relative_attention_max_distance=64,
            dropout_rate=0.0,
            pad_token_id=START,
            eos_token_id=END,
            decoder_start_token_id=START,
        )


@dataclass(frozen=True, slots=True)
class TrainedT5:
    """A model on disk, as ``transformers`` reads it.

    Attributes:
        parameters: Exact count, shared embeddings counted once.
        losses: Cross-entropy on held-out text by task, nats a token.
        train_seconds: Time the training took.
        reused: Whether it was there already.
    """

    name: str
    folder: Path
    encoder_layers: int
    decoder_layers: int
    parameters: int
    losses: dict[str, float]
    train_seconds: float
    reused: bool


def train_or_reuse(
    spec: T5Spec,
    texts: tuple[Passages, Passages],
    corpus_sha256: str,
    schedule: Schedule,
    *,
    seed: int,
    retrain: bool,
    progress: Progress,
) -> TrainedT5:
    """Returns the trained model, training it only if this very model is not in the cache.

    Args:
        texts: Training text and held-out text.

    Raises:
        ModelLoadError: The cached model is damaged.
        ForedraftError: The folder cannot be read or written, or the disk is full.
    """
    parts = [corpus_sha256, asdict(spec), asdict(schedule), spec.config().to_dict(), seed, 1]
    key = hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode()).hexdigest()[:16]
    folder = lab_home() / f"t5_{spec.name}-{key}"
    try:
        if retrain and folder.exists():
            shutil.rmtree(folder)
        reused = (folder / DONE).is_file()
        if not reused:
            _train_into(folder, spec, texts, schedule, seed, progress)
        return _trained(folder, spec, reused)
    except (OSError, SafetensorError) as error:
        remedy = "free some disk space, train with --retrain, or set FOREDRAFT_HOME to a folder that can be written"
        raise ForedraftError(f"cannot keep the model there ({error})", field=str(folder), remedy=remedy) from None


def _train_into(
    folder: Path, spec: T5Spec, texts: tuple[Passages, Passages], schedule: Schedule, seed: int, progress: Progress
) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = T5ForConditionalGeneration(spec.config()).float()
    training, held_out = texts

    def loss_of(step: int) -> Tensor:
        source, mask, labels = batch(training, schedule.batch, seed, step, step / schedule.steps)
        loss: Tensor = model(input_ids=source, attention_mask=mask, labels=labels).loss
        return loss

    seconds = fit(model, loss_of, schedule, folder, progress)
    with quiet_transformers():
        model.save_pretrained(folder)
    facts = {
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "losses": held_out_losses(model, held_out, seed),
        "train_seconds": seconds,
    }
    (folder / CHECKPOINT).unlink(missing_ok=True)
    replace_text(folder / DONE, json.dumps(facts, indent=1))


@torch.no_grad()
def held_out_losses(model: T5ForConditionalGeneration, held_out: Passages, seed: int) -> dict[str, float]:
    """Mean cross-entropy by task, nats a token."""
    source, mask, labels = batch(held_out, 2 * HELD_OUT_ROWS, seed, -1, 1.0)
    logits = model(input_ids=source, attention_mask=mask, labels=labels).logits
    each = torch.nn.functional.cross_entropy(logits.transpose(1, 2), labels, ignore_index=-100, reduction="none")
    tokens = labels != -100
    means = [float(each[task::2].sum() / tokens[task::2].sum()) for task in range(len(TASKS))]
    return dict(zip(TASKS, means, strict=True))


def _trained(folder: Path, spec: T5Spec, reused: bool) -> TrainedT5:
    try:
        facts = json.loads((folder / DONE).read_text())
        return TrainedT5(
            name=spec.name,
            folder=folder,
            encoder_layers=spec.encoder,
            decoder_layers=spec.decoder,
            parameters=int(facts["parameters"]),
            losses={str(task): float(loss) for task, loss in facts["losses"].items()},
            train_seconds=float(facts["train_seconds"]),
            reused=reused,
        )
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        remedy = "train again with --retrain"
        raise ModelLoadError(f"damaged checkpoint ({error})", field=str(folder / DONE), remedy=remedy) from None
