"""The results file of a bench, made from its cells, and the pages made from that file."""

from __future__ import annotations

import json
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from foredraft.bench.ceiling import Traffic
from foredraft.bench.figures import identity
from foredraft.bench.rows import Row
from foredraft.bench.store import Cell, Store
from foredraft.bench.summary import summarise
from foredraft.bench.weights import label
from foredraft.bench.workloads import categories, prompts
from foredraft.files import json_by_lines, replace_text
from foredraft.machine import provenance

DEFAULT_TARGET = "smollm2-135m"


@dataclass(frozen=True, slots=True)
class Results:
    """What a bench leaves.

    Attributes:
        data: The results file's content.
        stem: File name without ending.
    """

    data: dict[str, Any]
    stem: str


def collect(target: str, store: Store, bytes_of: Traffic, folder: Path | None) -> Results:
    """Puts a run's cells, rows and figures into one object, ready for JSON. Written ids are compared and left out."""
    rows = latest_rows(store.of_kind("row"))
    runs = store.of_kind("run")
    cells = with_bandwidth(store.cells, runs)
    found = [Row(**row["row"]) for row in rows]
    speeds = [cell["bandwidth"] for cell in cells if cell["part"] == "speed" and cell["bandwidth"]]
    bandwidth = max(speeds or [value for run in runs for value in run["bandwidth"]], default=None)
    summary = summarise(cells, found, bytes_of, bandwidth, _overhead(target, folder), categories())
    same = identity(cells, {row.name: row.baseline for row in found})
    data = {
        "provenance": provenance(measure=False),
        "target": target,
        "bandwidth": bandwidth,
        "traffic": {"packed": bytes_of.packed, "numbers": bytes_of.numbers, "kv_numbers": bytes_of.kv_numbers},
        "summary": summary.values,
        "summary_reasons": summary.reasons,
        "summary_behind": summary.behind,
        "runs": [{name: value for name, value in run.items() if name != "kind"} for run in runs],
        "rows": [_row_json(row) for row in rows],
        "identity": same,
        "failures": [{k: v for k, v in entry.items() if k != "kind"} for entry in store.of_kind("failure")],
        "workloads": _workloads(),
        "cells": [_cell_json(cell) for cell in cells],
    }
    return Results(data, "speed" if target == DEFAULT_TARGET else f"speed-{label(target)}")


def with_bandwidth(cells: Sequence[Cell], runs: Sequence[Cell]) -> list[Cell]:
    """The cells, each with the speed of memory as its own run measured it, bytes a second; None where none did.

    A bench may go on hours later, when neighbours leave memory twice as fast.
    """
    windows = sorted((run["date"], max(run["bandwidth"])) for run in runs)
    dates = [date for date, _ in windows]

    def own(cell: Cell) -> float | None:
        at = bisect_right(dates, cell["date"]) - 1
        return windows[at][1] if at >= 0 else None

    return [cell | {"bandwidth": own(cell)} for cell in cells]


def latest_rows(entries: Sequence[Cell]) -> list[dict[str, Any]]:
    """The last word on each row; a row that ran once keeps its note even if it was absent later."""
    found: dict[str, Cell] = {}
    for entry in entries:
        if entry["ran"] or not found.get(entry["name"], {}).get("ran"):
            found[entry["name"]] = entry
    fields = ("name", "engine", "mode", "weights", "activations", "batches")
    return [
        {name: value for name, value in entry.items() if name != "kind"}
        | {
            "row": {name: entry[name] for name in fields}
            | {"process": entry["engine"], "worker": "", "parts": tuple(entry["parts"])}
        }
        for entry in found.values()
    ]


def write(results: Results, folder: Path | None) -> None:
    """JSON and HTML under ``benchmarks/results``, Markdown and pictures under ``docs``; nothing without a folder."""
    if folder is None:
        return
    from foredraft.bench.pages import write_pages

    kept = folder / "benchmarks" / "results"
    kept.mkdir(parents=True, exist_ok=True)
    replace_text(kept / f"{results.stem}.json", json_by_lines(results.data, "cells"))
    write_pages(folder)


def _row_json(row: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in row.items() if name != "row"}


def _cell_json(cell: Cell) -> dict[str, Any]:
    left_out = ("kind", "outputs", "key")
    return {
        name: round(value, 6) if isinstance(value, float) else value
        for name, value in cell.items()
        if name not in left_out
    }


def _workloads() -> list[dict[str, str]]:
    return [{"id": p.id, "category": p.category, "source": p.source, "licence": p.licence} for p in prompts()]


def _overhead(target: str, folder: Path | None) -> float | None:
    """Median share of a step outside the passes, from the kept measurement of it, which is of the default target."""
    path = None if folder is None or target != DEFAULT_TARGET else folder / "benchmarks" / "results" / "overhead.json"
    if path is None or not path.exists():
        return None
    part = json.loads(path.read_text("utf-8"))["parts"].get("lookup, greedy")
    return None if part is None else float(part["outside_share_median"])
