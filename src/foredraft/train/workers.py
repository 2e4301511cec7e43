"""Several processes that train one model, started by torchrun: each computes on its share of every batch."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor, distributed

from foredraft.errors import ConfigError

T = TypeVar("T")

LAST_WORDS = 0.5
"""Seconds in which the last message of a barrier reaches a process that another program keeps from running."""


def local_rank() -> int:
    """The number of this process on its machine, as torchrun gives it; 0 without torchrun."""
    return _number("LOCAL_RANK", 0)


def process_count() -> int:
    """How many processes torchrun started; 1 without torchrun."""
    return _number("WORLD_SIZE", 1)


@dataclass(frozen=True, slots=True)
class Workers:
    """The processes of a run.

    Attributes:
        rank: Number of this one; only number 0 writes files.
        count: How many there are.
    """

    rank: int = 0
    count: int = 1

    @property
    def writes(self) -> bool:
        return self.rank == 0

    def share(self, items: Sequence[T]) -> Sequence[T]:
        """The part of ``items`` that is this process's."""
        return items[self.rank :: self.count]

    def sum(self, tensor: Tensor) -> Tensor:
        """The sum over all processes, in place; the same bits in each of them."""
        if self.count > 1:
            distributed.all_reduce(tensor)
        return tensor

    def same(self, tensors: Iterable[Tensor]) -> None:
        """Gives every process the values that number 0 has."""
        if self.count > 1:
            for tensor in tensors:
                distributed.broadcast(tensor, 0)

    def agree(self, value: bool, device: torch.device) -> bool:
        """What number 0 says."""
        if self.count == 1:
            return value
        said = torch.tensor([int(value)], device=device)
        distributed.broadcast(said, 0)
        return bool(said)

    def wait(self, device: torch.device) -> None:
        """Goes on when all are here."""
        self.sum(torch.zeros(1, device=device))


def join_workers(device: torch.device) -> Workers:
    """The processes that torchrun started, connected by NCCL on CUDA and by gloo on a CPU; one alone without torchrun.

    Raises:
        ConfigError: torchrun's variables do not make sense.
    """
    if process_count() < 2:
        return Workers()
    if not distributed.is_initialized():
        if device.type == "cuda":
            torch.cuda.set_device(device)
        distributed.init_process_group("nccl" if device.type == "cuda" else "gloo")
    return Workers(distributed.get_rank(), distributed.get_world_size())


def leave_workers(together: bool) -> None:
    """Ends the connection; harmless without one. ``together`` waits for the others, who must come here, too: gloo may
    abort a process whose partner leaves while it still talks.
    """
    if distributed.is_available() and distributed.is_initialized():
        if together:
            distributed.barrier()
            time.sleep(LAST_WORDS)
        distributed.destroy_process_group()


def _number(name: str, default: int) -> int:
    value = os.environ.get(name, str(default))
    if not value.isdecimal():
        raise ConfigError(f"must be a number (got {value!r})", field=name, remedy="start training with torchrun")
    return int(value)
