"""Recorded answers on disk: safetensors files of token ids and hidden states, each written in one move."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from foredraft.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Sample:
    """One answered prompt.

    Attributes:
        number: Identifies the prompt across runs.
        ids: ``n`` token ids, prompt and answer.
        prompt_length: How many of them are the prompt.
        taps: ``[n - 1, taps, d]`` bfloat16 hidden states of all positions but the last.
    """

    number: int
    ids: list[int]
    prompt_length: int
    taps: Tensor


def shard_paths(folder: Path) -> list[Path]:
    """The shards of a folder in the order in which they were written."""
    return sorted(folder.glob("shard-*.safetensors"))


def write_shard(folder: Path, samples: Sequence[Sample], taps: Sequence[int]) -> Path:
    """Writes the next shard of ``folder``."""
    folder.mkdir(parents=True, exist_ok=True)
    known = shard_paths(folder)
    number = int(known[-1].stem.removeprefix("shard-")) + 1 if known else 0
    path = folder / f"shard-{number:05d}.safetensors"
    tensors = {
        "ids": torch.tensor([token for sample in samples for token in sample.ids], dtype=torch.int32),
        "lengths": torch.tensor([len(sample.ids) for sample in samples], dtype=torch.int32),
        "prompt_lengths": torch.tensor([sample.prompt_length for sample in samples], dtype=torch.int32),
        "numbers": torch.tensor([sample.number for sample in samples], dtype=torch.int32),
        "taps": torch.cat([sample.taps for sample in samples]),
    }
    partial = path.with_suffix(".partial")
    save_file(tensors, partial, {"taps": ",".join(map(str, taps))})
    os.replace(partial, path)
    return path


def read_shard(path: Path, taps: Sequence[int] | None = None, last: int | None = None) -> list[Sample]:
    """The samples of one shard.

    Raises:
        ConfigError: It was recorded with other taps than ``taps``, or with another last one than ``last``.
    """
    with safe_open(path, "pt") as file:
        recorded = tuple(int(tap) for tap in file.metadata()["taps"].split(","))
        if taps is not None and recorded != tuple(taps):
            raise ConfigError(
                f"{path.name} holds taps {recorded}, not {tuple(taps)}", field="data", remedy="record the data again"
            )
        if last is not None and recorded[-1] != last:
            raise ConfigError(
                f"{path.name} holds layer {recorded[-1]} as its last, the target's is {last}",
                field="data",
                remedy="record the data again, with this target",
            )
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  (not a mapping)
    lengths = tensors["lengths"].tolist()
    ids = torch.split(tensors["ids"], lengths)
    states = torch.split(tensors["taps"], [length - 1 for length in lengths])
    return [
        Sample(number, part.tolist(), prompt, state)
        for number, part, prompt, state in zip(
            tensors["numbers"].tolist(), ids, tensors["prompt_lengths"].tolist(), states, strict=True
        )
    ]


def recorded_numbers(folder: Path) -> set[int]:
    """Numbers of the prompts that are answered already."""
    found: set[int] = set()
    for path in shard_paths(folder):
        with safe_open(path, "pt") as file:
            found.update(file.get_tensor("numbers").tolist())
    return found
