"""From cells to figures: rates, ratios pair by pair, identity. Pure functions over finished cells."""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from foredraft.bench.store import Cell

Pair = tuple[str, str, int]
"""What two rows have in common: group, first prompt, repeat."""

SHORTEST = 8
"""Answers with fewer tokens after the first say nothing about speed."""


@dataclass(frozen=True, slots=True)
class Spread:
    """Median, lowest, highest and number of some values."""

    median: float
    low: float
    high: float
    n: int

    @classmethod
    def of(cls, values: Iterable[float]) -> Spread | None:
        found = list(values)
        return cls(statistics.median(found), min(found), max(found), len(found)) if found else None

    def json(self) -> dict[str, float]:
        return {"median": self.median, "min": self.low, "max": self.high, "n": self.n}


def rate(cell: Cell) -> float | None:
    """Tokens a second: alone those after the first, without reading the prompt; together all tokens over all time."""
    if "wall" not in cell:
        return None
    if len(cell["prompts"]) > 1 or cell["ttft"] is None:
        return float(cell["written"] / cell["wall"]) if cell["written"] else None
    tokens = cell["written"] - cell["first"]
    seconds = cell["wall"] - cell["ttft"]
    return float(tokens / seconds) if tokens >= SHORTEST and seconds > 0 else None


def overall_rate(cell: Cell) -> float | None:
    """Tokens a second with reading the prompt."""
    return float(cell["written"] / cell["wall"]) if cell.get("written") else None


def pair(cell: Cell) -> Pair:
    return cell["group"], cell["prompts"][0] if cell["prompts"] else "", cell["repeat"]


def rates(cells: Iterable[Cell], part: str) -> dict[str, dict[Pair, float]]:
    """Row -> pair -> tokens a second."""
    found: dict[str, dict[Pair, float]] = defaultdict(dict)
    for cell in cells:
        if cell["part"] == part and (value := rate(cell)) is not None:
            found[cell["row"]][pair(cell)] = value
    return dict(found)


def ratios(ours: Mapping[Pair, float], theirs: Mapping[Pair, float], group: str | None = None) -> list[float]:
    """Pair by pair, of one group or of all."""
    return [ours[p] / theirs[p] for p in ours if p in theirs and group in (None, p[0])]


def geomean(values: Sequence[float]) -> float | None:
    return math.exp(sum(map(math.log, values)) / len(values)) if values else None


def groups(table: Mapping[str, Mapping[Pair, float]]) -> list[str]:
    """Groups in the order of their first cell."""
    return list(dict.fromkeys(p[0] for row in table.values() for p in row))


def group_rates(row: Mapping[Pair, float], group: str) -> list[float]:
    return [value for p, value in row.items() if p[0] == group]


def score(row: Mapping[Pair, float], wanted: Sequence[str]) -> float | None:
    """Geometric mean over groups of the median rate; None if a group is missing."""
    medians = [statistics.median(found) for group in wanted if (found := group_rates(row, group))]
    return geomean(medians) if len(medians) == len(wanted) else None


def identity(cells: Iterable[Cell], baseline: Mapping[str, str]) -> dict[str, dict[str, Any]]:
    """Greedy texts of each speculative row against its own engine's plain ones.

    Args:
        cells: All cells.
        baseline: Row -> its plain row.

    Returns:
        Row -> ``texts``, ``identical``, ``first_difference`` (the earliest place, or None).
    """
    cells = [cell for cell in cells if cell["part"] in ("speed", "context", "batch") and "outputs" in cell]
    plain = {(cell["row"], cell["part"], *pair(cell)): cell["outputs"] for cell in cells}
    found: dict[str, dict[str, Any]] = {}
    for cell in cells:
        other = plain.get((baseline[cell["row"]], cell["part"], *pair(cell)))
        if other is None or baseline[cell["row"]] == cell["row"]:
            continue
        entry = found.setdefault(cell["row"], {"texts": 0, "identical": 0, "first_difference": None})
        for mine, theirs in zip(cell["outputs"], other, strict=True):
            place = first_difference(mine, theirs)
            entry["texts"] += 1
            entry["identical"] += place is None
            if place is not None:
                entry["first_difference"] = min(place, entry["first_difference"] or place)
    return found


def first_difference(mine: Sequence[int], theirs: Sequence[int]) -> int | None:
    """Where two texts part; None if they do not."""
    for place, (a, b) in enumerate(zip(mine, theirs, strict=False)):
        if a != b:
            return place
    return None if len(mine) == len(theirs) else min(len(mine), len(theirs))


def acceptance(cells: Iterable[Cell]) -> dict[str, dict[str, float | None]]:
    """Row -> pooled ``alpha`` (accepted / drafted) and ``tau`` (1 + accepted / steps that drafted), greedy, alone."""
    sums: dict[str, dict[str, int]] = defaultdict(lambda: defaultdict(int))
    for cell in cells:
        if cell["part"] == "speed":
            for name, value in cell.get("stats", {}).items():
                sums[cell["row"]][name] += value
    return {
        row: {
            "alpha": total["accepted"] / total["drafted"] if total["drafted"] else None,
            "tau": 1 + total["accepted"] / total["spec_steps"] if total["spec_steps"] else None,
        }
        for row, total in sums.items()
        if "drafted" in total
    }


def pass_costs(cells: Iterable[Cell]) -> dict[str, dict[int, float]]:
    """Row -> rows of a pass -> median milliseconds over all repetitions."""
    times: dict[str, dict[int, list[float]]] = defaultdict(lambda: defaultdict(list))
    for cell in cells:
        for n, values in cell.get("ms", {}).items():
            times[cell["row"]][int(n)] += values
    return {row: {n: statistics.median(values) for n, values in sorted(found.items())} for row, found in times.items()}
