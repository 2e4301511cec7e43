"""How every study draws (once by matplotlib, as SVG for pages and PNG for documents), and the founding study's plots.

In the SVG every colour becomes a CSS variable, so that one picture serves a light and a dark page; text stays text.
"""

from __future__ import annotations

import io
import re
import unicodedata
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.font_manager import get_font_names
from matplotlib.patches import Rectangle

from foredraft.lab import seed_figures
from foredraft.lab.schema import Article

PALETTE = {
    "ink": "#1d2430",
    "faint": "#8a93a3",
    "blue": "#2563b0",
    "orange": "#c2570c",
    "green": "#1f8a4c",
    "red": "#b3261e",
    "grid": "#dfe3ea",
}
"""Readable on white; the page gives its own values to the variables of the same names when it is dark."""

STYLE: dict[Any, Any] = {
    "svg.fonttype": "none",
    "font.size": 11,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": PALETTE["faint"],
    "axes.labelcolor": PALETTE["ink"],
    "axes.titlesize": 12,
    "axes.titlecolor": PALETTE["ink"],
    "axes.titlelocation": "left",
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": PALETTE["grid"],
    "text.color": PALETTE["ink"],
    "xtick.color": PALETTE["ink"],
    "ytick.color": PALETTE["ink"],
    "legend.frameon": False,
    "legend.fontsize": 10,
}
CELL_FONTS = ("DejaVu Sans Mono", "NanumGothicCoding", "NanumGothic", "Noto Sans CJK KR", "Noto Sans Mono CJK KR")
"""For characters in cells, Korean included; those that are installed are used."""


@dataclass(frozen=True, slots=True)
class Picture:
    """One picture: file stem, the same content in words, and what draws it from a study's result."""

    name: str
    alt: str
    draw: Callable[[Any], Figure]


def svg(picture: Picture, study: Any) -> str:
    """An inline ``<svg>`` with a title for screen readers."""
    with mpl.rc_context({**STYLE, "svg.hashsalt": picture.name}):
        buffer = io.StringIO()
        picture.draw(study).savefig(buffer, format="svg", transparent=True, metadata={"Date": None})
    text = buffer.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    text = re.sub(r'(id="|url\(#|href="#)', rf"\g<1>{picture.name}-", text)  # several pictures share one page
    for name, colour in PALETTE.items():
        text = re.sub(colour, f"var(--{name})", text, flags=re.IGNORECASE)
    return text.replace("<svg", f'<svg role="img" aria-label="{picture.alt}"', 1)


def png(picture: Picture, study: Any, path: Path) -> None:
    """A PNG on white, 110 dots an inch."""
    with mpl.rc_context(STYLE):
        picture.draw(study).savefig(path, format="png", dpi=110, facecolor="white")


def axes_of(width: float, height: float) -> tuple[Figure, Axes]:
    figure = Figure(figsize=(width, height), layout="constrained")
    return figure, figure.add_subplot()


def draw_strips(article: Article) -> Figure:
    """Each trial is a row: context, then one cell a drafted character."""
    shown = article.strips
    k = max(len(strip.drafted) for strip in shown)
    tail = 30
    figure = Figure(figsize=(7.2, 0.36 * len(shown) + 0.9))
    axes = figure.add_axes((0.01, 0.01, 0.98, 0.98))
    axes.set_axis_off()
    axes.set_xlim(-tail * 0.36 - 0.3, k + 1.4)
    axes.set_ylim(len(shown) + 0.1, -1.5)
    font: dict[str, Any] = {"family": _cell_fonts(), "fontsize": 11, "va": "center"}
    for y, strip in enumerate(shown):
        before = _visible(strip.context.replace("\n", " "))[-tail:]
        axes.text(-0.25, y, before, ha="right", color=PALETTE["faint"], **font)
        for x, character in enumerate(strip.drafted):
            state = "accepted" if x < strip.accepted else "rejected" if x == strip.accepted else "discarded"
            _cell(axes, x, y, _visible(character), state)
        _cell(axes, strip.accepted if strip.accepted == k else k + 0.3, y, _visible(strip.next), "next")
    labels = {"accepted": "accepted", "rejected": "rejected", "discarded": "never judged", "next": "the target's own"}
    for number, (state, label) in enumerate(labels.items()):
        left = -tail * 0.36 + 4.9 * number
        _cell(axes, left, -1.05, "a", state)
        axes.text(left + 1.1, -1.05, label, va="center", fontsize=10)
    return figure


def _cell(axes: Axes, x: float, y: float, character: str, state: str) -> None:
    """States differ in colour and in form: filled, struck out, dashed, framed."""
    colour = {"accepted": "green", "rejected": "red", "discarded": "faint", "next": "blue"}[state]
    style: dict[str, Any] = {"linestyle": "--" if state == "discarded" else "-", "linewidth": 1.2}
    fill = {"accepted": 0.22, "rejected": 0.15}.get(state, 0.0)
    axes.add_patch(Rectangle((x + 0.05, y - 0.42), 0.9, 0.84, facecolor=PALETTE[colour], alpha=fill, linewidth=0))
    axes.add_patch(Rectangle((x + 0.05, y - 0.42), 0.9, 0.84, fill=False, edgecolor=PALETTE[colour], **style))
    if state == "rejected":
        axes.plot([x + 0.15, x + 0.85], [y + 0.32, y - 0.32], color=PALETTE["red"], linewidth=1.2)
    ink = "faint" if state == "discarded" else "ink"
    axes.text(x + 0.5, y, character, ha="center", va="center", family=_cell_fonts(), fontsize=11, color=PALETTE[ink])


