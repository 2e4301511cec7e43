"""The two commands of training as functions: record answers, train a head on them."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path

import torch
from torch import Tensor

from foredraft.config import SamplingParams
from foredraft.drafters.eagle_checkpoint import target_mark
from foredraft.drafters.eagle_head import HeadShape
from foredraft.engine.engine import Engine
from foredraft.errors import ConfigError
from foredraft.export.speculators import Verifier, write_head
from foredraft.files import replace_text
from foredraft.models.info import LoadedModel
from foredraft.models.rope import make_rope
from foredraft.train.checkpoint import load_checkpoint
from foredraft.train.config import EagleTraining
from foredraft.train.eagle import EagleTrainer, Measure
from foredraft.train.plots import draw_history
from foredraft.train.prompts import Conversation, first_prompts, follow_ups
from foredraft.train.record import Recorder, Task, record, temperature
from foredraft.train.shards import read_shard, recorded_numbers, shard_paths
from foredraft.train.target_parts import as_decoder
from foredraft.train.texts import frequent_tokens

FOLLOW_UP = 1_000_000
"""Numbers of prompts that build on earlier answers start here."""


def taps_of(layers: int) -> tuple[int, ...]:
    """A low, a middle and a high layer, as the EAGLE-3 paper taps them: 2, half of the layers, all but 3."""
    middle = layers // 2
    return (min(2, layers // 3), middle, max(layers - 3, middle))


def record_data(
    loaded: LoadedModel,
    folder: Path,
    conversations: Sequence[Conversation] | None = None,
    *,
    prompts: int = 1000,
    max_tokens: int = 320,
    batch: int = 16,
    seed: int = 0,
) -> Iterator[int]:
    """Lets the target answer prompts and writes shards; goes on where an earlier call stopped.

    Args:
        loaded: The target and its tokenizer.
        folder: Where shards go.
        conversations: Prompts of your own, each ending with a user's message; None takes ``prompts`` of the
            built-in ones, a quarter of which build on the answers to the others.
        max_tokens: Longest answer.
        batch: Prompts answered together.

    Yields:
        Answer tokens written so far by this call, after each shard.

    Raises:
        ConfigError: The model has no tokenizer or chat template.
    """
    if loaded.tokenizer is None:
        raise ConfigError("the model has no tokenizer", field="target", remedy="use a model that carries one")
    folder.mkdir(parents=True, exist_ok=True)  # a folder that cannot be written shall fail before the first answer
    layers = as_decoder(loaded.target).shape.layers
    engine = Engine(loaded, Recorder((*taps_of(layers), layers)), k=0, max_batch=batch, prefix_reuse=False)
    if conversations is not None:
        yield from _answer(engine, folder, list(enumerate(conversations)), max_tokens, 0)
        return
    first = first_prompts(max(prompts - prompts // 4, 1), seed)
    written = 0
    for written in _answer(engine, folder, list(enumerate(first)), max_tokens, 0):
        yield written
    answers = [
        (first[sample.number], loaded.tokenizer.decode(sample.ids[sample.prompt_length :]))
        for path in shard_paths(folder)
        for sample in read_shard(path)
        if sample.number < len(first)
    ]
    later = enumerate(follow_ups(answers, prompts // 4, seed), FOLLOW_UP)
    yield from _answer(engine, folder, list(later), max_tokens, written)


def _answer(
    engine: Engine, folder: Path, numbered: Sequence[tuple[int, Conversation]], max_tokens: int, written: int
) -> Iterator[int]:
    assert engine.tokenizer is not None
    done = recorded_numbers(folder)
    tasks = []
    longest = engine.target.max_context
    for number, conversation in numbered:
        if number in done:
            continue
        ids = engine.tokenizer.chat(conversation)
        if longest is None or len(ids) + max_tokens <= longest:
            params = SamplingParams(temperature=temperature(number), max_tokens=max_tokens, seed=number)
            tasks.append(Task(number, ids, params))
    for shard in record(engine, tasks, folder):
        written += sum(len(sample.ids) - sample.prompt_length for _, sample in shard)
        yield written


def train_eagle3(
    loaded: LoadedModel,
    data: Path,
    out: Path,
    config: EagleTraining,
    report: Callable[[Measure], None] = lambda _: None,
    until: float = math.inf,
) -> Path:
    """Trains a head on recorded answers, or goes on with a run, and writes its best state.

    Args:
        loaded: The target.
        data: Folder of shards.
        out: Gets ``checkpoint.safetensors``, ``history.json``, ``history.png`` and the finished ``head`` folder.
        until: Time (seconds since the epoch) after which no step is begun.

    Returns:
        The folder of the head, in the layout of ``speculators``.

    Raises:
        ConfigError: ``data`` holds no shards, or shards of another target.
    """
    if not shard_paths(data):
        raise ConfigError(
            f"{data} holds no recorded answers", field="data", remedy="record some with 'foredraft train data'"
        )
    shape, ids = _plan(loaded, data, out, config)
    trainer = EagleTrainer(loaded.target, shape, ids, config, data, out)
    history = trainer.run(report, until)
    trainer.save()
    write_history(out, history)
    weights = load_checkpoint(trainer.best)[0] if trainer.best.exists() else trainer.net.state()
    mark = tuple(target_mark(trainer.parts.embed, shape.vocab))
    write_head(out / "head", shape, weights, ids, Verifier(loaded.info.name, mark=mark))
    return out / "head"


def write_history(out: Path, history: Sequence[Measure]) -> None:
    """``history.json`` and its plot."""
    replace_text(out / "history.json", json.dumps([asdict(entry) for entry in history], indent=1) + "\n")
    if history:
        draw_history(history, out / "history.png")


def _plan(loaded: LoadedModel, data: Path, out: Path, config: EagleTraining) -> tuple[HeadShape, Tensor]:
    """Sizes and draft vocabulary; those of the checkpoint, if there is one."""
    target = as_decoder(loaded.target).shape
    checkpoint = out / "checkpoint.safetensors"
    if checkpoint.exists():
        ids = load_checkpoint(checkpoint)[0]["token_ids"]
    else:
        special = [loaded.tokenizer.is_special(token) for token in range(target.vocab_size)] if loaded.tokenizer else []
        always = [token for token, known in enumerate(special) if known][: config.draft_vocab // 4]
        ids = frequent_tokens(data, config.draft_vocab, always, target.vocab_size)
    theta = target.rope.inverse_frequencies
    base = theta[1] ** (-target.head_dim / 2) if len(theta) > 1 and target.rope.magnitude == 1 else 10000.0
    heads = config.heads or target.heads
    head_dim = target.head_dim
    shape = HeadShape(
        taps=taps_of(target.layers),
        target_hidden=target.hidden_size,
        hidden=target.hidden_size,
        intermediate=config.intermediate or target.intermediate_size,
        heads=heads,
        kv_heads=heads,
        head_dim=head_dim,
        vocab=target.vocab_size,
        draft_vocab=len(ids),
        norm_eps=target.norm_eps,
        rope=make_rope({"rope_theta": float(f"{base:.6g}")}, head_dim, target.max_positions),
        max_positions=target.max_positions,
    )
    return shape, torch.as_tensor(ids)
