"""The benchmark of accelerators: its check runs on the CPU too, and on a CUDA device where there is one."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

CUDA = pytest.param(
    "cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device on this machine")
)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(sys, "path", [str(Path(__file__).parents[1] / "benchmarks"), *sys.path])
    import gpu

    return gpu


@pytest.mark.parametrize("device", ["cpu", CUDA])
def test_logits_are_the_cpus_and_speculation_keeps_the_text(gpu: Any, device: str) -> None:
    """float32 on the device is the reference up to rounding; texts agree for every draft length."""
    found = gpu.check(device)
    exact, rounded = found["torch.float32"], found["torch.bfloat16"]
    assert exact["largest_logit_difference"] < 1e-3
    assert rounded["largest_logit_difference"] < 0.5
    assert set(exact["identical_texts_of_4_by_k"].values()) == {4}


@pytest.mark.parametrize("device", ["cpu", CUDA])
def test_every_batch_and_row_count_is_timed(gpu: Any, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "CONTEXT", 16)
    monkeypatch.setattr(gpu, "BATCHES", (1, 2))
    timed = gpu.time_passes("tiny", device, until=0.0)
    assert set(timed["ms"]) == {"1", "2"}
    assert set(timed["ms"]["1"]) == {str(rows) for rows in gpu.ROWS}
    assert timed["bytes"] == 2 * timed["parameters"]
    assert timed["cost8_over_cost1"] > 0
