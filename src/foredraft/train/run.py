"""``foredraft train data`` as a function: record what a target answers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from foredraft.config import SamplingParams
from foredraft.engine.engine import Engine
from foredraft.errors import ConfigError
from foredraft.models.info import LoadedModel
from foredraft.train.prompts import Conversation, first_prompts, follow_ups
from foredraft.train.record import Recorder, Task, record, temperature
from foredraft.train.shards import read_shard, recorded_numbers, shard_paths
from foredraft.train.target_parts import as_decoder

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
