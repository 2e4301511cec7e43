"""The study as one web page: no script, nothing fetched, light and dark, tables that scroll on a phone."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

from foredraft.lab import report_prose as prose
from foredraft.lab import seed_figures as seed
from foredraft.lab.plots import PICTURES, svg
from foredraft.lab.report_style import CSS
from foredraft.lab.schema import Article, Interval

LAW_NAMES = {
    "drafter's own law": "the drafter's own law, no samples",
    "rejection": "speculative, token-wise rejection",
    "block": "speculative, block verification",
    "coupled": "speculative, coupled sampling",
    "direct": "sampled directly from the target",
    "naive": "wrong on purpose: no residual",
}


def page(article: Article) -> str:
    """The whole page."""
    sections = [_setup(article), _table_a(article), _table_b(article), _batches(article), _table_c(article)]
    title = "Speculative decoding, measured from scratch"
    quick = '<p class="warn">Quick run: toy sizes, nothing here means anything.</p>' if article.quick else ""
    lead = "".join(f"<li>{escape(line)}</li>" for line in prose.summary(article).splitlines())
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        '<meta name="color-scheme" content="light dark">'
        f"<title>{title}</title><style>{CSS}</style></head><body><main>"
        f"<h1>{title}</h1>{quick}<ul class='lead'>{lead}</ul>{''.join(sections)}{_provenance(article)}"
        "</main></body></html>\n"
    )


def _setup(article: Article) -> str:
    rows = [
        [
            m.name,
            str(m.layers),
            f"{m.parameters:,}",
            _seed(seed.PARAMETERS[m.name]),
            f"{m.held_out_loss:.3f}",
            f"{m.train_seconds:.0f} s",
        ]
        for m in article.models
    ]
    head = ["model", "layers", "parameters", "first study", "held-out loss, nats a character", "training took"]
    return "<h2>What was measured</h2>" + prose.setup(article) + _table("The two models", head, rows)


def _table_a(article: Article) -> str:
    rows = [
        [
            str(row.k),
            _with(f"{row.mean_accepted:.2f}", row.mean_interval, "{:.2f}"),
            _seed(seed.MEAN_ACCEPTED.get(row.k), "{:.2f}"),
            f"{row.predicted:.2f}",
            _with(f"{row.all_accepted:.1%}", row.all_interval, "{:.1%}"),
            _seed(seed.ALL_ACCEPTED.get(row.k), "{:.1%}"),
            _with(f"{row.block_mean_accepted:.2f}", row.block_interval, "{:.2f}"),
        ]
        for row in article.table_a.rows
    ]
    head = ["k", "mean accepted", "first study", "from α", "all accepted", "first study", "mean, block"]
    return (
        "<h2>A. How many drafted characters are accepted?</h2>"
        + prose.table_a(article)
        + _table("Table A. Accepted characters out of k drafted, with 95 % intervals", head, rows)
        + _figure(
            article, 0, "The first ten trials as they were drawn, none picked by hand, with the text before them."
        )
    )


def _table_b(article: Article) -> str:
    rows = [
        [
            str(row.k),
            f"{row.target_ms:.3f}",
            f"{row.tokens_per_step:.2f}",
            f"{row.step_ms:.3f}",
            _seed(seed.STEP_MS.get(row.k), "{:.3f}"),
            f"{row.arithmetic:.2f}×",
            _seed(seed.SPEEDUP.get(row.k), "{:.2f}×"),
            f"{row.predicted:.2f}×",
            f"{row.engine_step_ms:.3f}",
            _with(f"{row.measured:.2f}×", row.measured_interval, "{:.2f}"),
        ]
        for row in article.table_b.rows
    ]
    head = [
        "k",
        "target call, k+1 rows",
        "tokens a step",
        "calls of a step",
        "first study",
        "calls alone",
        "first study",
        "predicted",
        "step in the engine",
        "whole generation",
    ]
    return (
        "<h2>B. Which draft length is fastest?</h2>"
        + prose.busy(article)
        + prose.table_b(article)
        + _table("Table B. Milliseconds, and speed-up over plain decoding, at batch 1", head, rows)
        + _figure(article, 1, "Speed-up against draft length; bars are 95 % intervals over rounds.")
    )


def _batches(article: Article) -> str:
    study = article.batches
    rows = [
        [
            str(row.batch),
            f"{row.plain_tokens_per_s:,.0f}",
            _with(f"{row.fixed_gain:.2f}×", row.fixed_interval, "{:.2f}"),
            _with(f"{row.auto_gain:.2f}×", row.auto_interval, "{:.2f}"),
        ]
        for row in study.rows
    ]
    caption = f"Gain against batch size, {study.rounds} rounds of {study.tokens} characters a request"
    return (
        "<h2>Does the gain survive larger batches?</h2>"
        + prose.batches(article)
        + _table(caption, ["requests at once", "plain, characters/s", f"k = {study.k}", "k = auto"], rows)
        + _figure(article, 2, "Speed-up against batch size; bars are 95 % intervals over rounds.")
    )


def _table_c(article: Article) -> str:
    rows = [
        [
            escape(LAW_NAMES[row.name]),
            f"{row.samples:,}" if row.samples else "–",
            f"{row.tv:.4f}",
            _seed(seed.TV.get(row.name), "{:.4f}"),
            "yes" if row.within_noise else "no",
        ]
        for row in article.table_c.rows
    ]
    head = ["drawn by", "samples", "TV", "first study", "within noise"]
    return (
        "<h2>C. Is it really the same law?</h2>"
        + prose.table_c(article)
        + _table("Table C. Distance from the target's law at the worst position", head, rows)
        + _figure(article, 3, "Distance from the target's law, on a logarithmic axis.")
    )


def _provenance(article: Article) -> str:
    origin = article.provenance
    machine = origin.get("machine", {})
    facts = {
        "command": origin.get("command"),
        "date": origin.get("date"),
        "commit": f"{origin.get('commit')}{' (with local changes)' if origin.get('dirty') else ''}",
        "processor": machine.get("cpu"),
        "cores": machine.get("cores"),
        "versions": ", ".join(f"{name} {version}" for name, version in machine.get("versions", {}).items()),
        "seed": article.seed,
        "load before": article.load_before,
        "seconds": ", ".join(f"{name} {value:.0f}" for name, value in article.seconds.items()),
        "corpus SHA-256": article.corpus.sha256,
    }
    items = "".join(f"<dt>{name}</dt><dd>{escape(str(value))}</dd>" for name, value in facts.items())
    return f"<h2>Where these figures come from</h2><dl>{items}</dl>"


def _table(caption: str, head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table whose cells are HTML already; the first column heads its rows."""
    top = "".join(f'<th scope="col">{escape(cell)}</th>' for cell in head)
    body = "".join(
        f'<tr><th scope="row">{row[0]}</th>{"".join(f"<td>{cell}</td>" for cell in row[1:])}</tr>' for row in rows
    )
    return (
        f'<div class="scroll" tabindex="0" role="region" aria-label="{escape(caption)}">'
        f"<table><caption>{escape(caption)}</caption><thead><tr>{top}</tr></thead><tbody>{body}</tbody></table></div>"
    )


def _figure(article: Article, number: int, caption: str) -> str:
    picture = svg(PICTURES[number], article)
    return f'<figure><div class="scroll">{picture}</div><figcaption>{caption}</figcaption></figure>'


def _with(value: str, interval: Interval, form: str) -> str:
    return f"{value} <small>{form.format(interval[0])}–{form.format(interval[1])}</small>"


def _seed(figure: float | str | None, form: str = "{}") -> str:
    return f'<span class="seed">{"–" if figure is None else form.format(figure)}</span>'
