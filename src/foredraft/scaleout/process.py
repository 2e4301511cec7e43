"""vLLM's server as a child process: found, started, waited for, drained."""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import signal
import socket
import ssl
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from foredraft.bench.environments import python_of
from foredraft.errors import ConfigError
from foredraft.scaleout.translate import Launch

INSTALL = "install it ('foredraft bench --install', or pip install vllm) or name its Python with --vllm-python"
POLL = 0.5
"""Seconds between two looks at a server."""
UNREADY_PATIENCE = 10.0
"""Seconds that a server has to end before it was ready: it drains nothing then, and may not listen to signals yet."""
_PROBE = """
import importlib.metadata, importlib.util, json, sys
def version(name):
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None
found = {name: importlib.util.find_spec(name) is not None for name in sys.argv[1:]}
json.dump({"modules": found, "command": version("vllm") is not None}, sys.stdout)
"""


@dataclass(frozen=True, slots=True)
class Interpreter:
    """A Python and what vLLM's installation for it offers.

    Attributes:
        path: Of the executable.
        command: Whether ``vllm serve`` works; it does not where the distribution has another name (the CPU build).
        modules: Module -> whether it is there.
    """

    path: str
    command: bool
    modules: Mapping[str, bool]


def find_python(asked: str | None) -> str:
    """``--vllm-python``, the bench's environment of vLLM if it is there, or this Python.

    Raises:
        ConfigError: There is no such file.
    """
    if asked is None:
        bench = python_of("vllm")
        return str(bench) if bench.exists() else sys.executable
    path = Path(asked).expanduser()
    if not path.is_file() or not os.access(path, os.X_OK):
        raise ConfigError(f"{asked} is no program", field="vllm_python", remedy="name the python of an environment")
    return str(path.absolute())  # not resolved: the link in an environment is what tells it apart


def probe(python: str, modules: Sequence[str] = ()) -> Interpreter:
    """Looks without importing anything of vLLM.

    Raises:
        ConfigError: It is no Python.
    """
    try:
        done = subprocess.run(
            [python, "-c", _PROBE, "vllm", *modules], capture_output=True, text=True, timeout=60, check=True
        )
        found = json.loads(done.stdout)
    except (OSError, subprocess.SubprocessError, ValueError):
        raise ConfigError(
            f"{python} does not run as a Python", field="vllm_python", remedy="name the python of an environment"
        ) from None
    return Interpreter(python, bool(found["command"]), found["modules"])


def check(interpreter: Interpreter, launch: Launch) -> None:
    """Raises ConfigError if vLLM, or what it needs for this launch, is missing."""
    if not interpreter.modules.get("vllm"):
        raise ConfigError(f"vLLM is not installed for {interpreter.path}", field="vllm_python", remedy=INSTALL)
    for module in launch.modules:
        if not interpreter.modules.get(module):
            option = "distributed_backend" if module == "ray" else "drafter"
            package = module.replace("_", "-")
            raise ConfigError(
                f"vLLM needs {package} for that, which {interpreter.path} has not",
                field=option,
                remedy=f"{interpreter.path} -m pip install {package}",
            )


def command(interpreter: Interpreter, launch: Launch) -> list[str]:
    """The command line."""
    start = [interpreter.path, "-m"]
    if interpreter.command or not interpreter.modules.get("vllm"):
        return [*start, "vllm.entrypoints.cli.main", "serve", launch.model, *launch.arguments]
    return [*start, "vllm.entrypoints.openai.api_server", "--model", launch.model, *launch.arguments]


def shown(words: Sequence[str], launch: Launch) -> str:
    """The command as a shell takes it, secrets left out."""
    return " ".join([*(f"{name}=…" for name in launch.secrets), shlex.join(words)])


def free_port(host: str) -> int:
    """A port that nobody listens on: vLLM does not tell which one it took when asked for port 0."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as found:
        found.bind((host, 0))
        return int(found.getsockname()[1])


class Child:
    """The running server.

    Args:
        words: Its command line.
        secrets: Added to the environment.
        patience: Seconds between a first signal and the end by force, once the server was ready.
    """

    def __init__(self, words: Sequence[str], secrets: Mapping[str, str], patience: float) -> None:
        self.patience = patience
        self.asked_to_end: float | None = None
        self.ready = False
        # Its output is a log, so it goes where ours goes. A session of its own: Ctrl-C must reach it once, through us.
        self.process = subprocess.Popen(
            words,
            stdin=subprocess.DEVNULL,
            stdout=sys.stderr.fileno(),
            env={**os.environ, **secrets},
            start_new_session=True,
        )

    @contextlib.contextmanager
    def signals(self) -> Iterator[None]:
        """Hands SIGTERM and SIGINT on as SIGTERM; a second one ends the server and its workers at once."""

        def handle(number: int, frame: FrameType | None) -> None:
            if self.asked_to_end is None:
                self.asked_to_end = time.monotonic()
                with contextlib.suppress(ProcessLookupError):
                    self.process.send_signal(signal.SIGTERM)
            else:
                self.kill()

        before = {number: signal.signal(number, handle) for number in (signal.SIGTERM, signal.SIGINT)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def kill(self) -> None:
        """Ends the server with everything that it started."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)

    def alive(self) -> bool:
        """Whether it runs; ends it by force where it was asked to end and has not for too long."""
        if self.process.poll() is not None:
            return False
        patience = self.patience if self.ready else UNREADY_PATIENCE
        if self.asked_to_end is not None and time.monotonic() - self.asked_to_end > patience:
            self.kill()
        return True

    def wait(self) -> int:
        """Its exit code, as a shell tells it: 128 + n after signal n. What it left behind is ended."""
        while self.alive():
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(POLL)
        self.kill()  # workers of a server that crashed
        code = self.process.returncode
        return code if code >= 0 else 128 - code


def answers(url: str) -> bool:
    """Whether the server says that it is ready."""
    unchecked = ssl._create_unverified_context() if url.startswith("https") else None  # it is our own child
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=5, context=unchecked) as reply:
            return int(reply.status) == 200
    except (OSError, urllib.error.URLError, ValueError):
        return False


def wait_ready(child: Child, url: str, waiting: Callable[[float], None]) -> bool:
    """Waits until the server answers; False if it ended first.

    Args:
        child: The server.
        url: Its address; 0.0.0.0 is asked as 127.0.0.1.
        waiting: Called twice a second with the seconds waited so far.
    """
    started = time.monotonic()
    local = url.replace("//0.0.0.0:", "//127.0.0.1:").replace("//[::]:", "//[::1]:")
    while child.alive() and child.asked_to_end is None:
        if answers(local):
            child.ready = True
            return True
        waiting(time.monotonic() - started)
        time.sleep(POLL)
    return False
