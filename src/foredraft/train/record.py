"""The target answers prompts, and what its layers hold meanwhile is written to shards on disk."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from foredraft.config import SamplingParams
from foredraft.drafters.base import Drafter, DraftRequest
from foredraft.engine.engine import Engine
from foredraft.engine.request import Request
from foredraft.train.shards import Sample, write_shard
from foredraft.types import NO_DRAFT, Draft, Verdict

log = logging.getLogger("foredraft")


class Recorder(Drafter):
    """A drafter that drafts nothing and keeps the hidden states of every request, prompt included."""

    name = "recorder"

    def __init__(self, taps: Sequence[int]) -> None:
        self.taps = tuple(taps)
        self.seen: dict[str, list[Tensor]] = {}

    def propose(self, request: DraftRequest, k: int) -> Draft:
        return NO_DRAFT

    def observe(self, request: DraftRequest, verdict: Verdict | None, taps: Tensor | None) -> None:
        assert taps is not None
        self.seen.setdefault(request.id, []).append(taps.to(torch.bfloat16))

    def take(self, request: Request) -> Tensor:
        """``[ids - 1, taps, d]`` bfloat16: all positions but the last, whose state nobody has computed."""
        return torch.cat(self.seen.pop(request.id))[: len(request.ids) - 1]


TEMPERATURES = (0.0, 0.0, 1.0, 0.0, 0.8, 0.0, 1.0, 0.7)
"""Half of the answers are greedy, because that is how most drafts are asked for."""


def temperature(number: int) -> float:
    """Temperature at which prompt ``number`` is answered."""
    return TEMPERATURES[number % len(TEMPERATURES)]


@dataclass(frozen=True, slots=True)
class Task:
    """One prompt to be answered.

    Attributes:
        number: Identifies it across runs.
        ids: Prompt token ids.
    """

    number: int
    ids: Sequence[int]
    params: SamplingParams


def record(
    engine: Engine, tasks: Sequence[Task], folder: Path, shard_size: int = 64
) -> Iterator[list[tuple[Task, Sample]]]:
    """Answers ``tasks`` in the engine's batch and writes a shard each time ``shard_size`` are done.

    Args:
        engine: Made with a :class:`Recorder`, ``k=0`` and ``prefix_reuse=False``.
        folder: Where shards go; a shard is there completely or not at all.

    Yields:
        What each shard holds, after it was written.
    """
    recorder = engine.drafter
    assert isinstance(recorder, Recorder)
    waiting = list(reversed(tasks))
    running: list[tuple[Task, Request]] = []
    done: list[tuple[Task, Sample]] = []
    while waiting or running:
        while waiting and len(running) < engine.config.max_batch:
            task = waiting.pop()
            running.append((task, engine.submit(list(task.ids), task.params)))
        engine.step()
        for task, request in [pair for pair in running if pair[1].finished_at is not None]:
            if request.error is not None:
                raise request.error
            done.append((task, Sample(task.number, list(request.ids), request.prompt_length, recorder.take(request))))
        running = [pair for pair in running if pair[1].finished_at is None]
        if len(done) >= shard_size or not (waiting or running):
            write_shard(folder, [sample for _, sample in done], recorder.taps)
            yield done
            done = []
