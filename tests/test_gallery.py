"""The gallery's own arithmetic: its law test, its faults, and that no drafter is left out."""

from __future__ import annotations

import random
import sys
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
import torch

from foredraft import Engine, SamplingParams
from foredraft.drafters.registry import BUILT_IN
from foredraft.models.info import LoadedModel
from foredraft.testing import TableModel

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))
import drafters as bench
import gallery

V = 12


def table() -> TableModel:
    def logits(prefix: tuple[int, ...]) -> torch.Tensor:
        generator = torch.Generator().manual_seed(sum(prefix[-3:]) * 31 + prefix[-1])
        return torch.randn(V, generator=generator, dtype=torch.float64) * 2

    return TableModel(logits, V)


def test_no_drafter_is_left_out() -> None:
    shown = {spec.partition(":")[0] for drafters in bench.GROUPS.values() for spec in drafters}
    assert {entry.name for entry in BUILT_IN} <= shown | set(bench.NOT_SHOWN)
    assert not shown & set(bench.NOT_SHOWN)


def test_kolmogorov_is_uniform_under_the_null() -> None:
    rng = random.Random(0)
    p = [gallery.kolmogorov([rng.random() for _ in range(50)]) for _ in range(400)]
    assert gallery.kolmogorov(p) > 0.01
    assert gallery.kolmogorov([rng.random() ** 1.5 for _ in range(300)]) < 1e-6


@pytest.mark.parametrize(("temperature", "passes"), [(1.0, True), (0.7, False), (1.4, False)])
def test_the_law_is_tested(temperature: float, passes: bool) -> None:
    model = table()
    there = bench.Gallery("table", Namespace(), Namespace(data={}))  # type: ignore[arg-type]
    there._loaded = LoadedModel(model, None, None)  # type: ignore[arg-type]
    engine = Engine(model)
    cells = []
    for seed in range(12):
        params = SamplingParams(max_tokens=40, temperature=temperature, seed=seed)
        [result] = engine.generate([[1, 2, 3]], params)
        cells.append(there.law([1, 2, 3], result, bench.Place("block", "chat", seed, "")))
    p = gallery.law_test(cells)
    assert p is not None
    assert (p > 0.01) is passes
    assert model.cache.slots_in_use <= engine.config.max_batch


def cell(**values: Any) -> dict[str, Any]:
    return {"drafted": 8, "accepted": 4, "steps": 2, "cold": 1.2, "warm": 1.5, "k": 2.0, **values}


def measured(**parts: dict[str, Any]) -> dict[str, Any]:
    rng = random.Random(1)
    even = [rng.random() for _ in range(60)]
    sound = {"places": even, "surprise": [0.5, 4.0]}
    kept = {
        "t/exact/chat/0/plain": {},
        "t/exact/chat/0/suffix": cell(same=3),
        "t/exact/chat/0/eagle3": cell(same=3, cold=2.0),
        "t/exact/chat/0/combined:suffix+eagle3": cell(same=3, cold=1.9),
        "t/rejection/chat/0/suffix": cell(**sound),
        "t/rejection/chat/0/control": {**sound, "places": [value**4 for value in even]},
    }
    names = ["suffix", "eagle3", "combined:suffix+eagle3"]
    return {"drafters": {"t": names}, "parts": kept | parts, "refused": {}, "memory": {}}


def test_figures_are_pooled_and_losses_found() -> None:
    found = gallery.summary(measured())
    assert found["faults"] == []
    row = found["rows"]["t"]["suffix"]["exact"]
    assert (row["alpha"], row["tau"], row["same"], row["texts"]) == (0.5, 3.0, 3, 3)
    assert found["combined_loss"]["combined:suffix+eagle3"]["chat/0"] == pytest.approx(0.05)


@pytest.mark.parametrize(
    ("key", "value", "fault"),
    [
        ("t/exact/chat/0/suffix", cell(same=2), "1 of 3 texts"),
        ("t/rejection/chat/0/suffix", cell(places=[i / 60 for i in range(60)], surprise=[9.0, 1.0]), "not the"),
        ("t/rejection/chat/0/control", {"places": [i / 60 for i in range(60)], "surprise": [0.0, 1.0]}, "not see"),
    ],
)
def test_what_must_not_be_is_a_fault(key: str, value: dict[str, Any], fault: str) -> None:
    [found] = gallery.summary(measured(**{key: value}))["faults"]
    assert fault in found


def test_the_page_says_what_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    data = measured(**{"t/rejection/chat/0/eagle3": {"refused": "needs a tree"}})
    data["refused"] = {"t/model:other": "not here"}
    data["summary"] = gallery.summary(data)
    data["provenance"] = {"machine": {"cores": 2, "cpu": "test"}, "date": "2026-01-01T00:00"}
    data["settings"] = {"dtype": "float32", "activations": "int8", "tokens": 4}
    (tmp_path / "img").mkdir()
    monkeypatch.setattr(gallery, "DOCS", tmp_path)
    gallery.write(data)
    page = (tmp_path / "gallery.md").read_text()
    assert "refused: needs a tree" in page
    assert "- `model:other`: not here" in page
    assert (tmp_path / "img" / "gallery.png").stat().st_size > 1000
