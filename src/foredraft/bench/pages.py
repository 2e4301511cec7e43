"""``docs/benchmarks.md`` and one web page a results file, from what is kept under ``benchmarks/results``."""

from __future__ import annotations

import json
from collections import Counter
from html import escape
from pathlib import Path
from typing import Any

from foredraft.bench.plots import PICTURES, png, svg
from foredraft.bench.tables import NONE, Table, View, tables
from foredraft.bench.workloads import prompts
from foredraft.files import replace_text
from foredraft.lab.report_style import CSS
from foredraft.machine import vectors

INTRO = (
    "foredraft beside the engines that a user would pick instead: the same weights, the same token ids, the same "
    "number of threads, in one run. Written by `foredraft bench`; nothing here is typed by hand."
)
PROTOCOL = (
    "Every engine runs in a process and an environment of its own. All are loaded, one computes at a time, and every "
    "prompt goes to all rows in turn (A B C A B C …), beginning with another row each time.",
    "Each row decodes a prompt that is not measured first. Before every prompt engines forget what earlier ones taught "
    "them; what remembering would gain is a table of its own.",
    "Answers end where the model ends them, so their lengths differ between engines whose numbers differ; batches go "
    "on past the end so that they stay full. Answers with fewer than eight tokens after the first are left out.",
    "A ratio is taken prompt by prompt and its median given. A row that is much slower than the others rests in later "
    "blocks, so it has fewer prompts.",
    "Precision: the weights are one GGUF. foredraft, llama.cpp and OpenVINO read it; transformers and vLLM get it "
    "dequantised and rounded to bfloat16, so that they read about four times the bytes. llama.cpp rounds what enters a "
    "product to 8 bits and OpenVINO may do so; the row of foredraft with int8 activations is the one to compare with "
    "them, the float32 row is the one without any rounding.",
)


def write_pages(folder: Path) -> None:
    """Renders every ``speed*.json`` that is kept: a page beside it, and the documentation from all of them."""
    kept = folder / "benchmarks" / "results"
    files = sorted(kept.glob("speed*.json"), key=lambda path: (len(path.stem), path.stem))
    sections = []
    for path in files:
        view = View.of(json.loads(path.read_text("utf-8")))
        replace_text(path.with_suffix(".html"), html(view))
        sections.append(_markdown(view, folder / "docs" / "img", path.stem))
    if sections:
        replace_text(folder / "docs" / "benchmarks.md", "\n".join(["# Benchmarks", INTRO, "", *sections, _reading()]))


def findings(view: View) -> list[str]:
    """The summary in sentences, bad news included."""
    summary, behind, reasons = (view.data[name] for name in ("summary", "summary_behind", "summary_reasons"))
    lines = []
    if (plain := summary["plain_vs_best_peer"]) is not None:
        found = behind["plain_vs_best_peer"]
        lines.append(f"Plain decoding: {plain:.2f} times the fastest peer ({found['ours']} against {found['peer']}).")
    if (speculative := summary["speculative_vs_best_peer"]) is not None:
        parts = [f"{kind} {value:.2f}" for kind, value in speculative.items() if kind != "geomean" and value]
        lines.append(
            f"Speculative decoding ({behind['speculative_vs_best_peer']['ours']}) against the best row of any peer, "
            f"plain or speculative, in each category: {speculative['geomean']:.2f} times as geometric mean; "
            f"{', '.join(parts)}."
        )
    if (worst := summary["worst_category_vs_plain"]) is not None:
        lines.append(
            f"Worst category against own plain decoding: {worst:.2f} ({behind['worst_category_vs_plain']['category']})."
        )
    if (share := summary["share_of_bandwidth"]) is not None:
        lines.append(
            f"Share of what memory allows: {share:.0%} of {view.bandwidth or 0:.3g} bytes a second "
            f"({behind['share_of_bandwidth']['ours']})."
        )
    for key, what in (
        ("cost8_over_cost1", "Cost of a pass of 8 rows over one of 1 row"),
        ("batch_vs_vllm", "Throughput against vLLM's CPU build, by requests together"),
    ):
        if (found := summary[key]) is not None:
            values = [f"{name} {NONE if value is None else format(value, '.2f')}" for name, value in found.items()]
            lines.append(f"{what}: {', '.join(values)}.")
    if (overhead := summary["overhead_share"]) is not None:
        lines.append(f"Time of a step outside the models' passes: {overhead:.1%} (k = 4, lookup, greedy).")
    return lines + [f"`{key}`: not measured: {reason}." for key, reason in reasons.items()]


def noise(view: View) -> str:
    """How quiet the machine was while cells were measured."""
    others = [cell["other_cores"] for cell in view.cells if cell.get("other_cores") is not None]
    if not others:
        return "How busy the machine was otherwise was not measured."
    busy = sum(value > 0.2 for value in others)
    return (
        f"In {busy} of {len(others)} cells something other than the measured engine used more than a fifth of a "
        "processor core on average."
    )


