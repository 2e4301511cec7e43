"""The tables of the report, once, for the web page and for Markdown alike."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from foredraft.bench.ceiling import Traffic
from foredraft.bench.figures import (
    Pair,
    Spread,
    acceptance,
    geomean,
    group_rates,
    groups,
    overall_rate,
    pass_costs,
    rates,
    ratios,
)
from foredraft.bench.plan import PASS_ROWS
from foredraft.bench.rows import Row
from foredraft.bench.store import Cell
from foredraft.bench.summary import ceiling_shares

NONE = "–"


@dataclass(frozen=True, slots=True)
class Table:
    """One table: title, what it says in a sentence or two, head and cells (plain text)."""

    title: str
    note: str
    head: list[str]
    rows: list[list[str]]


@dataclass(frozen=True, slots=True)
class View:
    """A results file, ready to be looked at."""

    data: dict[str, Any]
    rows: dict[str, Row]
    cells: list[Cell]
    traffic: Traffic
    bandwidth: float | None

    @classmethod
    def of(cls, data: dict[str, Any]) -> View:
        rows = {
            entry["name"]: Row(
                entry["name"],
                entry["engine"],
                entry["mode"],
                entry["weights"],
                entry["activations"],
                entry["engine"],
                "",
                batches=entry["batches"],
                parts=tuple(entry["parts"]),
            )
            for entry in data["rows"]
        }
        cells = [cell for cell in data["cells"] if cell["row"] in rows]
        return cls(data, rows, cells, Traffic(**data["traffic"]), data["bandwidth"])

    def rates(self, part: str) -> dict[str, dict[Pair, float]]:
        """Measured rows, in the order of the rows."""
        found = rates(self.cells, part)
        return {name: found[name] for name in self.rows if name in found}


def tables(view: View) -> list[Table]:
    """All that have something to show."""
    made = [
        _speed(view),
        _gains(view),
        _alone(view),
        _passes(view),
        _points(view, "batch", "Requests together", "tokens a second of all requests, reading the prompts included"),
        _points(view, "context", "Length of the context", "tokens a second after the first token, at batch 1"),
        _points(view, "sampled", "Sampling at temperature 1", "tokens a second after the first token, at batch 1"),
        _warm(view),
        _engines(view),
        _absent(view),
    ]
    return [table for table in made if table.rows]


def _speed(view: View) -> Table:
    """Tokens a second by category."""
    table = view.rates("speed")
    kinds = groups(table)
    rows = [
        [name, *(_spread(group_rates(found, kind), "{:.0f}") for kind in kinds), _geomean(found, kinds)]
        for name, found in table.items()
    ]
    note = (
        "Tokens a second after the first token, greedy, one request at a time: median over prompts (lowest–highest). "
        "The last column is the geometric mean of the medians."
    )
    return Table("Speed by kind of text", note, ["row", *kinds, "all"], rows)


def _gains(view: View) -> Table:
    """Speculation against the same engine's plain decoding."""
    table = view.rates("speed")
    kinds = groups(table)
    rows = []
    for name, found in table.items():
        own = table.get(view.rows[name].baseline)
        if own is not None and not view.rows[name].plain:
            cells = [_spread(ratios(found, own, kind), "{:.2f}") for kind in kinds]
            medians = [statistics.median(r) for kind in kinds if (r := ratios(found, own, kind))]
            mean = geomean(medians)
            rows.append([name, *cells, NONE if mean is None else f"{mean:.2f}"])
    note = "Ratio to the same engine's plain decoding of the same prompt, pair by pair: median (lowest–highest)."
    return Table("What speculation gains", note, ["row", *kinds, "all"], rows)


def _alone(view: View) -> Table:
    """Identity, acceptance, first token, memory and ceiling of each row."""
    table, accepted = view.rates("speed"), acceptance(view.cells)
    same = view.data["identity"]
    rows = []
    for name in table:
        cells = [c for c in view.cells if c["row"] == name and c["part"] == "speed"]
        ttft = Spread.of(c["ttft"] for c in cells if c.get("ttft") is not None)
        overall = Spread.of(value for c in cells if (value := overall_rate(c)) is not None)
        entry = accepted.get(name, {})
        rows.append(
            [
                name,
                _number(entry.get("alpha"), "{:.2f}"),
                _number(entry.get("tau"), "{:.2f}"),
                _same(same.get(name)),
                NONE if ttft is None else f"{1e3 * ttft.median:.0f}",
                NONE if overall is None else f"{overall.median:.0f}",
                *_ceiling(view, name, cells),
                _memory(view, name),
            ]
        )
    note = (
        "α: accepted drafted tokens over drafted ones; τ: tokens of a step that drafted, the target's own included; "
        "both only where the engine tells. Identical: greedy texts that equal the engine's own plain ones, of all "
        "texts compared, and the earliest place where one differs. Ceiling: tokens a second if a step did nothing but "
        "read weights and cache at the measured speed of memory; the share is given for plain decoding. Memory: peak "
        "of the engine's process, which all rows of an engine share, except vLLM's."
    )
    head = [
        *("row", "α", "τ", "identical", "first token, ms", "tokens/s with prompt", "ceiling, tokens/s"),
        *("share of ceiling", "peak memory, MB"),
    ]
    return Table("Acceptance, identity, first token, ceiling, memory", note, head, rows)