@cache
def _cell_fonts() -> list[str]:
    installed = set(get_font_names())
    return [name for name in CELL_FONTS if name in installed] + ["monospace"]


def _visible(text: str) -> str:
    if len(text) == 1:
        text = _jamo(text).replace(" ", "␣")
    return text.replace("\n", "↵").replace("$", r"\$")


def _jamo(character: str) -> str:
    """A conjoining Korean letter as the letter that stands alone, which fonts can draw; others unchanged."""
    syllable_part = re.match(r"HANGUL (CHOSEONG|JUNGSEONG|JONGSEONG) (.+)", unicodedata.name(character, ""))
    return unicodedata.lookup(f"HANGUL LETTER {syllable_part[2]}") if syllable_part else character


def draw_speed(article: Article) -> Figure:
    """Speed-up against draft length: predicted, from calls alone, and measured end to end; the seed's beside them."""
    figure, axes = axes_of(6.6, 4.4)
    rows = article.table_b.rows
    ks = [row.k for row in rows]
    errors = [
        [row.measured - row.measured_interval[0] for row in rows],
        [row.measured_interval[1] - row.measured for row in rows],
    ]
    axes.axhline(1, color=PALETTE["ink"], linewidth=1)
    axes.plot(ks, [row.predicted for row in rows], "--", color=PALETTE["faint"], label="predicted from α and c")
    axes.plot(ks, [row.arithmetic for row in rows], "s-", color=PALETTE["orange"], label="calls alone, measured")
    axes.errorbar(
        ks, [row.measured for row in rows], errors, fmt="o-", color=PALETTE["blue"], capsize=3, label="whole generation"
    )
    axes.plot(
        list(seed_figures.SPEEDUP),
        list(seed_figures.SPEEDUP.values()),
        "^:",
        color=PALETTE["green"],
        label="first study (calls alone)",
    )
    axes.set_xlabel("draft length k")
    axes.set_ylabel("speed-up over plain decoding")
    axes.set_ylim(bottom=0)
    figure.legend(loc="outside lower center", ncols=2)
    return figure


def draw_batches(article: Article) -> Figure:
    """Gain against batch size."""
    figure, axes = axes_of(6.6, 3.8)
    rows = article.batches.rows
    sizes = [row.batch for row in rows]
    for name, mark, colour, label in (
        ("fixed", "o-", "blue", f"k = {article.batches.k}"),
        ("auto", "s--", "orange", "k = auto"),
    ):
        gains = [getattr(row, f"{name}_gain") for row in rows]
        bands = [getattr(row, f"{name}_interval") for row in rows]
        errors = [
            [g - b[0] for g, b in zip(gains, bands, strict=True)],
            [b[1] - g for g, b in zip(gains, bands, strict=True)],
        ]
        axes.errorbar(sizes, gains, errors, fmt=mark, color=PALETTE[colour], capsize=3, label=label)
    axes.axhline(1, color=PALETTE["ink"], linewidth=1)
    axes.set_xscale("log", base=2)
    axes.set_xticks(sizes, [str(size) for size in sizes])
    axes.set_xlabel("requests at once")
    axes.set_ylabel("speed-up over plain decoding")
    axes.set_ylim(bottom=0)
    figure.legend(loc="outside lower center", ncols=2)
    return figure


def draw_laws(article: Article) -> Figure:
    """TV of every way of drawing, on a logarithmic axis, with the band of pure sampling noise."""
    figure, axes = axes_of(6.6, 3.3)
    table = article.table_c
    names = {"naive": "wrong on purpose", "direct": "direct sampling"}
    rows = list(reversed(table.rows))
    colours = {"drafter's own law": "faint", "direct": "ink", "naive": "red"}
    axes.barh(
        [names.get(row.name, row.name) for row in rows],
        [row.tv for row in rows],
        color=[PALETTE[colours.get(row.name, "blue")] for row in rows],
        height=0.6,
    )
    axes.axvspan(*table.noise_band, color=PALETTE["green"], alpha=0.25, linewidth=0, label="95 % of true draws")
    for y, row in enumerate(rows):
        axes.text(row.tv * 1.08, y, f"{row.tv:.4f}", va="center", fontsize=10)
    axes.set_xscale("log")
    axes.set_xlim(min(row.tv for row in rows) / 2, max(row.tv for row in rows) * 3)
    axes.set_xlabel("total variation from the target's law")
    axes.grid(axis="y", visible=False)
    figure.legend(loc="outside lower center")
    return figure


PICTURES = (
    Picture(
        "article-strips",
        "Trials as rows of characters: accepted ones filled, the rejected one struck out, later ones dashed.",
        draw_strips,
    ),
    Picture(
        "article-speed",
        "Line chart of speed-up against draft length: predicted, from calls, and measured; numbers in table B.",
        draw_speed,
    ),
    Picture(
        "article-batches",
        "Line chart of speed-up against batch size for a fixed and an adaptive draft length; numbers are in the table.",
        draw_batches,
    ),
    Picture(
        "article-laws",
        "Bar chart of total variation from the target's law for each way of drawing; numbers are in table C.",
        draw_laws,
    ),
)
