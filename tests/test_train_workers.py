"""Training with torchrun: two processes make the weights that one makes, one writes, and a killed run goes on."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from test_train_docs import make_model

from foredraft.errors import ConfigError
from foredraft.train.checkpoint import load_checkpoint
from foredraft.train.workers import Workers, join_workers, local_rank

LOOP = ["--batch", "2", "--steps", "8", "--warmup", "2", "--lr", "3e-3", "--measure-every", "4", "--save-every", "4"]
KINDS = {
    "eagle3": [*LOOP, "--draft-vocab", "100"],
    "eagle1": LOOP,
    "draft": [*LOOP, "--hidden", "32", "--heads", "2"],
}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model and what it answered."""
    path = tmp_path_factory.mktemp("workers")
    make_model(path / "model")
    prompts = [f"How do I boil {n} eggs?" for n in range(24)]
    (path / "prompts.txt").write_text("\n".join(prompts))
    asked = ["train", "data", "--out", "data", "--conversations", "prompts.txt", "--max-tokens", "24"]
    done = run(path, 1, *asked)
    assert done.returncode == 0, done.stderr
    return path


def run(place: Path, processes: int, *argv: str, kill_after: str = "") -> subprocess.CompletedProcess[str]:
    """The command line, alone or under torchrun; ``kill_after``: a file whose appearance kills all processes."""
    start = [sys.executable]
    if processes > 1:
        start += ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    command = [*start, "-m", "foredraft", *argv, "--target", "model", "--device", "cpu", "--dtype", "float32"]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    if not kill_after:
        return subprocess.run(command, cwd=place, env=environment, check=False, capture_output=True, text=True)
    child = subprocess.Popen(command, cwd=place, env=environment, start_new_session=True, stderr=subprocess.DEVNULL)
    while child.poll() is None and not (place / kill_after).exists():
        time.sleep(0.02)
    os.killpg(child.pid, signal.SIGKILL)
    child.wait()
    return subprocess.CompletedProcess(command, child.returncode)


def weights(out: Path) -> dict[str, torch.Tensor]:
    tensors = load_checkpoint(out / "checkpoint.safetensors")[0]
    return {name: value for name, value in tensors.items() if name.startswith("net.")}


@pytest.mark.parametrize("kind", KINDS)
def test_two_processes_make_the_weights_that_one_makes(place: Path, kind: str) -> None:
    """One process accumulates the gradients of the two texts of a step; two have a text each."""
    asked = ["train", kind, "--data", "data", *KINDS[kind]]
    one = run(place, 1, *asked, "--out", f"{kind}-one")
    two = run(place, 2, *asked, "--out", f"{kind}-two")
    assert one.returncode == 0, one.stderr
    assert two.returncode == 0, two.stderr
    left, right = weights(place / f"{kind}-one"), weights(place / f"{kind}-two")
    assert left.keys() == right.keys()
    far = max(float((left[name] - right[name]).abs().max()) for name in left)
    assert far < 1e-5
    histories = [json.loads((place / f"{kind}-{n}" / "history.json").read_text()) for n in ("one", "two")]
    assert len(histories[0]) == len(histories[1]) == 2
    for mine, theirs in zip(*histories, strict=True):
        assert mine["tokens"] == theirs["tokens"] > 0
        assert mine["loss"] == pytest.approx(theirs["loss"], abs=1e-5)
        assert mine["tau"] == pytest.approx(theirs["tau"])
        assert mine["overlap"] == pytest.approx(theirs["overlap"], abs=1e-5)
    assert two.stdout.count("written to") == 1  # number 0 alone speaks and writes
    assert two.stderr.count("step 4: loss") == 1


def test_a_run_without_time_saves_where_it_would_begin(place: Path) -> None:
    """Also shows that the weights compared above had moved."""
    asked = ["train", "draft", "--data", "data", *KINDS["draft"]]
    assert run(place, 1, *asked, "--out", "zero", "--minutes", "0").returncode == 0
    start = weights(place / "zero")
    assert run(place, 1, *asked, "--out", "zero").returncode == 0
    end = weights(place / "zero")
    assert max(float((start[name] - end[name]).abs().max()) for name in start) > 1e-3


@pytest.mark.parametrize("kind", ["eagle1", "draft"])
def test_a_killed_run_of_two_goes_on_to_the_same_bits(place: Path, kind: str) -> None:
    asked = ["train", kind, "--data", "data", *KINDS[kind]]
    if not (place / f"{kind}-two" / "history.json").exists():
        assert run(place, 2, *asked, "--out", f"{kind}-two").returncode == 0
    run(place, 2, *asked, "--out", f"{kind}-killed", kill_after=f"{kind}-killed/checkpoint.safetensors")
    assert load_checkpoint(place / f"{kind}-killed" / "checkpoint.safetensors")[1]["step"] in (4, 8)
    done = run(place, 2, *asked, "--out", f"{kind}-killed")
    assert done.returncode == 0, done.stderr
    left, right = weights(place / f"{kind}-two"), weights(place / f"{kind}-killed")
    assert all(torch.equal(left[name], right[name]) for name in left)


def test_fewer_texts_than_processes_are_refused(place: Path) -> None:
    done = run(place, 2, "train", "draft", "--data", "data", "--batch", "1", "--out", "few")
    assert done.returncode != 0
    assert "must be at least the number of processes, 2 (got 1)" in done.stderr


def test_answers_are_recorded_by_one_process(place: Path) -> None:
    done = run(place, 2, "train", "data", "--out", "twice", "--conversations", "prompts.txt")
    assert done.returncode != 0
    assert "answers are recorded by one process" in done.stderr
    assert not (place / "twice").exists()


def test_without_torchrun_a_process_is_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("WORLD_SIZE", "RANK", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    assert join_workers(torch.device("cpu")) == Workers(0, 1)
    assert local_rank() == 0
    monkeypatch.setenv("WORLD_SIZE", "two")
    with pytest.raises(ConfigError, match="WORLD_SIZE: must be a number"):
        join_workers(torch.device("cpu"))


def test_shares_cover_a_batch_once() -> None:
    parts = [Workers(rank, 3).share(range(8)) for rank in range(3)]
    assert sorted(i for part in parts for i in part) == list(range(8))