def _markdown(view: View, images: Path, stem: str) -> str:
    own = stem.removeprefix("speed").removeprefix("-")  # a further run of the same target has a name of its own, too
    lines = [f"## {own or view.data['target']}", *(f"- {line}" for line in findings(view)), "", _where(view), ""]
    for picture in PICTURES:
        name = f"{picture.name}-{own}" if own else picture.name
        images.mkdir(parents=True, exist_ok=True)
        if png(picture, view, images / f"{name}.png"):
            lines += [f"![{picture.caption}](img/{name}.png)", ""]
    for table in tables(view):
        lines += [_markdown_table(table), ""]
    return "\n".join(lines)


def _markdown_table(table: Table) -> str:
    lines = [f"### {table.title}", *([table.note, ""] if table.note else [])]
    lines += [f"| {' | '.join(table.head)} |", "|---" * len(table.head) + "|"]
    lines += [f"| {' | '.join(cell.replace('|', '/') for cell in row)} |" for row in table.rows]
    return "\n".join(lines)


def _where(view: View) -> str:
    origin = view.data["provenance"]
    machine = origin["machine"]
    runs = view.data["runs"]
    dates = sorted({run["date"][:10] for run in runs}) or [origin["date"][:10]]
    threads = ", ".join(sorted({str(run["threads"]) for run in runs}))
    return (
        f"Measured {' and '.join(dates)} in {len(runs)} window{'s' if len(runs) != 1 else ''} on {machine['cores']} "
        f"cores of {machine['cpu']} ({vectors(machine['cpu_flags'])}), {threads} threads for every engine, "
        f"{len(view.cells)} cells. {noise(view)}"
    )


def _reading() -> str:
    sources = Counter(f"{prompt.category}: {_short(prompt.source)}, {prompt.licence}" for prompt in prompts())
    return "\n".join(
        [
            "## How it was measured",
            *(f"- {line}" for line in PROTOCOL),
            "",
            "## Prompts",
            *(f"- {count} × {source}" for source, count in sources.items()),
            "",
        ]
    )


def _short(source: str) -> str:
    return source.split(" (")[0].split(" question")[0]


def html(view: View) -> str:
    """One self-contained page."""
    title = f"foredraft bench: {escape(view.data['target'])}"
    figures = [
        f'<figure><div class="scroll">{drawn}</div><figcaption>{picture.caption}</figcaption></figure>'
        for picture in PICTURES
        if (drawn := svg(picture, view)) is not None
    ]
    parts = [
        f"<h1>{title}</h1><ul class='lead'>{''.join(f'<li>{_code(line)}</li>' for line in findings(view))}</ul>",
        f"<p>{escape(_where(view))}</p>",
        *figures,
        *(_html_table(table) for table in tables(view)),
        "<h2>How it was measured</h2><ul>" + "".join(f"<li>{escape(line)}</li>" for line in PROTOCOL) + "</ul>",
        _html_provenance(view.data),
    ]
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        '<meta name="color-scheme" content="light dark">'
        f"<title>{title}</title><style>{CSS}</style></head><body><main>{''.join(parts)}</main></body></html>\n"
    )


def _code(text: str) -> str:
    pieces = escape(text).split("`")
    return "".join(f"<code>{piece}</code>" if n % 2 else piece for n, piece in enumerate(pieces))


def _html_table(table: Table) -> str:
    head = "".join(f'<th scope="col">{escape(cell)}</th>' for cell in table.head)
    body = "".join(
        f'<tr><th scope="row">{escape(row[0])}</th>{"".join(f"<td>{escape(cell)}</td>" for cell in row[1:])}</tr>'
        for row in table.rows
    )
    return (
        f'<h2>{escape(table.title)}</h2><p>{escape(table.note)}</p><div class="scroll" tabindex="0" role="region" '
        f'aria-label="{escape(table.title)}"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'
    )


def _html_provenance(data: dict[str, Any]) -> str:
    origin = data["provenance"]
    machine = origin["machine"]
    facts = {
        "command": origin["command"],
        "date": origin["date"],
        "commit": f"{origin['commit']}{' (with local changes)' if origin['dirty'] else ''}",
        "processor": f"{machine['cpu']} ({', '.join(machine['cpu_flags'])})",
        "versions": ", ".join(f"{name} {version}" for name, version in machine["versions"].items()),
        "speed of memory": f"{(data['bandwidth'] or 0) / 1e9:.1f} GB/s",
        "bytes of a step": f"{data['traffic']['packed'] / 1e6:.1f} MB packed, "
        f"{2 * data['traffic']['numbers'] / 1e6:.1f} MB in bfloat16",
    }
    items = "".join(f"<dt>{name}</dt><dd>{escape(str(value))}</dd>" for name, value in facts.items())
    return f"<h2>Where these figures come from</h2><dl>{items}</dl>"
