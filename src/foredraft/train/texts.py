"""The order in which recorded texts are trained on, and the few that are kept back."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from foredraft.errors import ConfigError
from foredraft.train.shards import Sample, read_shard, shard_paths

HELD_OUT = (1, 40)
"""Texts whose number leaves 1 by 40 are held out; :func:`foredraft.train.record.temperature` makes them greedy."""

GROUP = 4
"""Shards that are shuffled together."""


class Texts(Protocol):
    """Texts to train on, in parts that are read one at a time."""

    def names(self) -> list[str]:
        """The parts that are there now."""

    def read(self, name: str) -> list[Sample]:
        """One part."""


@dataclass(frozen=True, slots=True)
class ShardTexts:
    """Recorded texts of a folder.

    Attributes:
        taps: Layers that must have been recorded; None takes any.
        last: The layer that must have been recorded last.
    """

    folder: Path
    taps: tuple[int, ...] | None = None
    last: int | None = None

    def names(self) -> list[str]:
        return [path.name for path in shard_paths(self.folder)]

    def read(self, name: str) -> list[Sample]:
        return read_shard(self.folder / name, self.taps, self.last)


@dataclass(frozen=True, slots=True)
class Place:
    """Where in the data a run is.

    Attributes:
        epoch: Passes over the data that are complete.
        shards: File names of this epoch's shards, in order; data that comes later waits for the next epoch.
        done: Texts of this epoch that were trained on.
    """

    epoch: int
    shards: tuple[str, ...]
    done: int


def held_out(sample: Sample) -> bool:
    """Whether the text is never trained on."""
    return sample.number % HELD_OUT[1] == HELD_OUT[0]


def first_place(texts: Texts, seed: int, epoch: int = 0) -> Place:
    """The start of an epoch over all texts that are there now.

    Raises:
        ConfigError: There are none.
    """
    names = texts.names()
    if not names:
        raise ConfigError("there are no recorded texts", field="data", remedy="run 'foredraft train data' first")
    random.Random(f"{seed} {epoch}").shuffle(names)
    return Place(epoch, tuple(names), 0)


def batches(texts: Texts, place: Place, size: int, seed: int) -> Iterator[tuple[list[Sample], Place]]:
    """Batches of ``size`` texts for ever, each with the place after it. The order depends on ``place`` and ``seed``.

    Raises:
        ConfigError: There are fewer than ``size`` texts.
    """
    while True:
        batch: list[Sample] = []
        done = 0
        for start in range(0, len(place.shards), GROUP):
            group = [s for name in place.shards[start : start + GROUP] for s in _usable(texts.read(name))]
            random.Random(f"{seed} {place.epoch} {start}").shuffle(group)
            for sample in group:
                done += 1
                if done <= place.done:
                    continue
                batch.append(sample)
                if len(batch) == size:
                    yield batch, Place(place.epoch, place.shards, done)
                    batch = []
        if done < size:
            raise ConfigError(
                f"holds {done} texts of more than 8 tokens to train on, a step takes {size}",
                field="data",
                remedy="record more, or lower the batch",
            )
        place = first_place(texts, seed, place.epoch + 1)  # an incomplete batch at the end is left out


def held_out_texts(texts: Texts, n: int) -> list[Sample]:
    """The first ``n`` held-out texts."""
    found: list[Sample] = []
    for name in sorted(texts.names()):
        kept = [sample for sample in texts.read(name) if held_out(sample)]
        found += [sample for sample in kept if len(sample.ids) - sample.prompt_length > 8]
        if len(found) >= n:
            break
    return found[:n]


def start_texts(texts: Texts, parts: int = 8) -> Iterator[Sample]:
    """The texts of the first few parts, without the held-out ones."""
    for name in sorted(texts.names())[:parts]:
        yield from _usable(texts.read(name))


def usual_sizes(folder: Path, taps: Sequence[int]) -> Tensor:
    """``[len(taps) * d]``: root mean square of each dimension of the states, over the first shard.

    The first tokens of a text are left out, because models use them as a sink with states of another size.
    """
    samples = read_shard(shard_paths(folder)[0], taps)
    states = [sample.taps[min(4, len(sample.taps) - 1) :].float().flatten(1) for sample in samples]
    return torch.cat(states).square().mean(0).sqrt().clamp(min=1e-3)


def frequent_tokens(folder: Path, size: int, always: Sequence[int], vocab: int) -> Tensor:
    """``[size]`` int64, increasing: ``always``, the most frequent tokens of the answers, then of the prompts, then
    the lowest ids (which a tokenizer's merges made first).
    """
    answers: Counter[int] = Counter()
    prompts: Counter[int] = Counter()
    for path in shard_paths(folder):
        for sample in read_shard(path):
            prompts.update(sample.ids[: sample.prompt_length])
            answers.update(sample.ids[sample.prompt_length :])
    order = [*always, *(t for t, _ in answers.most_common()), *(t for t, _ in prompts.most_common()), *range(vocab)]
    return torch.tensor(sorted(list(dict.fromkeys(order))[: min(size, vocab)]))


def _usable(samples: Sequence[Sample]) -> list[Sample]:
    return [s for s in samples if not held_out(s) and len(s.ids) - s.prompt_length > 8]