def _ceiling(view: View, name: str, cells: Sequence[Cell]) -> tuple[str, str]:
    if view.bandwidth is None or not cells:
        return NONE, NONE
    row = view.rows[name]
    context = statistics.median(c["context"] + c["written"] / 2 for c in cells)
    ceiling = view.bandwidth / view.traffic.step_bytes(row.engine, row.activations, context)
    shares = ceiling_shares(view.cells, row, view.traffic, view.bandwidth) if row.plain else []
    return f"{ceiling:.0f}", f"{statistics.median(shares):.0%}" if shares else NONE


def _memory(view: View, name: str) -> str:
    found = [c["peak_memory"] for c in view.cells if c["row"] == name and c.get("peak_memory")]
    return f"{max(found) / 1e6:.0f}" if found else NONE


def _same(entry: dict[str, Any] | None) -> str:
    if entry is None:
        return NONE
    place = entry["first_difference"]
    return f"{entry['identical']} of {entry['texts']}" + ("" if place is None else f" (token {place + 1})")


def _passes(view: View) -> Table:
    """Milliseconds of a target pass against its rows."""
    rows = []
    for name, costs in pass_costs(view.cells).items():
        if {1, 8} <= set(costs):
            cells = [_number(costs.get(n), "{:.1f}") for n in PASS_ROWS]
            rows.append([name, *cells, f"{costs[8] / costs[1]:.2f}"])
    refused = sorted({c["row"] for c in view.cells if c.get("refused")})
    note = "Milliseconds of one pass of the target with 256 tokens in the cache, median of interleaved rounds."
    if refused:
        note += f" No call for it: {', '.join(refused)}."
    head = ["row", *(f"{n} row{'s' if n > 1 else ''}" for n in PASS_ROWS), "8 rows / 1 row"]
    return Table("What verifying k+1 tokens costs", note, head, rows)


def _points(view: View, part: str, title: str, what: str) -> Table:
    """Rates at the points of a part, with the gain over own plain decoding."""
    table = view.rates(part)
    kinds = sorted(groups(table), key=lambda kind: int(kind) if kind.isdigit() else 0)
    rows = []
    for name, found in table.items():
        own = table.get(view.rows[name].baseline, {})
        cells = []
        for kind in kinds:
            value = _spread(group_rates(found, kind), "{:.0f}")
            gain = [] if view.rows[name].plain else ratios(found, own, kind)
            cells.append(value + (f", {statistics.median(gain):.2f}x" if gain else ""))
        rows.append([name, *cells])
    note = f"{what[:1].upper()}{what[1:]}; behind the comma the ratio to own plain decoding."
    return Table(title, note, ["row", *kinds], rows)


def _warm(view: View) -> Table:
    """The second answer to the same prompt."""
    warm, cold = view.rates("warm"), view.rates("speed")
    rows = []
    for name, found in warm.items():
        again = ratios({(g, p, 0): v for (g, p, _), v in found.items()}, cold.get(name, {}))
        rows.append([name, _spread(list(found.values()), "{:.0f}"), _spread(again, "{:.2f}")])
    note = (
        "The same prompt a second time, nothing forgotten in between. Everywhere else each prompt meets an engine that "
        "has forgotten what it wrote before: prefix caches are off or cleared, pools of earlier answers are empty."
    )
    return Table("Warm", note, ["row", "tokens a second", "ratio to cold"], rows)


def _engines(view: View) -> Table:
    rows = [
        [entry["name"], entry["weights"], entry["activations"], entry["note"], entry["date"][:10]]
        for entry in view.data["rows"]
        if entry["ran"]
    ]
    return Table("What ran", "", ["row", "weights", "activations", "version", "date"], rows)


def _absent(view: View) -> Table:
    rows = [[e["name"], f"not run: {e['note']}", e["date"][:10]] for e in view.data["rows"] if not e["ran"]]
    return Table("What did not run", "", ["row", "why", "date"], rows)


def _spread(values: Sequence[float], form: str) -> str:
    spread = Spread.of(values)
    if spread is None:
        return NONE
    middle = form.format(spread.median)
    return middle if spread.n == 1 else f"{middle} ({form.format(spread.low)}–{form.format(spread.high)})"


def _geomean(found: dict[Pair, float], kinds: Sequence[str]) -> str:
    medians = [statistics.median(values) for kind in kinds if (values := group_rates(found, kind))]
    mean = geomean(medians)
    return NONE if mean is None or len(medians) < len(kinds) else f"{mean:.0f}"


def _number(value: float | None, form: str) -> str:
    return NONE if value is None else form.format(value)
