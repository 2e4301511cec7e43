"""The study's two character-level models: how large they are, how they are trained, where they are kept."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from tokenizers import Regex, Tokenizer
from tokenizers.decoders import Fuse
from tokenizers.models import WordLevel
from tokenizers.normalizers import NFC, NFD
from tokenizers.pre_tokenizers import Split
from transformers import LlamaConfig, LlamaForCausalLM

from foredraft.errors import ForedraftError, ModelLoadError
from foredraft.files import replace_text
from foredraft.lab.corpus import Corpus
from foredraft.lab.progress import NoProgress, Progress
from foredraft.lab.training import CHECKPOINT, Schedule, train

DONE = "trained.json"
"""Written last: a folder without it holds an unfinished training run."""


@dataclass(frozen=True, slots=True)
class CharModelSpec:
    """The shape of one model: Llama layers, one token a character, tied embeddings.

    Attributes:
        name: ``target`` or ``drafter``.
        layers: Decoder layers.
        hidden: Width.
        intermediate: Width of the gated MLP.
        heads: Attention heads; each has ``hidden / heads`` channels.
    """

    name: str
    layers: int
    hidden: int
    intermediate: int
    heads: int

    def config(self, vocab_size: int, context: int) -> LlamaConfig:
        return LlamaConfig(
            vocab_size=vocab_size,
            hidden_size=self.hidden,
            intermediate_size=self.intermediate,
            num_hidden_layers=self.layers,
            num_attention_heads=self.heads,
            num_key_value_heads=self.heads,
            max_position_embeddings=context,
            tie_word_embeddings=True,
            bos_token_id=None,
            eos_token_id=None,
            pad_token_id=None,
        )


TARGET = CharModelSpec("target", layers=4, hidden=96, intermediate=200, heads=4)
DRAFTER = CharModelSpec("drafter", layers=1, hidden=96, intermediate=212, heads=4)
QUICK_TARGET = CharModelSpec("target", layers=2, hidden=32, intermediate=64, heads=2)
QUICK_DRAFTER = CharModelSpec("drafter", layers=1, hidden=16, intermediate=32, heads=2)


@dataclass(frozen=True, slots=True)
class TrainedModel:
    """A model on disk, in the layout that ``transformers`` and :mod:`foredraft.models` read.

    Attributes:
        folder: Holds ``config.json`` and ``model.safetensors``.
        parameters: Exact count, tied embeddings counted once.
        held_out_loss: Cross-entropy on held-out text, nats a character.
        train_seconds: Time the training took (0 s are added by reuse).
        reused: Whether the checkpoint was there already.
    """

    name: str
    folder: Path
    layers: int
    parameters: int
    held_out_loss: float
    train_seconds: float
    reused: bool


def lab_home() -> Path:
    """Where checkpoints are kept: ``$FOREDRAFT_HOME/lab``, else ``foredraft/lab`` in the user's cache folder."""
    if home := os.environ.get("FOREDRAFT_HOME"):
        return Path(home) / "lab"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "foredraft" / "lab"


def train_or_reuse(
    corpus: Corpus,
    spec: CharModelSpec,
    schedule: Schedule,
    *,
    seed: int,
    retrain: bool = False,
    home: Path | None = None,
    progress: Progress | None = None,
) -> TrainedModel:
    """Returns the trained model, training it only if this very model is not in the cache.

    The key is the hash of corpus, shape, schedule and seed. A run that was interrupted goes on where its last
    checkpoint was and ends with the same weights.

    Raises:
        ModelLoadError: The cached model is damaged.
        ForedraftError: The folder cannot be read or written, or the disk is full.
    """
    folder = (home or lab_home()) / f"{spec.name}-{_key(corpus, spec, schedule, seed)}"
    try:
        if retrain and folder.exists():
            shutil.rmtree(folder)
        if not (folder / DONE).is_file():
            _train_into(folder, corpus, spec, schedule, seed, progress or NoProgress())
            return _trained(folder, spec, reused=False)
        return _trained(folder, spec, reused=True)
    except (OSError, SafetensorError) as error:
        remedy = "free some disk space, train with --retrain, or set FOREDRAFT_HOME to a folder that can be written"
        raise ForedraftError(f"cannot keep the model there ({error})", field=str(folder), remedy=remedy) from None


def _train_into(
    folder: Path, corpus: Corpus, spec: CharModelSpec, schedule: Schedule, seed: int, progress: Progress
) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = LlamaForCausalLM(spec.config(corpus.vocab_size, schedule.context)).float()
    result = train(model, corpus, schedule, seed=seed, folder=folder, progress=progress)
    _save(model, corpus, folder)
    facts = {
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "held_out_loss": result.held_out_loss,
        "train_seconds": result.seconds,
        "alphabet": corpus.alphabet,
        "corpus_sha256": corpus.sha256,
        "spec": asdict(spec),
        "schedule": asdict(schedule),
        "seed": seed,
    }
    (folder / CHECKPOINT).unlink(missing_ok=True)
    replace_text(folder / DONE, json.dumps(facts, indent=1))


def _save(model: LlamaForCausalLM, corpus: Corpus, folder: Path) -> None:
    """Hugging Face's layout; the tied output head is stored once, as the embedding."""
    model.config.architectures = ["LlamaForCausalLM"]
    model.config.save_pretrained(folder)
    weights = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    unknown = "?" if "?" in corpus.alphabet else " "
    tokenizer = Tokenizer(WordLevel({c: i for i, c in enumerate(corpus.alphabet)}, unk_token=unknown))
    tokenizer.normalizer = NFD() if corpus.name == "korean" else NFC()
    tokenizer.pre_tokenizer = Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = Fuse()
    tokenizer.save(str(folder / "tokenizer.json"))


def _trained(folder: Path, spec: CharModelSpec, *, reused: bool) -> TrainedModel:
    try:
        facts = json.loads((folder / DONE).read_text())
        return TrainedModel(
            name=spec.name,
            folder=folder,
            layers=spec.layers,
            parameters=int(facts["parameters"]),
            held_out_loss=float(facts["held_out_loss"]),
            train_seconds=float(facts["train_seconds"]),
            reused=reused,
        )
    except (ValueError, KeyError, TypeError) as error:
        remedy = "train again with --retrain"
        raise ModelLoadError(f"damaged checkpoint ({error})", field=str(folder / DONE), remedy=remedy) from None


def _key(corpus: Corpus, spec: CharModelSpec, schedule: Schedule, seed: int) -> str:
    parts = [corpus.sha256, asdict(spec), asdict(schedule), seed]
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:16]
