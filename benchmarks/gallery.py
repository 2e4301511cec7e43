"""Sums up what ``benchmarks/drafters.py`` measured, and writes docs/gallery.md and its picture."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

DOCS = Path(__file__).parent.parent / "docs"
RULES = {
    "exact": "exact (greedy)",
    "rejection": "rejection, T = 1",
    "block": "block, T = 1",
    "coupled": "coupled (seeded), T = 1",
}
ALARM = 1e-3
"""A law test below this, divided by the number of tests, is a fault."""


def summary(data: dict[str, Any]) -> dict[str, Any]:
    """Pooled figures by target, drafter and rule; losses of combined drafters; and whatever must not be."""
    rows: dict[str, dict[str, dict[str, Any]]] = {}
    for target, drafters in data["drafters"].items():
        for drafter in ["plain", *drafters, "control"]:
            for rule in RULES:
                cells = _cells(data, target, rule, drafter)
                if cells:
                    rows.setdefault(target, {}).setdefault(drafter, {})[rule] = _pooled(list(cells.values()))
    tests = [
        r["law_p"] for by in rows.values() for d, e in by.items() if d != "control" for r in e.values() if r["law_p"]
    ]
    faults = [
        f"{target}, {drafter}, {rule}: {problem}"
        for target, by in rows.items()
        for drafter, each in by.items()
        for rule, row in each.items()
        if (problem := _fault(drafter, row, ALARM / max(len(tests), 1)))
    ]
    return {"rows": rows, "combined_loss": losses(data), "law_tests": len(tests), "faults": faults}


def _cells(data: dict[str, Any], target: str, rule: str, drafter: str) -> dict[str, dict[str, Any]]:
    """By category and number of the prompt."""
    start = f"{target}/{rule}/"
    found = {}
    for key, cell in data["parts"].items():
        if key.startswith(start):
            category, number, name = key.removeprefix(start).split("/", 2)
            if name == drafter:
                found[f"{category}/{number}"] = cell
    return found


def _pooled(cells: Sequence[dict[str, Any]]) -> dict[str, Any]:
    row: dict[str, Any] = {"law_p": law_test([cell for cell in cells if "places" in cell])}
    refused = [cell["refused"] for cell in cells if "refused" in cell]
    if refused:
        return {**row, "refused": refused[0]}
    if "accepted" in cells[0]:
        drafted, accepted, steps = (sum(cell[key] for cell in cells) for key in ("drafted", "accepted", "steps"))
        row |= {
            "alpha": accepted / drafted if drafted else None,
            "tau": 1 + accepted / steps if steps else None,
            "cold": geometric(cell["cold"] for cell in cells),
            "warm": geometric(cell["warm"] for cell in cells),
            "k": sum(cell["k"] for cell in cells) / len(cells),
        }
    if "same" in cells[0]:
        row |= {"same": sum(cell["same"] for cell in cells), "texts": 3 * len(cells)}
    return row


def _fault(drafter: str, row: dict[str, Any], alarm: float) -> str | None:
    if drafter == "control":
        return None if row["law_p"] < ALARM else f"the law test does not see a wrong law (p = {row['law_p']:.3f})"
    if row.get("same", 0) != row.get("texts", 0):
        return f"{row['texts'] - row['same']} of {row['texts']} texts are not plain decoding's"
    if row["law_p"] is not None and row["law_p"] < alarm:
        return f"not the target's law (p = {row['law_p']:.1e})"
    return None


def losses(data: dict[str, Any]) -> dict[str, dict[str, float]]:
    """By how much each combined drafter was slower (positive) than the best of its parts and than plain decoding."""
    found: dict[str, dict[str, float]] = {}
    for target, drafters in data["drafters"].items():
        for drafter in drafters:
            own = _cells(data, target, "exact", drafter)
            if not drafter.startswith("combined:"):
                continue
            parts = [_cells(data, target, "exact", part) for part in drafter.removeprefix("combined:").split("+")]
            for place, cell in own.items():
                if all(place in part for part in parts):
                    best = max([1.0, *(part[place]["cold"] for part in parts)])
                    found.setdefault(drafter, {})[place] = 1 - cell["cold"] / best
    return found


def law_test(cells: Sequence[dict[str, Any]]) -> float | None:
    """The smaller p of two tests, twice: places uniform, surprise as large as the entropy; None if nothing is there."""
    if not cells:
        return None
    excess, variance = (sum(cell["surprise"][i] for cell in cells) for i in (0, 1))
    by_surprise = math.erfc(abs(excess) / math.sqrt(2 * variance)) if variance > 0 else 1.0
    by_place = kolmogorov([value for cell in cells for value in cell["places"]])
    return min(2 * min(by_surprise, by_place), 1.0)


def geometric(values: Iterable[float]) -> float:
    logs = [math.log(value) for value in values]
    return math.exp(sum(logs) / len(logs))


def kolmogorov(values: Sequence[float]) -> float:
    """Probability that values uniform between 0 and 1 lie at least as unevenly (Kolmogorov; Stephens 1970)."""
    n, ordered = len(values), sorted(values)
    d = max(max((i + 1) / n - value, value - i / n) for i, value in enumerate(ordered))
    x: float = (math.sqrt(n) + 0.12 + 0.11 / math.sqrt(n)) * d
    if x < 0.2:
        return 1.0
    tail = sum((1.0 if j % 2 else -1.0) * math.exp(-2 * j * j * x * x) for j in range(1, 101))
    return min(max(2 * tail, 0.0), 1.0)


# --- the page


def write(data: dict[str, Any]) -> str:
    """Writes page and picture; returns the tables."""
    found = data["summary"]
    tables = "\n\n".join(_section(data, target, found["rows"][target]) for target in found["rows"])
    picture(data, DOCS / "img" / "gallery.png")
    machine = data["provenance"]["machine"]
    settings = data["settings"]
    page = [
        "# Gallery of drafters",
        "Every drafter under every verification rule on the same prompts. Written by `make bench-drafters` from "
        "`benchmarks/results/drafters.json`; "
        f"{machine['cores']} cores of an {machine['cpu']}, {data['provenance']['date'][:10]}, one request at a time, "
        f"{settings['dtype']} with {settings['activations']} activations, {settings['tokens']} tokens a prompt.",
        "",
        "![Speed over plain decoding by drafter and rule](img/gallery.png)",
        "",
        "How to read it:",
        "",
        "- **α** (accepted of drafted) and **τ** (tokens a speculative step, the bonus token included) are of drafts "
        "of 4 tokens, so that they compare. A tree drafts 4 nodes, not 4 positions: look at its τ.",
        "- **Speed** is tokens a second over plain decoding's beside it with `k=auto`, geometric mean over the "
        "prompts: *cold* when the engine meets a prompt for the first time, *warm* the second time, when `suffix` may "
        "copy the answer of the first.",
        "- **Memory** is what the process grew by when the drafter was made and wrote a first text (its weights and "
        "cache; the target's are shared). Small drafters disappear in what a process takes in pieces.",
        "- **Law**: greedy and seeded texts, three a prompt, against plain decoding's, token for token. Under "
        "rejection and block verification p of a test: the places of written tokens in the target's law must be "
        "uniform (Kolmogorov–Smirnov) and their surprise as large as the law's entropy. "
        f"{found['law_tests']} such tests are on this page, so a few p under 0.05 are to be expected; {ALARM:g} "
        "divided by their number would be a fault. Exact enumerations of the law are in the tests "
        "([testing-tools.md](testing-tools.md)).",
        "",
        tables,
        "",
        *_losses(found["combined_loss"]),
        "What each drafter does is in [drafters.md](drafters.md), the rules are in "
        "[sampling.md](sampling.md#verification-rules), α and τ in [metrics.md](metrics.md).",
        "",
    ]
    (DOCS / "gallery.md").write_text("\n".join(page))
    return tables


def _section(data: dict[str, Any], target: str, by: dict[str, dict[str, Any]]) -> str:
    places = list(_cells(data, target, "exact", "plain"))
    lines = [f"## {target}", f"Prompts: {', '.join(place.partition('/')[0] for place in places)}."]
    for rule, title in RULES.items():
        greedy = rule in ("exact", "coupled")
        head = "same text" if greedy else "law, p"
        lines += ["", f"**Rule: {title}**", ""]
        lines += [f"| drafter | α | τ | speed, cold | warm | memory | {head} |", "|---|---|---|---|---|---|---|"]
        for drafter, each in by.items():
            if rule in each and drafter != "plain":
                lines.append(_line(data, target, drafter, each[rule], greedy))
        if by["plain"].get(rule, {}).get("law_p") is not None and not greedy:
            lines.append(f"| plain decoding | – | – | 1 | 1 | – | {by['plain'][rule]['law_p']:.2f} |")
    left = {key.split("/", 1)[1]: why for key, why in data["refused"].items() if key.startswith(f"{target}/")}
    if target == next(iter(data["drafters"])):
        left |= data.get("not_shown", {})
    if left:
        lines += ["", "Left out:", "", *(f"- `{name}`: {reason}" for name, reason in left.items())]
    return "\n".join(lines)


def _line(data: dict[str, Any], target: str, drafter: str, row: dict[str, Any], greedy: bool) -> str:
    if drafter == "control":
        shown = "<0.001" if row["law_p"] < ALARM else f"{row['law_p']:.2f}"
        return f"| control: plain decoding at T = 0.5, a wrong law | – | – | – | – | – | {shown} |"
    if "refused" in row:
        return f"| `{drafter}` | refused: {row['refused']} | | | | | |"
    memory = data["memory"].get(f"{target}/{drafter}")
    law = f"{row['same']} of {row['texts']}" if greedy else f"{row['law_p']:.2f}"
    cells = [f"`{drafter}`", _number(row["alpha"]), _number(row["tau"]), _number(row["cold"]), _number(row["warm"])]
    return "| " + " | ".join([*cells, "–" if memory is None else f"{memory / 1e6:.0f} MB", law]) + " |"


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:.2f}"


def _losses(found: dict[str, dict[str, float]]) -> list[str]:
    if not found:
        return []
    places = [place.partition("/")[0] for place in next(iter(found.values()))]
    lines = [
        "## Combined drafters against the best of their parts",
        "Slower (+) or faster (−) than the best part or plain decoding, whichever is faster on that prompt; greedy, "
        "cold. Runs of so few tokens differ by several per cent from one to the next. `tests/test_combined_regret.py` "
        "holds them to 3 % under a clock of its own.",
        "",
        f"| drafter | {' | '.join(places)} |",
        "|---" * (1 + len(places)) + "|",
    ]
    for name, by in found.items():
        lines.append(f"| `{name}` | " + " | ".join(f"{100 * loss:+.0f} %" for loss in by.values()) + " |")
    return [*lines, ""]


def picture(data: dict[str, Any], path: Path) -> None:
    """Speed over plain decoding, a bar a rule and drafter, of the first target."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    from foredraft.lab.plots import PALETTE, STYLE

    target, by = next(iter(data["summary"]["rows"].items()))
    names = [name for name, each in by.items() if any("cold" in row for row in each.values())]
    colours = (PALETTE["blue"], PALETTE["orange"], PALETTE["green"], PALETTE["faint"])
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(8.2, 1.2 + 0.5 * len(names)), layout="constrained")
        axes = figure.add_subplot()
        for number, rule in enumerate(RULES):
            places = [len(names) - 1 - i + (1.5 - number) * 0.19 for i in range(len(names))]
            widths = [by[name].get(rule, {}).get("cold", 0.0) for name in names]
            axes.barh(places, widths, 0.18, label=RULES[rule], color=colours[number])
        axes.axvline(1, color=PALETTE["ink"], linewidth=1)
        axes.set_yticks(range(len(names)), names[::-1], fontsize=9)
        axes.set_xlabel(f"speed over plain decoding, {target}, k = auto, cold")
        axes.grid(visible=False, axis="y")
        figure.legend(loc="outside upper center", ncols=4, fontsize=8)
        figure.savefig(path, format="png", dpi=100, facecolor="white", metadata={"Software": None})
