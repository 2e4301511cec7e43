"""The founding study as one web page."""

from __future__ import annotations

from html import escape

from foredraft.lab import report_prose as prose
from foredraft.lab import seed_figures as seed
from foredraft.lab.plots import PICTURES
from foredraft.lab.schema import Article
from foredraft.lab.sheet import busy, document, figure, origin, spread, table, took

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
    return document(
        "Speculative decoding, measured from scratch",
        prose.summary(article).splitlines(),
        "".join(sections) + _provenance(article),
        article.quick,
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
    return "<h2>What was measured</h2>" + prose.setup(article) + table("The two models", head, rows)


def _table_a(article: Article) -> str:
    rows = [
        [
            str(row.k),
            spread(f"{row.mean_accepted:.2f}", row.mean_interval, "{:.2f}"),
            _seed(seed.MEAN_ACCEPTED.get(row.k), "{:.2f}"),
            f"{row.predicted:.2f}",
            spread(f"{row.all_accepted:.1%}", row.all_interval, "{:.1%}"),
            _seed(seed.ALL_ACCEPTED.get(row.k), "{:.1%}"),
            spread(f"{row.block_mean_accepted:.2f}", row.block_interval, "{:.2f}"),
        ]
        for row in article.table_a.rows
    ]
    head = ["k", "mean accepted", "first study", "from α", "all accepted", "first study", "mean, block"]
    return (
        "<h2>A. How many drafted characters are accepted?</h2>"
        + prose.table_a(article)
        + table("Table A. Accepted characters out of k drafted, with 95 % intervals", head, rows)
        + figure(
            PICTURES[0],
            article,
            "The first ten trials as they were drawn, none picked by hand, with the text before them.",
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
            spread(f"{row.measured:.2f}×", row.measured_interval, "{:.2f}"),
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
        + busy(article.load_before)
        + prose.table_b(article)
        + table("Table B. Milliseconds, and speed-up over plain decoding, at batch 1", head, rows)
        + figure(PICTURES[1], article, "Speed-up against draft length; bars are 95 % intervals over rounds.")
    )


def _batches(article: Article) -> str:
    study = article.batches
    rows = [
        [
            str(row.batch),
            f"{row.plain_tokens_per_s:,.0f}",
            spread(f"{row.fixed_gain:.2f}×", row.fixed_interval, "{:.2f}"),
            spread(f"{row.auto_gain:.2f}×", row.auto_interval, "{:.2f}"),
        ]
        for row in study.rows
    ]
    caption = f"Gain against batch size, {study.rounds} rounds of {study.tokens} characters a request"
    return (
        "<h2>Does the gain survive larger batches?</h2>"
        + prose.batches(article)
        + table(caption, ["requests at once", "plain, characters/s", f"k = {study.k}", "k = auto"], rows)
        + figure(PICTURES[2], article, "Speed-up against batch size; bars are 95 % intervals over rounds.")
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
        + table("Table C. Distance from the target's law at the worst position", head, rows)
        + figure(PICTURES[3], article, "Distance from the target's law, on a logarithmic axis.")
    )


def _provenance(article: Article) -> str:
    return origin(
        article.provenance,
        {
            "seed": article.seed,
            "load before": article.load_before,
            "seconds": took(article.seconds),
            "corpus SHA-256": article.corpus.sha256,
        },
    )


def _seed(figure: float | str | None, form: str = "{}") -> str:
    return f'<span class="seed">{"–" if figure is None else form.format(figure)}</span>'
