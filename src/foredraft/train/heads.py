"""``foredraft train eagle1`` and ``eagle3`` as functions: train a head on recorded answers."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

import torch
from torch import Tensor

from foredraft.drafters.eagle1_checkpoint import write_eagle1
from foredraft.drafters.eagle_checkpoint import (
    check_mark,
    check_target,
    expected_sizes,
    head_shape,
    read_checkpoint,
    target_mark,
    token_ids,
)
from foredraft.drafters.eagle_head import HeadShape
from foredraft.errors import ConfigError
from foredraft.export.speculators import Verifier, write_head
from foredraft.files import replace_text
from foredraft.models.decoder import Decoder
from foredraft.models.info import LoadedModel
from foredraft.models.rope import make_rope
from foredraft.models.shape import DecoderShape
from foredraft.train.checkpoint import load_checkpoint
from foredraft.train.config import Eagle1Training, EagleTraining
from foredraft.train.eagle import Eagle3Task
from foredraft.train.eagle1 import Eagle1Task
from foredraft.train.loop import Trainer
from foredraft.train.measure import Measure
from foredraft.train.plots import draw_history
from foredraft.train.run import taps_of
from foredraft.train.shards import shard_paths
from foredraft.train.target_parts import as_decoder
from foredraft.train.texts import frequent_tokens
from foredraft.train.workers import Workers

Report = Callable[[Measure], None]


def train_eagle3(
    loaded: LoadedModel,
    data: Path,
    out: Path,
    config: EagleTraining,
    report: Report = lambda _: None,
    until: float = math.inf,
    workers: Workers | None = None,
    start: Path | None = None,
) -> Path:
    """Trains an EAGLE-3 head on recorded answers, or goes on with a run, and writes its best state.

    Args:
        loaded: The target.
        data: Folder of shards.
        out: Gets ``checkpoint.safetensors``, ``history.json``, ``history.png`` and the finished ``head`` folder.
        until: Time (seconds since the epoch) after which no step is begun.
        workers: The processes that train together; None is this one alone.
        start: Folder of a trained head to go on from, which gives the sizes and the draft vocabulary.

    Returns:
        The folder of the head, in the layout of ``speculators``.

    Raises:
        ConfigError: ``data`` holds no shards, or shards of another target; a size is asked for that ``start`` has not.
        ModelLoadError, VocabularyMismatchError: ``start`` is damaged, or made for another target.
    """
    check_data(data)
    target, checkpoint = as_decoder(loaded.target), out / "checkpoint.safetensors"
    if start is not None:
        weights, shape, ids = _trained(start, target, config)
    else:
        ids = _vocabulary(loaded, data, config.draft_vocab, checkpoint)
        taps = taps_of(target.shape.layers)
        weights, shape = None, _shape(target.shape, taps, len(ids), config.heads, config.intermediate)
    task = Eagle3Task(target, shape, ids, config, data, fresh=not checkpoint.exists(), start=weights)
    trainer = Trainer(task, config, out, workers)
    finish(trainer, report, until)
    if trainer.workers.writes:
        mark = tuple(target_mark(task.parts.embed, shape.vocab))
        write_head(out / "head", shape, trainer.best_weights(), ids, Verifier(loaded.info.name, mark=mark))
    trainer.workers.wait(task.device)
    return out / "head"


def train_eagle1(
    loaded: LoadedModel,
    data: Path,
    out: Path,
    config: Eagle1Training,
    report: Report = lambda _: None,
    until: float = math.inf,
    workers: Workers | None = None,
) -> Path:
    """The same for an EAGLE-1 head; arguments and errors are those of :func:`train_eagle3`.

    Returns:
        The folder of the head, in EAGLE's original layout.
    """
    check_data(data)
    target = as_decoder(loaded.target)
    layers = target.shape.layers
    shape = _shape(target.shape, (layers,), target.shape.vocab_size, config.heads, config.intermediate)
    task = Eagle1Task(target, shape, config, data, fresh=not (out / "checkpoint.safetensors").exists())
    trainer = Trainer(task, config, out, workers)
    finish(trainer, report, until)
    if trainer.workers.writes:
        mark = target_mark(task.parts.embed, shape.vocab)
        write_eagle1(out / "head", shape, trainer.best_weights(), {"rope_theta": _base(target.shape)}, mark=mark)
    trainer.workers.wait(task.device)
    return out / "head"


def finish(trainer: Trainer, report: Report, until: float) -> None:
    """Trains to the end, saves, and writes the history and its plot."""
    history = trainer.run(report, until)
    trainer.save()
    if trainer.workers.writes:
        write_history(trainer.out, history)


def write_history(out: Path, history: Sequence[Measure]) -> None:
    """``history.json`` and its plot."""
    replace_text(out / "history.json", json.dumps([asdict(entry) for entry in history], indent=1) + "\n")
    if history:
        draw_history(history, out / "history.png")


def check_data(data: Path) -> None:
    """Raises ConfigError if the folder holds no shards."""
    if not shard_paths(data):
        raise ConfigError(
            f"{data} holds no recorded answers", field="data", remedy="record some with 'foredraft train data'"
        )


def _trained(start: Path, target: Decoder, config: EagleTraining) -> tuple[Mapping[str, Tensor], HeadShape, Tensor]:
    """Weights, sizes and draft vocabulary of a head that training goes on from."""
    for size in ("draft_vocab", "heads", "intermediate"):
        if size in config.model_fields_set:
            raise ConfigError(
                "is given by the head to start from", field=size, remedy="drop it, or what training goes on from"
            )
    found = read_checkpoint(start)
    shape = head_shape(found, target)
    check_target(shape, target)
    check_mark(found, target.embed, shape)
    return {name: found.tensors[name].float() for name in expected_sizes(shape)}, shape, token_ids(found, shape)


def _vocabulary(loaded: LoadedModel, data: Path, size: int, checkpoint: Path) -> Tensor:
    """``[D]``: that of the run that goes on; else special tokens, and the most frequent ones of the data."""
    if checkpoint.exists():
        return load_checkpoint(checkpoint)[0]["token_ids"]
    vocab = loaded.target.vocab_size
    special = [loaded.tokenizer.is_special(token) for token in range(vocab)] if loaded.tokenizer else []
    always = [token for token, known in enumerate(special) if known][: size // 4]
    return torch.as_tensor(frequent_tokens(data, size, always, vocab))


def _base(target: DecoderShape) -> float:
    """The base of the target's rotary embedding, where it is an unscaled one; else the usual base."""
    theta = target.rope.inverse_frequencies
    base = theta[1] ** (-target.head_dim / 2) if len(theta) > 1 and target.rope.magnitude == 1 else 10000.0
    return float(f"{base:.6g}")


def _shape(
    target: DecoderShape, taps: tuple[int, ...], draft_vocab: int, heads: int | None, intermediate: int | None
) -> HeadShape:
    """Sizes of a head; what is not given is the target's."""
    return HeadShape(
        taps=taps,
        target_hidden=target.hidden_size,
        hidden=target.hidden_size,
        intermediate=intermediate or target.intermediate_size,
        heads=heads or target.heads,
        kv_heads=heads or target.heads,
        head_dim=target.head_dim,
        vocab=target.vocab_size,
        draft_vocab=draft_vocab,
        norm_eps=target.norm_eps,
        rope=make_rope({"rope_theta": _base(target)}, target.head_dim, target.max_positions),
        max_positions=target.max_positions,
    )
