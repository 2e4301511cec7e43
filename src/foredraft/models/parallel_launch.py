"""Starts the processes that share a model, or joins those that torchrun has started."""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from typing import IO, Any

import torch
from torch.distributed import TCPStore, distributed_c10d  # type: ignore[attr-defined]
from torch.distributed.rendezvous import rendezvous

from foredraft.errors import ConfigError, ModelLoadError
from foredraft.models.parallel import ParallelDecoder
from foredraft.models.parallel_group import Group

JOIN = "FOREDRAFT_TENSOR_PARALLEL"
"""Environment of a process that was started here: its rank and the port where the others are found, as JSON."""
ANSWER_S = 120.0
LOAD_S = 3600.0


@dataclass(slots=True)
class Child:
    """One process that this one started; its stderr goes to a file, for the message if it ends."""

    rank: int
    process: subprocess.Popen[bytes]
    said: IO[bytes]

    def end(self, patience: float) -> str | None:
        """What became of it, if it ends within ``patience`` seconds."""
        try:
            code = self.process.wait(patience)
        except subprocess.TimeoutExpired:
            return None
        self.said.seek(0)
        lines = self.said.read().decode(errors="replace").strip().splitlines()
        how = f"signal {-code}" if code < 0 else f"code {code}"
        return f"process {self.rank} ended with {how}" + (f": {lines[-1]}" if lines else "")


@dataclass(slots=True)
class Meeting:
    """Where the processes find one another."""

    store: distributed_c10d.Store
    rank: int
    local: bool
    children: list[Child] = field(default_factory=list)

    def fate(self, patience: float = 0.0) -> str | None:
        """What became of the first process that has ended, or ends soon."""
        return next((end for child in self.children if (end := child.end(patience))), None)


def load_share(size: int, options: Mapping[str, Any], build: Callable[[Group], ParallelDecoder]) -> ParallelDecoder:
    """Loads a model split over ``size`` processes and returns rank 0's share.

    In the other processes this does what rank 0 says and then exits; it never returns there.

    Args:
        options: Arguments of :func:`foredraft.models.loading.load_model` for the processes started here.
        build: Reads the share of this process.

    Raises:
        ConfigError: torchrun started another number of processes.
        ModelLoadError: A process could not load its share; the message has its last words.
    """
    meeting = _joined(size) or _started(size, options)
    # A GPU each; on a CPU the processes share its cores.
    device = torch.device(str(options["device"]))
    if device.type == "cuda":
        device = torch.device("cuda", meeting.rank % torch.cuda.device_count())
        torch.cuda.set_device(device)
    elif meeting.local:
        torch.set_num_threads(max(1, torch.get_num_threads() // size))
    group = Group(meeting.rank, size, device)
    group.witness = lambda: meeting.fate(patience=2.0)  # a connection breaks before the process is seen to have ended
    try:
        decoder = build(group)
        meeting.store.set(f"ready/{meeting.rank}", "")
        _wait_for_all(meeting, size)
        group.connect(meeting.store, meeting.local, ANSWER_S)
    except BaseException:
        _stop(meeting.children)
        raise
    if meeting.rank:
        _follow(decoder)
    atexit.register(_leave, decoder, meeting)
    return decoder


def _joined(size: int) -> Meeting | None:
    """The meeting that this process was started for; None if it was started alone."""
    if JOIN in os.environ:
        place = json.loads(os.environ[JOIN])
        store = TCPStore("127.0.0.1", place["port"], size, is_master=False, timeout=timedelta(seconds=60))
        return Meeting(store, place["rank"], local=True)
    world = int(os.environ.get("WORLD_SIZE", 1))
    if world == 1:
        return None
    if world != size:
        raise ConfigError(
            f"torchrun started {world} processes", field="tensor_parallel", remedy=f"give {world}, or start {size}"
        )
    store, rank, _ = next(rendezvous("env://", timeout=timedelta(seconds=LOAD_S)))
    return Meeting(distributed_c10d.PrefixStore("foredraft", store), rank, local=False)


def _started(size: int, options: Mapping[str, Any]) -> Meeting:
    store = TCPStore("127.0.0.1", 0, size, is_master=True, wait_for_workers=False)
    meeting = Meeting(store, 0, local=True)
    command = [
        sys.executable,
        "-m",
        "foredraft.models.parallel_worker",
        json.dumps({**options, "tensor_parallel": size}),
    ]
    for rank in range(1, size):
        said = tempfile.TemporaryFile()  # noqa: SIM115
        environment = {**os.environ, JOIN: json.dumps({"port": store.port, "rank": rank})}
        process = subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL, stdout=said, stderr=said)
        meeting.children.append(Child(rank, process, said))
    return meeting


def _wait_for_all(meeting: Meeting, size: int) -> None:
    deadline = time.monotonic() + LOAD_S
    while not all(meeting.store.check([f"ready/{rank}"]) for rank in range(size)):
        if (fate := meeting.fate()) is not None or time.monotonic() > deadline:
            raise ModelLoadError(
                fate or f"not all of {size} processes have loaded their share after {LOAD_S:.0f} s",
                field="tensor_parallel",
                remedy="check memory and that every process can read the model",
            )
        time.sleep(0.02)


def _follow(decoder: ParallelDecoder) -> None:
    """The life of the other processes. If rank 0 is gone, nobody is left to be told."""
    try:
        decoder.follow()
    except Exception as error:
        if JOIN not in os.environ or not decoder.group.lost:
            raise
        raise SystemExit(f"rank 0 is gone: {error}") from None
    raise SystemExit(0)


def _leave(decoder: ParallelDecoder, meeting: Meeting) -> None:
    if decoder.group.lost is None and meeting.fate() is None:
        with contextlib.suppress(Exception):
            decoder.end()
            decoder.group.disconnect()
    _stop(meeting.children, patience=3.0)


def _stop(children: list[Child], patience: float = 0.0) -> None:
    deadline = time.monotonic() + patience
    for child in children:
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.process.wait(max(deadline - time.monotonic(), 0.0))
        if child.process.poll() is None:
            child.process.kill()
            child.process.wait()
