"""Runs the plan: workers stay loaded, only one computes, and every finished cell is saved at once."""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Protocol

import foredraft
from foredraft.bench.client import Worker, WorkerError, thread_settings
from foredraft.bench.environments import ENVIRONMENTS, UnavailableError, ensure, home
from foredraft.bench.load import cpu_seconds, free_memory
from foredraft.bench.plan import PASS_CONTEXT, PASS_ROWS, Block, Task
from foredraft.bench.rows import Row
from foredraft.bench.store import Store
from foredraft.bench.workloads import Prompt

LOAD_TIMEOUT, TASK_TIMEOUT = 900.0, 600.0
SLOW = 2.0
"""A row that has used this many times the median row's time rests in blocks that allow it."""

SOURCE = Path(__file__).parent / "workers"


class Show(Protocol):
    """Where progress goes."""

    def line(self, text: str) -> None:
        """Something worth keeping."""

    def status(self, text: str) -> None:
        """What is going on just now."""


class Bench:
    """One run over a plan.

    Args:
        rows: By name; absent ones are noted and skipped.
        prompts: By id, with their token ids.
        store: Takes the cells.
        show: Progress.
        threads: Of every engine.
        commit: Where the code stands.
        pause: Seconds between two processes, for thread pools to fall asleep.
    """

    def __init__(
        self,
        rows: Sequence[Row],
        prompts: Mapping[str, tuple[Prompt, list[int]]],
        store: Store,
        show: Show,
        threads: int,
        commit: str | None = None,
        pause: float = 0.3,
    ) -> None:
        self.rows = {row.name: row for row in rows}
        self.prompts, self.store, self.show = prompts, store, show
        self.threads, self.commit, self.pause = threads, commit, pause
        self.workers: dict[str, Worker] = {}
        self.loaded: set[str] = set()
        self.absent: dict[str, str] = {}
        self.failures: dict[str, int] = {}
        self.spent: dict[str, float] = {}
        self.last_process = ""
        self.total = 0

    # --- rows

    def prepare(self, memory_of: Callable[[Row], int], complete: Callable[[Row], Row] = lambda row: row) -> None:
        """Makes environments, starts workers and loads every row; what fails is noted as absent.

        Args:
            memory_of: Bytes that a row's process may take at most, to keep the machine from swapping.
            complete: Finds the row's weights.
        """
        for row in self.rows.values():
            try:
                if row.absent is not None:
                    raise UnavailableError(row.absent)
                self._load(complete(row), memory_of(row))
            except (UnavailableError, WorkerError, OSError) as reason:
                self._note_absent(row, str(reason))

    def _load(self, row: Row, need: int) -> None:
        if row.process not in self.workers:
            free = free_memory()
            if free is not None and free < need:
                raise UnavailableError(f"needs about {need / 1e9:.1f} GB of memory, {free / 1e9:.1f} GB were free")
            self.workers[row.process] = self._start(row)
        self.show.status(f"loading {row.name}")
        started = time.perf_counter()
        worker = self.workers[row.process]
        try:
            reply = worker.ask({"op": "load", "row": row.name, "options": row.options}, LOAD_TIMEOUT)
        except WorkerError:
            if not worker.alive:
                del self.workers[row.process]
            raise
        self.loaded.add(row.name)
        self._warm_up(row)
        self.store.add("row", _facts(row, f"ran with {_versions(reply['info'])}", True))
        self.show.line(f"{row.name}: ready after {time.perf_counter() - started:.0f} s")

    def _start(self, row: Row) -> Worker:
        if row.engine in ENVIRONMENTS:
            command = [str(ensure(row.engine, self.show.line)), str(SOURCE / "start.py"), row.worker]
        else:
            command = [sys.executable, "-m", f"{foredraft.__name__}.bench.workers.{row.worker}"]
        name = "".join(c if c.isalnum() else "-" for c in row.process)
        return Worker(command, home() / "logs" / f"{name}.log", thread_settings(self.threads))

    def _warm_up(self, row: Row) -> None:
        """A few tokens of a prompt that is not measured; curves warm up by themselves."""
        if not row.parts:
            _, ids = self.prompts["warm-up"]
            self._ask(Task("warm-up", row.name, "", ("warm-up",), 24, 0.0, 0), [ids])

    def _note_absent(self, row: Row, reason: str) -> None:
        reason = reason.replace(str(Path.home()), "~")  # results are published
        self.absent[row.name] = reason
        self.store.add("row", _facts(row, reason, False))
        self.show.line(f"{row.name}: not run: {reason}")

    # --- blocks

    def run(self, blocks: Sequence[Block], deadline: float | None) -> bool:
        """Works through the blocks; False if the deadline (of ``time.monotonic``) came first."""
        for number, block in enumerate(blocks):
            resting = self._resting() if block.slow_rows_rest else set()
            todo = [
                task
                for tasks in block.rounds
                for task in tasks
                if task.row in self.loaded and task.row not in resting and not self.store.has(task.key)
            ]
            if not todo:
                continue
            left = "" if deadline is None else f", {max(deadline - time.monotonic(), 0) / 60:.1f} min left"
            rest = f", resting: {', '.join(sorted(resting))}" if resting else ""
            self.show.line(f"[{number + 1}/{len(blocks)}] {block.name}: {len(todo)} cells{left}{rest}")
            for tasks in block.rounds:
                if deadline is not None and time.monotonic() > deadline:
                    return False
                for task in tasks:
                    if task in todo:
                        self._do(task)
        return True

    def _resting(self) -> set[str]:
        if len(self.spent) < 3:
            return set()
        usual = statistics.median(self.spent.values())
        return {row for row, seconds in self.spent.items() if seconds > SLOW * usual}

    def _do(self, task: Task) -> None:
        row = self.rows[task.row]
        if row.name not in self.loaded:  # it has failed meanwhile
            return
        self.show.status(f"{task.part} {task.group}: {task.row}")
        if row.process != self.last_process:
            time.sleep(self.pause)
            self.last_process = row.process
        worker = self.workers[row.process]
        before, started = cpu_seconds(worker.pid), time.perf_counter()
        try:
            reply = self._ask(task, [self.prompts[name][1] for name in task.prompts])
        except WorkerError as problem:
            self._failed(row, task, problem)
            return
        wall, after = time.perf_counter() - started, cpu_seconds(worker.pid)
        if task.part == "speed":
            self.spent[row.name] = self.spent.get(row.name, 0.0) + wall
        self.failures.pop(row.name, None)
        self.total += 1
        others = None if before is None or after is None else (after[0] - before[0]) - (after[1] - before[1])
        context = max((len(self.prompts[name][1]) for name in task.prompts), default=PASS_CONTEXT)
        cell = asdict(task) | reply | {"key": task.key, "date": _now(), "commit": self.commit, "context": context}
        self.store.add("cell", cell | {"other_cores": None if others is None else max(0.0, others) / wall})

    def _ask(self, task: Task, ids: list[list[int]]) -> dict[str, Any]:
        worker = self.workers[self.rows[task.row].process]
        if task.part == "curve":
            message = {"op": "cost", "row": task.row, "rows": PASS_ROWS, "context": PASS_CONTEXT, "repeats": 15}
            return worker.ask(message, TASK_TIMEOUT)
        message = {
            "op": "generate",
            "row": task.row,
            "prompts": ids,
            "messages": [self.prompts[name][0].messages for name in task.prompts],
            "max_tokens": task.tokens,
            "temperature": task.temperature,
            "seed": 1000 + task.repeat,
            "ignore_eos": task.part == "batch",  # else the batch empties
            "cold": task.part != "warm",
        }
        if task.part == "warm":  # what the engine is to remember
            worker.ask(message, TASK_TIMEOUT)
        return worker.ask(message, TASK_TIMEOUT)

    def _failed(self, row: Row, task: Task, problem: WorkerError) -> None:
        worker = self.workers[row.process]
        if task.part == "curve" and worker.alive:  # most engines have no such call
            self.store.add("cell", asdict(task) | {"key": task.key, "date": _now(), "refused": str(problem)})
            return
        self.failures[row.name] = self.failures.get(row.name, 0) + 1
        self.show.line(f"{row.name}: {task.key} failed: {problem}")
        self.store.add("failure", {"row": row.name, "task": task.key, "date": _now(), "problem": str(problem)})
        if not worker.alive:
            for other in [name for name in self.loaded if self.rows[name].process == row.process]:
                self.loaded.discard(other)
                self._note_absent(self.rows[other], f"its process ended during {task.part} {task.group}: {problem}")
        elif self.failures[row.name] >= 3:
            self.loaded.discard(row.name)
            self._note_absent(row, f"given up after three failures: {problem}")

    def close(self) -> None:
        """Ends all workers."""
        for worker in self.workers.values():
            worker.close()
        self.workers.clear()
        self.loaded.clear()


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


def _facts(row: Row, note: str, ran: bool) -> dict[str, Any]:
    facts = {name: getattr(row, name) for name in ("name", "engine", "mode", "weights", "activations", "batches")}
    return facts | {"parts": list(row.parts), "ran": ran, "note": note, "date": _now()}


def _versions(info: Mapping[str, Any]) -> str:
    first, *rest = info.items()
    return " ".join([str(first[1]), *(f"{name} {version}" for name, version in rest)])
