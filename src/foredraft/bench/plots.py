"""The pictures of the report, as SVG for the page and PNG for the documentation."""

from __future__ import annotations

import io
import re
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from foredraft.bench.figures import group_rates, groups, pass_costs, ratios, score
from foredraft.bench.summary import ceiling_shares
from foredraft.bench.tables import View
from foredraft.lab.plots import PALETTE, STYLE

COLOURS = ("#2563b0", "#c2570c", "#1f8a4c", "#b3261e", "#7a4fb5", "#00808a", "#a08000", "#8a93a3", "#d16ba5", "#4d4d4d")


@dataclass(frozen=True, slots=True)
class Picture:
    """One picture: file name, caption, and what draws it (None if there is nothing to draw)."""

    name: str
    caption: str
    draw: Callable[[View], Figure | None]


def svg(picture: Picture, view: View) -> str | None:
    """An inline ``<svg>``, or None."""
    with mpl.rc_context({**STYLE, "svg.hashsalt": picture.name}):
        figure = picture.draw(view)
        if figure is None:
            return None
        buffer = io.StringIO()
        figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None})
    text = buffer.getvalue()
    text = re.sub(r"<metadata>.*?</metadata>", "", text[text.index("<svg") :], flags=re.DOTALL)
    text = re.sub(r'(id="|url\(#|href="#)', rf"\g<1>{picture.name}-", text)
    for name in ("ink", "faint", "grid"):
        text = re.sub(PALETTE[name], f"var(--{name})", text, flags=re.IGNORECASE)
    return text.replace("<svg", f'<svg role="img" aria-label="{picture.caption}"', 1)


def png(picture: Picture, view: View, path: Path) -> bool:
    """Writes a PNG; False if there is nothing to draw."""
    with mpl.rc_context(STYLE):
        figure = picture.draw(view)
        if figure is None:
            return False
        figure.savefig(path, format="png", dpi=100, facecolor="white", metadata={"Software": None})
    return True


def _axes(height: float = 3.6) -> tuple[Figure, Axes]:
    figure = Figure(figsize=(8.2, height), layout="constrained")
    return figure, figure.add_subplot()


def _legend(figure: Figure) -> None:
    """Below the axes, where it hides nothing."""
    figure.legend(loc="outside lower center", ncols=3, fontsize=8)


def best_rows(view: View, part: str = "speed") -> list[str]:
    """Of every engine its plain row and its fastest speculative one, by geometric mean over the groups."""
    table = view.rates(part)
    kinds = groups(table)
    chosen = []
    for engine in dict.fromkeys(row.engine for row in view.rows.values()):
        for plain in (True, False):
            scored = {
                name: value
                for name in table
                if view.rows[name].engine == engine
                and view.rows[name].plain == plain
                and (value := score(table[name], kinds)) is not None
            }
            if scored:
                chosen.append(max(scored, key=lambda name: scored[name]))
    return chosen


def draw_categories(view: View) -> Figure | None:
    """Tokens a second by category over the fastest peer's plain decoding."""
    table, names = view.rates("speed"), best_rows(view)
    kinds = groups(table)
    peers = [name for name in names if view.rows[name].plain and not view.rows[name].ours]
    if not peers:
        return None
    base = max(peers, key=lambda name: score(table[name], kinds) or 0.0)
    figure, axes = _axes(4.4)
    width = 0.84 / len(names)
    for number, name in enumerate(names):
        heights = [statistics.median(found) if (found := ratios(table[name], table[base], k)) else 0.0 for k in kinds]
        places = [k + (number - (len(names) - 1) / 2) * width for k in range(len(kinds))]
        axes.bar(places, heights, width, label=name, color=COLOURS[number % len(COLOURS)])
    axes.set_xticks(range(len(kinds)), [kind.replace(" ", "\n") for kind in kinds], fontsize=9)
    axes.set_ylabel(f"times {base}")
    axes.grid(visible=False, axis="x")
    _legend(figure)
    return figure


def draw_passes(view: View) -> Figure | None:
    """Cost of a pass over that of one row."""
    costs = {name: found for name, found in pass_costs(view.cells).items() if 1 in found and len(found) > 1}
    if not costs:
        return None
    figure, axes = _axes(4.4)
    for number, (name, found) in enumerate(costs.items()):
        counts = sorted(found)
        axes.plot(counts, [found[n] / found[1] for n in counts], "o-", label=name, color=COLOURS[number % len(COLOURS)])
    axes.set_xscale("log", base=2)
    axes.set_xticks(counts, [str(n) for n in counts])
    axes.set_xlabel("rows of a pass")
    axes.set_ylabel("cost / cost of one row")
    axes.set_ylim(bottom=0)
    _legend(figure)
    return figure


def _draw_points(view: View, part: str, label: str) -> Figure | None:
    table, names = view.rates(part), best_rows(view, part)
    kinds = sorted((kind for kind in groups(table)), key=int)
    if not names or len(kinds) < 2:
        return None
    figure, axes = _axes(4.4)
    for number, name in enumerate(names):
        points = [(int(k), statistics.median(found)) for k in kinds if (found := group_rates(table[name], k))]
        style = "o--" if view.rows[name].plain else "o-"
        axes.plot(*zip(*points, strict=True), style, label=name, color=COLOURS[number % len(COLOURS)])
    axes.set_xscale("log", base=2)
    axes.set_xticks([int(k) for k in kinds], kinds)
    axes.set_xlabel(label)
    axes.set_ylabel("tokens a second")
    axes.set_ylim(bottom=0)
    _legend(figure)
    return figure


def draw_ceiling(view: View) -> Figure | None:
    """Share of the ceiling of every plain row."""
    if view.bandwidth is None:
        return None
    shares = {
        name: statistics.median(found)
        for name, row in view.rows.items()
        if row.plain and (found := ceiling_shares(view.cells, row, view.traffic, view.bandwidth))
    }
    if not shares:
        return None
    figure, axes = _axes(0.6 + 0.4 * len(shares))
    names = list(shares)[::-1]
    colours = [PALETTE["blue" if view.rows[name].ours else "faint"] for name in names]
    axes.barh(names, [100 * shares[name] for name in names], color=colours)
    axes.set_xlabel("share of what memory allows, %")
    axes.set_xlim(0, 100)
    axes.grid(visible=False, axis="y")
    return figure


PICTURES = (
    Picture("bench-categories", "Speed by kind of text, each engine's plain and best speculative row", draw_categories),
    Picture("bench-passes", "Cost of a pass of the target against its rows", draw_passes),
    Picture(
        "bench-batch", "Speed against requests together", lambda view: _draw_points(view, "batch", "requests together")
    ),
    Picture("bench-context", "Speed against context", lambda view: _draw_points(view, "context", "tokens of context")),
    Picture("bench-ceiling", "Plain decoding as a share of what the speed of memory allows", draw_ceiling),
)
