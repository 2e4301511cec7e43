"""The figures that the project promises, from one run's cells; None with a reason where something is missing."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from foredraft.bench.ceiling import Traffic
from foredraft.bench.figures import (
    Pair,
    geomean,
    group_rates,
    groups,
    pass_costs,
    rates,
    ratios,
    score,
)
from foredraft.bench.rows import Row
from foredraft.bench.store import Cell

KEYS = (
    "plain_vs_best_peer",
    "speculative_vs_best_peer",
    "worst_category_vs_plain",
    "share_of_bandwidth",
    "cost8_over_cost1",
    "batch_vs_vllm",
    "overhead_share",
)


@dataclass(slots=True)
class Summary:
    """The figures and what stands behind them.

    Attributes:
        values: Exactly :data:`KEYS`.
        reasons: Key -> why it is None.
        behind: Key -> which rows were compared.
    """

    values: dict[str, Any]
    reasons: dict[str, str] = field(default_factory=dict)
    behind: dict[str, Any] = field(default_factory=dict)


def summarise(
    cells: Sequence[Cell],
    rows: Sequence[Row],
    traffic: Traffic | None,
    bandwidth: float | None,
    overhead: float | None,
    expected: Sequence[str] = (),
) -> Summary:
    """All figures.

    Args:
        cells: Finished cells.
        rows: The rows that they belong to.
        traffic: Bytes of a step of the target.
        bandwidth: Measured speed of reading memory, bytes a second.
        overhead: Share of a step outside the forward passes at k=4, measured on its own.
        expected: Categories that a whole bench has; those that were not reached are named as missing.
    """
    out = Summary(dict.fromkeys(KEYS))
    maker = _Maker(cells, rows, out)
    maker.put("plain_vs_best_peer", maker.plain_vs_peer)
    maker.put("speculative_vs_best_peer", maker.speculative_vs_peer)
    maker.put("worst_category_vs_plain", maker.worst_category)
    maker.put("share_of_bandwidth", lambda: maker.share(traffic, bandwidth))
    maker.put("cost8_over_cost1", maker.cost_ratio)
    maker.put("batch_vs_vllm", maker.batch_vs_vllm)
    missing = [category for category in expected if category not in maker.categories]
    if missing and maker.categories:
        for key in ("plain_vs_best_peer", "speculative_vs_best_peer", "worst_category_vs_plain"):
            out.reasons[f"{key}, {', '.join(missing)}"] = "the time was up before"
        if out.values["speculative_vs_best_peer"] is not None:
            out.values["speculative_vs_best_peer"] |= dict.fromkeys(missing)
    out.values["overhead_share"] = overhead
    if overhead is None:
        out.reasons["overhead_share"] = "not measured; run 'make bench-overhead'"
    return out


class _MissingError(Exception):
    """A figure cannot be worked out; the message says why."""


class _Maker:
    """Works out one figure after the other."""

    def __init__(self, cells: Sequence[Cell], rows: Sequence[Row], out: Summary) -> None:
        self.cells, self.out = cells, out
        self.rows = {row.name: row for row in rows}
        self.speed = {name: table for name, table in rates(cells, "speed").items() if name in self.rows}
        self.categories = groups(self.speed)

    def put(self, key: str, work: Callable[[], Any]) -> None:
        try:
            self.out.values[key] = work()
        except _MissingError as reason:
            self.out.reasons[key] = str(reason)

    def names(self, ours: bool, plain: bool | None = None) -> list[str]:
        """Rows that were measured."""
        return [name for name in self.speed if self.rows[name].ours == ours and plain in (None, self.rows[name].plain)]

    def best_of_ours(self, plain: bool) -> str:
        """The row of ours that is fastest over the whole mix: one row for all categories, as a user would run it."""
        scored = {name: score(self.speed[name], self.categories) for name in self.names(True, plain)}
        found = {name: value for name, value in scored.items() if value is not None}
        if not found:
            raise _MissingError(f"no {'plain' if plain else 'speculative'} row of foredraft ran all categories")
        return max(found, key=lambda name: found[name])

    def plain_vs_peer(self) -> float:
        ours = self.best_of_ours(plain=True)
        against = {
            name: statistics.median(found)
            for name in self.names(False, plain=True)
            if (found := ratios(self.speed[ours], self.speed[name]))
        }
        if not against:
            raise _MissingError("no peer ran")
        best = min(against, key=lambda name: against[name])
        self.out.behind["plain_vs_best_peer"] = {"ours": ours, "peer": best, "all": against}
        return against[best]

    def speculative_vs_peer(self) -> dict[str, float | None]:
        ours = self.best_of_ours(plain=False)
        values: dict[str, float | None] = {}
        behind = {}
        for category in self.categories:
            against = {
                name: statistics.median(found)
                for name in self.names(False)
                if (found := ratios(self.speed[ours], self.speed[name], category))
            }
            if not against:
                raise _MissingError(f"no peer ran {category}")
            best = min(against, key=lambda name: against[name])
            values[category], behind[category] = against[best], best
        values["geomean"] = geomean([value for value in values.values() if value is not None])
        self.out.behind["speculative_vs_best_peer"] = {"ours": ours, "peer": behind}
        return values

    def worst_category(self) -> float:
        ours = self.best_of_ours(plain=False)
        own = self.speed.get(self.rows[ours].baseline)
        if own is None:
            raise _MissingError("own plain decoding at the same precision was not run")
        by_category = {
            category: statistics.median(ratios(self.speed[ours], own, category)) for category in self.categories
        }
        worst = min(by_category, key=lambda category: by_category[category])
        self.out.behind["worst_category_vs_plain"] = {"ours": ours, "category": worst, "all": by_category}
        return by_category[worst]

    def share(self, traffic: Traffic | None, bandwidth: float | None) -> float:
        if traffic is None or bandwidth is None:
            raise _MissingError("bandwidth was not measured")
        ours = self.best_of_ours(plain=True)
        shares = ceiling_shares(self.cells, self.rows[ours], traffic, bandwidth)
        self.out.behind["share_of_bandwidth"] = {"ours": ours, "bytes_a_second": bandwidth}
        return statistics.median(shares)

    def cost_ratio(self) -> dict[str, float | None]:
        costs = {name: found for name, found in pass_costs(self.cells).items() if name in self.rows}
        ours = {name: found for name, found in costs.items() if self.rows[name].ours and {1, 8} <= set(found)}
        if not ours:
            raise _MissingError("the cost of a pass was not measured")
        packed = {name: found for name, found in ours.items() if self.rows[name].activations != "bfloat16"}
        chosen = {"int4": min(packed, key=lambda name: packed[name][1], default=None)}
        chosen["bf16"] = next((name for name in ours if name not in packed), None)
        self.out.behind["cost8_over_cost1"] = chosen
        values = {key: None if name is None else ours[name][8] / ours[name][1] for key, name in chosen.items()}
        for key in (key for key, value in values.items() if value is None):
            self.out.reasons[f"cost8_over_cost1.{key}"] = "not measured"
        return values

    def batch_vs_vllm(self) -> dict[str, float | None]:
        table = {name: found for name, found in rates(self.cells, "batch").items() if name in self.rows}
        values: dict[str, float | None] = {"8": None, "32": None}
        for size in values:
            ours = self._fastest(table, size, lambda row: row.ours)
            theirs = self._fastest(table, size, lambda row: row.engine == "vllm")
            if ours is None or theirs is None:
                self.out.reasons[f"batch_vs_vllm.{size}"] = "vLLM did not run" if theirs is None else "not measured"
                continue
            values[size] = statistics.median(ratios(table[ours], table[theirs], size))
            self.out.behind.setdefault("batch_vs_vllm", {})[size] = {"ours": ours, "peer": theirs}
        if all(value is None for value in values.values()):
            raise _MissingError("vLLM or foredraft did not run in batches")
        return values

    def _fastest(self, table: dict[str, dict[Pair, float]], group: str, keep: Callable[[Row], bool]) -> str | None:
        found = {
            name: statistics.median(values)
            for name in table
            if keep(self.rows[name]) and (values := group_rates(table[name], group))
        }
        return max(found, key=lambda name: found[name]) if found else None


def ceiling_shares(cells: Sequence[Cell], row: Row, traffic: Traffic, bandwidth: float) -> list[float]:
    """Rate over ceiling, cell by cell, of a plain row decoding alone.

    A cell that says how fast memory was in its own run is held against that; ``bandwidth`` serves the others.
    """
    table = rates(cells, "speed").get(row.name, {})
    found = {
        (cell["group"], cell["prompts"][0], cell["repeat"]): (
            traffic.step_bytes(row.engine, row.activations, cell["context"] + cell["written"] / 2),
            cell.get("bandwidth") or bandwidth,
        )
        for cell in cells
        if cell["part"] == "speed" and cell["row"] == row.name and "written" in cell
    }
    return [value * found[key][0] / found[key][1] for key, value in table.items()]
