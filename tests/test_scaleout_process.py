"""The child process: started, waited for, drained, ended. A small real server stands where vLLM's would."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest

from foredraft.errors import ConfigError
from foredraft.scaleout import process, translate
from foredraft.scaleout.options import ScaleOptions

PATIENCE = 60.0
SERVER = '''
"""Listens to /health and /slow; drains on SIGTERM; does what BEHAVE says."""
import http.server, json, os, signal, sys, threading, time

behave = os.environ.get("BEHAVE", "")
words = sys.argv[1:]
sys.stdout.write("log: started\\n")
sys.stdout.flush()
open(os.environ["RECORD"], "w").write(json.dumps([words, os.environ.get("VLLM_API_KEY")]))
if behave == "crash":
    sys.exit(3)
if behave == "deaf":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    time.sleep(600)


class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        if self.path == "/slow":
            time.sleep(1.5)
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b"whole")

    def log_message(self, *_):
        pass


class Server(http.server.ThreadingHTTPServer):
    daemon_threads = False


time.sleep(0.7)
server = Server((words[words.index("--host") + 1], int(words[words.index("--port") + 1])), Handler)
if behave == "stubborn":
    signal.signal(signal.SIGTERM, lambda *_: None)
else:
    signal.signal(signal.SIGTERM, lambda *_: threading.Thread(target=server.shutdown).start())
server.serve_forever()
server.server_close()  # joins what runs
sys.exit(int(os.environ.get("CODE", "0")))
'''


@pytest.fixture
def installed(tmp_path: Path) -> Iterator[Path]:
    """A folder for PYTHONPATH with a package that is called vllm; nothing that a test started from it outlives it."""
    site = tmp_path / "site"
    for name in ("vllm", "vllm/entrypoints", "vllm/entrypoints/openai", "vllm/entrypoints/cli"):
        (site / name).mkdir(parents=True)
        (site / name / "__init__.py").write_text("")
    (site / "vllm/entrypoints/openai/api_server.py").write_text(SERVER)
    (site / "vllm/entrypoints/cli/main.py").write_text(SERVER)
    yield site
    for serving in Serving.started:
        for _ in range(2):  # the second signal is not to be ignored
            if serving.process.poll() is None:
                serving.process.send_signal(signal.SIGTERM)
                time.sleep(0.3)
    Serving.started.clear()


def metadata(site: Path) -> None:
    info = site / "vllm-0.32.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: vllm\nVersion: 0.32.0\n")


class Serving:
    """``foredraft serve --engine vllm`` as a process."""

    started: ClassVar[list[Serving]] = []

    def __init__(self, site: Path, *extra: str, **settings: str) -> None:
        self.record = site.parent / "record.json"
        port = str(process.free_port("127.0.0.1"))
        self.url = f"http://127.0.0.1:{port}"
        words = ["serve", "--engine", "vllm", "--target", "a/b", "--drafter", "lookup", "--port", port]
        path = os.pathsep.join([str(site), str(Path(__file__).parent.parent / "src")])
        self.process = subprocess.Popen(
            [sys.executable, "-m", "foredraft", *words, "--vllm-python", sys.executable, *extra],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=os.environ | {"PYTHONPATH": path, "RECORD": str(self.record)} | settings,
        )
        self.started.append(self)
        self.log: list[str] = []
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.log.append(line)

    def said(self, text: str) -> None:
        end = time.monotonic() + PATIENCE
        while not any(text in line for line in list(self.log)):
            assert time.monotonic() < end, self.log
            assert self.process.poll() is None or text in "".join(self.log), self.log
            time.sleep(0.05)

    def end(self, number: int = signal.SIGTERM) -> int:
        self.process.send_signal(number)
        return self.process.wait(PATIENCE)

    @property
    def recorded(self) -> Any:
        return json.loads(self.record.read_text())


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_server_is_waited_for_and_drained(installed: Path, number: int) -> None:
    serving = Serving(installed, FOREDRAFT_API_KEYS="alice=a-key-of-enough-letters")
    serving.said("serving a/b with drafter lookup by vLLM on http://127.0.0.1:")
    text = "".join(serving.log)
    assert text.index("starting vLLM: VLLM_API_KEY=…") < text.index("log: started") < text.index("serving a/b")
    assert "enough-letters" not in text
    arguments, key = serving.recorded
    assert key == "a-key-of-enough-letters"
    assert arguments[:2] == ["--model", "a/b"]  # no metadata of the name vllm: its command would not start
    answer: list[bytes] = []
    asking = threading.Thread(target=lambda: answer.append(urllib.request.urlopen(serving.url + "/slow").read()))
    asking.start()
    time.sleep(0.5)
    assert serving.end(number) == 0
    asking.join()
    assert answer == [b"whole"]
    assert serving.process.stdout is not None
    assert serving.process.stdout.read() == ""


def test_the_command_of_vllm_is_used_where_it_works(installed: Path) -> None:
    metadata(installed)
    serving = Serving(installed, CODE="5")
    serving.said("serving a/b")
    assert serving.recorded[0][:2] == ["serve", "a/b"]
    assert serving.end() == 5  # its exit code is ours


def test_a_crash_at_the_start_is_told(installed: Path) -> None:
    serving = Serving(installed, BEHAVE="crash")
    assert serving.process.wait(PATIENCE) == 3
    assert not any("serving" in line for line in serving.log)


@pytest.mark.parametrize("behave", ["deaf", "stubborn"])
def test_a_second_signal_ends_it_at_once(installed: Path, behave: str) -> None:
    serving = Serving(installed, BEHAVE=behave)
    serving.said("log: started" if behave == "deaf" else "serving a/b")
    serving.process.send_signal(signal.SIGTERM)
    time.sleep(0.5)
    assert serving.process.poll() is None
    assert serving.end() == 128 + signal.SIGKILL


def test_a_server_that_ignores_the_signal_is_ended(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(process, "UNREADY_PATIENCE", 0.3)
    monkeypatch.setattr(process.sys, "stderr", (tmp_path / "log").open("w"))
    sleeper = (
        "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('deaf', flush=True); time.sleep(60)"
    )
    child = process.Child([sys.executable, "-c", sleeper], {}, patience=60)
    with child.signals():
        while "deaf" not in (tmp_path / "log").read_text():
            time.sleep(0.02)
        os.kill(os.getpid(), signal.SIGTERM)
        assert child.wait() == 128 + signal.SIGKILL
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_what_is_missing_is_named(installed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def checked(**scale: Any) -> None:
        found = translate.launch("a/b", "suffix", {}, ScaleOptions(engine="vllm", **scale), {})
        process.check(process.probe(sys.executable, found.modules), found)

    with pytest.raises(ConfigError, match="vLLM is not installed") as error:
        checked()
    assert "foredraft bench --install" in str(error.value)
    monkeypatch.setenv("PYTHONPATH", str(installed))
    with pytest.raises(ConfigError, match="needs arctic-inference") as error:
        checked()
    assert error.value.field == "drafter"
    (installed / "arctic_inference.py").write_text("")
    checked()
    with pytest.raises(ConfigError, match="needs ray") as error:
        checked(distributed_backend="ray")
    assert error.value.field == "distributed_backend"


def test_python_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FOREDRAFT_HOME", str(tmp_path))
    assert process.find_python(None) == sys.executable
    bench = tmp_path / "bench" / "vllm" / "bin" / "python"
    bench.parent.mkdir(parents=True)
    bench.symlink_to(sys.executable)
    assert process.find_python(None) == str(bench)
    assert process.find_python(sys.executable) == sys.executable
    (tmp_path / "text").write_text("no program")
    for wrong in (tmp_path / "text", tmp_path):
        with pytest.raises(ConfigError, match="is no program"):
            process.find_python(str(wrong))
    with pytest.raises(ConfigError, match="does not run as a Python"):
        process.probe("/bin/false" if Path("/bin/false").exists() else "false")


def test_secrets_are_not_shown() -> None:
    launch = translate.launch("a/b", None, {}, ScaleOptions(), {"FOREDRAFT_API_KEYS": ""})
    shown = process.shown(["python", "x y"], launch)
    assert shown == "python 'x y'"
    assert re.fullmatch(r"\d+", str(process.free_port("127.0.0.1")))
