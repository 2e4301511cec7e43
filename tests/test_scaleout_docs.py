"""docs/scale-out.md, followed literally; servers are not started (``--dry-run``), heads are small."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import eagle_support as support
import pytest
import torch
from cli_support import Cli

from foredraft.export.speculators import Verifier, write_head

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "scale-out.md"


def commands() -> list[str]:
    """Every command of the page that starts a server, in order."""
    found = re.findall(r"^\$ (foredraft serve .+?)\n(?!error: )", PAGE.read_text("utf-8"), re.M)
    assert len(found) == 7
    return found


def follow(folder: Path, cli: Cli) -> list[str]:
    """Runs the page in ``folder`` and answers with the commands that vLLM would have been started with."""
    net = support.net()
    write_head(folder / "run" / "head", net.shape, net.state(), support.ids(), Verifier("x/y"), dtype=torch.float32)
    [export] = re.findall(r"^\$ (foredraft export run/head .+)\n(.+)$", PAGE.read_text("utf-8"), re.M)
    outcome = cli(*shlex.split(export[0])[1:])
    assert outcome.code == 0, outcome.err
    assert re.fullmatch(".+".join(map(re.escape, export[1].split("…"))) + ".+", outcome.out.strip())
    said = []
    for command in commands():
        words = shlex.split(command)[1:]
        outcome = cli(*words, *([] if "--dry-run" in words else ["--dry-run"]))
        assert outcome.code == 0, (command, outcome.err)
        said.append(outcome.out.strip())
    return said


def test_the_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    [key] = re.findall(r"^\$ export FOREDRAFT_API_KEYS=(.+)$", PAGE.read_text("utf-8"), re.M)
    monkeypatch.setenv("FOREDRAFT_API_KEYS", key)
    said = follow(tmp_path, Cli(capsys))
    assert all(text.startswith("VLLM_API_KEY=… ") and "0123" not in text for text in said)
    speculative = json.loads(shlex.split(said[0])[-1])
    assert speculative["num_speculative_tokens"] == 5
    assert Path(speculative["model"]) == (tmp_path / "my-model-eagle3").resolve()
    [shown] = re.findall(r"--dry-run\n(.+)$", PAGE.read_text("utf-8"), re.M)
    pattern = ".*".join(map(re.escape, shown.split("…")))
    assert re.fullmatch(pattern, said[0].removeprefix("VLLM_API_KEY=… "))
    assert '"num_speculative_tokens": 3' in said[1]
    assert "--tensor-parallel-size 4" in said[2]
    assert "--tensor-parallel-size 2 --data-parallel-size 4" in said[3]
    assert "--pipeline-parallel-size 2 --distributed-executor-backend ray" in said[4]
    assert "--data-parallel-backend ray" in said[5]
    assert said[6].endswith("--nnodes=2 --node-rank=0 --master-addr=first-machine")


def test_figures_are_the_kept_ones() -> None:
    kept = json.loads((ROOT / "benchmarks" / "results" / "vllm-eagle3.json").read_text("utf-8"))["parts"]["k=3"]
    text = PAGE.read_text("utf-8")
    sides = kept["vllm"], kept["foredraft"]

    def row(name: str, key: str, digits: int | None = None) -> str:
        shown = [f"{side[key]:.{digits}f}" if digits else str(side[key]) for side in sides]
        return f"| {name} | {' | '.join(shown)} |"

    assert row("steps that drafted", "num_spec_steps") in text
    assert row("drafted tokens", "num_draft_tokens") in text
    assert row("accepted tokens", "num_accepted_draft_tokens") in text
    assert row("acceptance rate α", "draft_acceptance_rate", 3) in text
    assert row("mean acceptance length τ", "mean_acceptance_length", 3) in text
    rates = [" ".join(f"{rate:.3f}" for rate in side["acceptance_rate_per_position"]) for side in sides]
    assert f"| accepted at position 1, 2, 3 | {' | '.join(rates)} |" in text
    assert (
        f"The ratio of τ is {kept['ratio_of_mean_acceptance_lengths']:.3f}, and all {kept['same_text']} texts" in text
    )
    five = json.loads((ROOT / "benchmarks" / "results" / "vllm-eagle3.json").read_text("utf-8"))["parts"]["k=5"]
    taus = [five[side]["mean_acceptance_length"] for side in ("vllm", "foredraft")]
    assert f"With five tokens a step τ is {taus[0]:.3f} and {taus[1]:.3f}." in text
    assert 0.95 < kept["ratio_of_mean_acceptance_lengths"] < 1.05
    [excerpt] = re.findall(r"```text\n(.+?)\n```", text, re.S)
    assert set(excerpt.splitlines()) <= set(kept["log"])
