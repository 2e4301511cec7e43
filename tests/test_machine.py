"""Machine facts and the provenance of results."""

from __future__ import annotations

import json
import platform
import socket
import subprocess
import sys
import time
import types
from datetime import UTC, datetime
from pathlib import Path

import pytest
import torch

from foredraft import machine


def test_facts_name_what_a_figure_depends_on() -> None:
    found = machine.facts(measure=False)
    assert found.versions["python"] == platform.python_version()
    assert found.versions["torch"] == torch.__version__
    assert {"foredraft", "transformers", "numpy"} <= found.versions.keys()
    assert 1 <= found.cores <= 4096
    assert found.torch_threads == torch.get_num_threads()
    assert found.cpu
    assert found.devices[0] == "cpu"
    assert found.bandwidth is None
    assert found.bandwidth_method is None
    if platform.system() == "Linux":
        assert found.memory_total is not None
        assert found.memory_free is not None
        assert 0 < found.memory_free <= found.memory_total
        assert set(found.cpu_flags) <= set(machine.FLAGS)


def test_bandwidth_is_bytes_a_second_and_keeps_its_time() -> None:
    start = time.perf_counter()
    speed = machine.read_bandwidth(seconds=0.1, nbytes=1 << 24)
    assert time.perf_counter() - start < 5
    assert 1e8 < speed < 1e13  # between a slow card and any machine there is; off by 4 or 1000 would leave it


def test_bandwidth_counts_every_byte_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a clock that ticks once a reading, a pass takes one tick: the speed is the buffer's bytes."""
    ticks = iter(range(1000))
    monkeypatch.setattr(machine.time, "perf_counter", lambda: float(next(ticks)))
    assert machine.read_bandwidth(seconds=6, nbytes=1 << 20) == 1 << 20


def test_little_memory_means_a_small_buffer(monkeypatch: pytest.MonkeyPatch) -> None:
    ticks = iter(range(1000))
    monkeypatch.setattr(machine.time, "perf_counter", lambda: float(next(ticks)))
    monkeypatch.setattr(machine, "_memory", lambda: (8 << 20, 4 << 20))
    assert machine.read_bandwidth(seconds=6) == 1 << 20


def test_provenance_is_json_without_names_or_places(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    secret = tmp_path / "someone" / "out.json"
    monkeypatch.setattr(sys, "argv", ["/opt/x/bin/foredraft", "lab", "article", f"--out={secret}", "--seed", "1"])
    found = machine.provenance(measure=False)
    text = json.dumps(found, ensure_ascii=False)
    assert json.loads(text) == {**found, "machine": json.loads(json.dumps(found["machine"]))}
    assert found["command"] == "foredraft lab article '--out=…/out.json' --seed 1"
    assert "someone" not in text
    assert str(tmp_path) not in text
    assert socket.gethostname() not in text
    when = datetime.fromisoformat(found["date"])
    assert when.tzinfo == UTC
    assert abs((datetime.now(UTC) - when).total_seconds()) < 60
    assert found["machine"]["versions"]["torch"] == torch.__version__


@pytest.mark.parametrize(
    ("argument", "shown"),
    [
        ("Qwen/Qwen2", "Qwen/Qwen2"),
        ("/srv/models/m.gguf", "…/m.gguf"),
        ("/srv/models/", "…/models"),
        ("--target=/srv/m.gguf", "--target=…/m.gguf"),
        ("model:/srv/m.gguf", "model:…/m.gguf"),
        ("~/m.gguf", "…/m.gguf"),
        ("~bob/m.gguf", "…/m.gguf"),
        ("../x/m.gguf", "…/m.gguf"),
        ("./m.gguf", "…/m.gguf"),
        ("C:\\Users\\bob\\m.gguf", "…/m.gguf"),
        ("file:///home/bob/m.gguf", "file:…/m.gguf"),
        ("https://example.org/a/b", "https://example.org/a/b"),
        ("5/6 of and/or what", "5/6 of and/or what"),
        ("/", "/"),
    ],
)
def test_folders_are_cut_from_arguments(argument: str, shown: str) -> None:
    assert machine._without_folders(argument) == shown


def test_the_home_folder_itself_is_not_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/alice")
    assert machine._without_folders("--out=/home/alice") == "--out=~"
    assert machine._without_folders("/home/alice/") == "~"


def test_a_module_run_is_shown_as_one() -> None:
    assert machine.command_line(["/x/lib/foredraft/__main__.py", "a b"]) == "python -m foredraft 'a b'"
    assert machine.command_line([]) == ""


def test_commit_and_dirt_come_from_the_checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = tmp_path / "machine.py"
    module.write_text("a = 1\n")
    monkeypatch.setattr(machine, "__file__", str(module))
    assert machine._git() == (None, None)

    def git(*words: str) -> str:
        identity = ["-c", "user.name=t", "-c", "user.email=t@example.org"]
        done = subprocess.run(
            ["git", "-C", str(tmp_path), *identity, *words], capture_output=True, text=True, check=True
        )
        return done.stdout.strip()

    git("init", "-q")
    assert machine._git() == (None, None)  # inside somebody's repository, but not part of it
    git("add", "machine.py")
    git("commit", "-q", "-m", "x")
    commit = git("rev-parse", "HEAD")
    assert machine._git() == (commit, False)
    (tmp_path / "notes.txt").write_text("untracked files change no figure")
    assert machine._git() == (commit, False)
    module.write_text("a = 2\n")
    assert machine._git() == (commit, True)


def test_missing_kernels_are_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = types.SimpleNamespace(available=lambda: False, why_unavailable=lambda: "no compiler")
    monkeypatch.setitem(sys.modules, "foredraft.kernels", fake)
    assert machine.facts(measure=False).kernels_reason == "no compiler"
    fake.available = lambda: True
    assert machine.facts(measure=False).kernels
    monkeypatch.setitem(sys.modules, "foredraft.kernels", None)
    assert machine.facts(measure=False).kernels_reason == "not built (ModuleNotFoundError)"


def test_cores_respect_affinity_and_quota(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine.os, "sched_getaffinity", lambda _: set(range(8)), raising=False)
    monkeypatch.setattr(machine, "_read", lambda _: "max 100000\n")
    assert machine.cores() == 8
    monkeypatch.setattr(machine, "_read", lambda _: "300000 100000\n")
    assert machine.cores() == 3
    monkeypatch.setattr(machine, "_read", lambda _: "50000 100000\n")
    assert machine.cores() == 1


def test_memory_respects_the_containers_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    files = {
        "/proc/meminfo": "MemTotal:       1000 kB\nMemFree: 1 kB\nMemAvailable:    800 kB\n",
        "/sys/fs/cgroup/memory.max": "max\n",
        "/sys/fs/cgroup/memory.current": "102400\n",
    }
    monkeypatch.setattr(machine, "_read", lambda path: files.get(path, ""))
    assert machine._memory() == (1000 * 1024, 800 * 1024)
    files["/sys/fs/cgroup/memory.max"] = "512000\n"
    assert machine._memory() == (512_000, 409_600)
