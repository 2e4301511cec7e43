"""The driver's side of a worker: a subprocess that answers JSON lines."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import subprocess
import threading
from pathlib import Path
from typing import Any

from foredraft.errors import ForedraftError


class WorkerError(ForedraftError):
    """A worker refused, died or did not answer in time."""


def thread_settings(threads: int) -> dict[str, str]:
    """Environment variables that give every engine the same number of threads.

    How pools wait is left as each engine has it: forcing them to sleep at once would slow the engine that computes.
    The runner lets them fall asleep between two engines instead.
    """
    count = str(threads)
    names = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMEXPR_NUM_THREADS")
    return dict.fromkeys(names, count) | {"TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"}


class Worker:
    """One worker process.

    Args:
        command: Starts it.
        log: Takes what it writes to stderr.
        settings: Environment variables on top of the driver's own.
    """

    def __init__(self, command: list[str], log: Path, settings: dict[str, str]) -> None:
        log.parent.mkdir(parents=True, exist_ok=True)
        self.log = log
        with log.open("wb") as errors:
            self.process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                env=os.environ | settings,
                start_new_session=True,  # Ctrl-C is the driver's to handle
            )
        self._replies: queue.Queue[bytes] = queue.Queue()
        threading.Thread(target=self._read, daemon=True).start()

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def alive(self) -> bool:
        return self.process.poll() is None

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self._replies.put(line)
        self._replies.put(b"")

    def ask(self, message: dict[str, Any], timeout: float) -> dict[str, Any]:
        """Sends one message and waits for its reply.

        Raises:
            WorkerError: It answered with an error, died, or took longer than ``timeout`` seconds (and was ended).
        """
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(json.dumps(message).encode() + b"\n")
            self.process.stdin.flush()
            line = self._replies.get(timeout=timeout)
        except queue.Empty:
            self.close(patience=0)
            raise WorkerError(f"no answer within {timeout:.0f} s") from None
        except OSError:
            line = b""
        if not line:
            self.process.wait()
            raise WorkerError(f"its process ended (exit code {self.process.returncode}): {self._last_words()}")
        reply: dict[str, Any] = json.loads(line)
        if "error" in reply:
            raise WorkerError(str(reply["error"])[:300])
        return reply

    def close(self, patience: float = 5.0) -> None:
        """Ends the process."""
        with contextlib.suppress(OSError):
            assert self.process.stdin is not None
            self.process.stdin.write(b'{"op": "quit"}\n')
            self.process.stdin.close()
        try:
            self.process.wait(timeout=patience)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()

    def _last_words(self) -> str:
        lines = [line for line in self.log.read_text(errors="replace").splitlines() if line.strip()]
        return lines[-1][:200] if lines else "it said nothing"
