"""The encoder–decoder study as one web page and two pictures."""

from __future__ import annotations

from html import escape

from matplotlib.figure import Figure

from foredraft.lab.plots import PALETTE, Picture
from foredraft.lab.sheet import busy, document, figure, origin, spread, table, took
from foredraft.lab.stats import predicted_speedup
from foredraft.lab.t5_schema import PairRow, T5Law, T5Study

LEVIATHAN = (
    ("translation", 0, "small 77M", 7, 0.75, 3.4),
    ("translation", 0, "base 250M", 7, 0.80, 2.8),
    ("translation", 0, "large 800M", 7, 0.82, 1.7),
    ("translation", 1, "small 77M", 7, 0.62, 2.6),
    ("translation", 1, "base 250M", 5, 0.68, 2.4),
    ("translation", 1, "large 800M", 3, 0.71, 1.4),
    ("summarisation", 0, "small 77M", 5, 0.65, 3.1),
    ("summarisation", 0, "base 250M", 5, 0.73, 3.0),
    ("summarisation", 0, "large 800M", 3, 0.74, 2.2),
    ("summarisation", 1, "small 77M", 5, 0.53, 2.3),
    ("summarisation", 1, "base 250M", 3, 0.55, 2.2),
    ("summarisation", 1, "large 800M", 3, 0.56, 1.7),
)
"""Table 2 of Leviathan 2022 (arXiv 2211.17192): T5-XXL (11B) on one TPU-v4, English to German and CNN/DailyMail."""

COLOURS = {"small": "blue", "base": "orange", "lookup": "green"}
MARKS = {"small": "o", "base": "s", "lookup": "^"}


def lossless(study: T5Study) -> bool:
    """Whether every greedy text is plain decoding's and no speculative sample can be told from a plain one."""
    greedy = all(row.identical == row.texts for row in study.rows if row.temperature == 0)
    return greedy and all(row.p_value > 0.001 for law in study.laws for row in speculative(law))


def speculative(law: T5Law) -> list:  # type: ignore[type-arg]
    """The rows of the law check that were drawn with speculation."""
    return [row for row in law.rows if row.drawn_by in COLOURS]


def summary(study: T5Study) -> str:
    """A few lines for the terminal and the top of the page."""
    best = max(study.rows, key=lambda row: row.best.measured)
    greedy = [row for row in study.rows if row.temperature == 0]
    p_value = min(row.p_value for law in study.laws for row in speculative(law))
    held = sum(claim.holds for claim in study.claims)
    return "\n".join(
        [
            f"Best: {best.best.measured:.2f}x over plain decoding, {best.drafter} drafting k = {best.best_k} "
            f"({best.task}, temperature {best.temperature:g}, α = {best.alpha:.2f}, c = {best.c:.2f}; "
            f"{best.best.predicted:.2f}x by the formula).",
            f"Shape of the founding paper's table: {held} of {len(study.claims)} of its features are here too.",
            f"Lossless: {sum(row.identical for row in greedy)} of {sum(row.texts for row in greedy)} greedy texts are "
            f"plain decoding's; sampled texts with and without drafts: smallest p {p_value:.3f}"
            f"{'' if lossless(study) else ' — NOT as it must be'}.",
        ]
    )


def page(study: T5Study) -> str:
    """The whole page."""
    body = [_setup(study), busy(study.load_before), _main(study), _lengths(study), _laws(study)]
    facts = {
        "seed": study.seed,
        "load before": study.load_before,
        "seconds": took(study.seconds),
        "corpus SHA-256": study.corpus.sha256,
    }
    title = "A small encoder–decoder drafts for a large one"
    return document(title, summary(study).splitlines(), "".join(body) + origin(study.provenance, facts), study.quick)


def _setup(study: T5Study) -> str:
    rows = [
        [
            model.name,
            f"{model.encoder_layers} + {model.decoder_layers}",
            f"{model.parameters:,}",
            *(f"{loss:.3f}" for loss in model.losses.values()),
            f"{study.costs.encoder_ms[model.name]:.2f}",
            f"{study.costs.draft_ms.get(model.name, study.costs.target_ms[1]):.2f}",
            f"{model.train_seconds:.0f} s",
        ]
        for model in study.models
    ]
    head = ["model", "layers", "parameters", "loss, translate", "loss, summarise"]
    head += ["encoder, ms", "decoder call, ms", "training took"]
    shown = "".join(
        f"<dt>{escape(strip.task)}</dt><dd>{escape(strip.source)}</dd>"
        f"<dt>answer</dt><dd>{escape(strip.answer)}</dd><dt>right</dt><dd>{escape(strip.right)}</dd>"
        for strip in study.examples
    )
    return f"""<h2>What was measured</h2>
<p>Three T5s of our own, trained here from random weights on {escape(study.corpus.source)}, learn two tasks.
<em>Translate</em> goes into a made-up creole in which the commonest tokens have counterparts (shown in capitals) and
all others are kept; <em>summarise</em> keeps the first words of every sentence. The largest is the target. Each of
the two smaller ones drafts for it, and so does prompt lookup, which copies from source and answer. Every model's
encoder reads a source once; rejected tokens are cut from the decoder's cache.</p><dl>{shown}</dl>""" + table(
        "The models; losses in nats a token of held-out text", head, rows
    )


def _main(study: T5Study) -> str:
    rows = [
        [
            f"{row.task}, T = {row.temperature:g}",
            row.drafter,
            f"{row.alpha:.2f}",
            f"{row.c:.2f}",
            f"{row.best_k} <small>{row.predicted_best_k} by the formula</small>",
            f"{row.best.tokens_per_step:.2f}",
            f"{row.best.predicted:.2f}×",
            f"{row.best.priced:.2f}×",
            spread(f"{row.best.measured:.2f}×", row.best.measured_interval, "{:.2f}"),
            f"{row.identical} of {row.texts}" if row.temperature == 0 else "–",
        ]
        for row in study.rows
    ]
    head = [
        "task",
        "drafter",
        "α",
        "c",
        "best k",
        "tokens a step",
        "formula",
        "with rows priced",
        "measured",
        "identical",
    ]
    paper = [[f"{t}, T = {T}", d, str(k), f"{a:.2f}", f"{s:.1f}×"] for t, T, d, k, a, s in LEVIATHAN]
    kept = "".join(f"<li>{escape(c.text)}: {'yes' if c.holds else '<strong>no</strong>'}</li>" for c in study.claims)
    return (
        f"""<h2>The table</h2>
<p>α is the share of judged tokens that were accepted, pooled over all draft lengths; c is a draft call over a target
call of one row. <em>Formula</em> is Leviathan's (1−α<sup>k+1</sup>) / ((1−α)(kc+1)), in which a pass of k+1 rows
costs no more than one of a single row; <em>with rows priced</em> puts its measured cost there. <em>Measured</em> is
whole answers through the engine, encoders included, against plain decoding of the same sources in the same
{study.rounds} rounds.</p>"""
        + table("Best draft length of every drafter, batch 1", head, rows)
        + figure(PICTURES[0], study, "Speed-up by draft length, measured (points) and by the formula (lines).")
        + "<p>What the founding paper's table shows, and whether this one does:</p><ul>"
        + kept
        + "</ul>"
        + table(
            "For comparison: Leviathan 2022, T5-XXL with smaller T5s", ["task", "drafter", "k", "α", "speed-up"], paper
        )
        + figure(
            PICTURES[1],
            study,
            "Best measured speed-up against c; lines: the formula at its best k, for some α.",
        )
    )


def _lengths(study: T5Study) -> str:
    rows = [
        [
            f"{row.task}, T = {row.temperature:g}, {row.drafter}",
            str(at.k),
            f"{at.tokens_per_step:.2f}",
            f"{at.predicted:.2f}×",
            f"{at.priced:.2f}×",
            spread(f"{at.measured:.2f}×", at.measured_interval, "{:.2f}"),
        ]
        for row in study.rows
        for at in row.lengths
    ]
    head = ["drafter", "k", "tokens a step", "formula", "with rows priced", "measured"]
    return "<h2>Every draft length</h2>" + table("All draft lengths", head, rows)


def _laws(study: T5Study) -> str:
    rows = [
        [
            f"{law.task}, {escape(row.drawn_by)}",
            f"{row.samples:,}",
            f"{row.tv:.3f}",
            f"{row.p_value:.3g}",
        ]
        for law in study.laws
        for row in law.rows
    ]
    verdict = (
        "No set of texts drawn with drafts can be told from the plain one."
        if lossless(study)
        else "<strong>At least one set of texts differs:</strong> this run does not show equal laws."
    )
    return f"""<h2>Is it the target's law?</h2>
<p>At temperature 0 every text must be plain decoding's, token for token: the last column of the table above. At
temperature 1 the first {study.laws[0].tokens} tokens of an answer were drawn many times, with each drafter and
without, at the source (of those tried) where target and small drafter differ most. Two samples of one law differ by
chance; the chi-square test says how probable such a difference is. <em>Plain again</em> shows pure chance; <em>the
small drafter alone</em> shows that the test can fail. {verdict}</p>""" + table(
        "Texts drawn with drafts against as many drawn without", ["drawn by", "texts", "TV", "p"], rows
    )


def draw_lengths(study: T5Study) -> Figure:
    """One panel a task and temperature: measured points and the formula's lines."""
    figure_ = Figure(figsize=(7.2, 5.6), layout="constrained")
    panels = figure_.subplots(2, 2, sharex=True, sharey=True)
    places = list(dict.fromkeys((row.task, row.temperature) for row in study.rows))
    for axes, place in zip(panels.flat, places, strict=True):
        for row in study.rows:
            if (row.task, row.temperature) == place:
                _series(axes, row)
        axes.axhline(1, color=PALETTE["ink"], linewidth=1)
        axes.set_title(f"{place[0]}, T = {place[1]:g}")
        axes.set_xticks([at.k for at in study.rows[0].lengths])
    highest = max(max(at.measured_interval[1], at.predicted) for row in study.rows for at in row.lengths)
    panels[0, 0].set_ylim(0, min(1.05 * highest, 8))  # shared by all
    for axes in panels[1]:
        axes.set_xlabel("draft length k")
    for axes in panels[:, 0]:
        axes.set_ylabel("speed-up")
    handles, labels = panels.flat[0].get_legend_handles_labels()
    figure_.legend(handles, labels, loc="outside lower center", ncols=3)
    return figure_


def _series(axes, row: PairRow) -> None:  # type: ignore[no-untyped-def]
    ks = [at.k for at in row.lengths]
    colour = PALETTE[COLOURS[row.drafter]]
    errors = [
        [at.measured - at.measured_interval[0] for at in row.lengths],
        [at.measured_interval[1] - at.measured for at in row.lengths],
    ]
    values = [at.measured for at in row.lengths]
    axes.errorbar(ks, values, errors, fmt=MARKS[row.drafter], color=colour, capsize=3, label=row.drafter)
    axes.plot(ks, [at.predicted for at in row.lengths], "--", color=colour, linewidth=1)


def draw_costs(study: T5Study) -> Figure:
    """Best speed-up against c, over the formula's curves."""
    figure_ = Figure(figsize=(6.6, 4.2), layout="constrained")
    axes = figure_.add_subplot()
    grid = [n / 100 for n in range(101)]
    for alpha in (0.5, 0.7, 0.8, 0.9):
        curve = [max(predicted_speedup(alpha, k, c) for k in range(1, 21)) for c in grid]
        axes.plot(grid, curve, "-", color=PALETTE["faint"], linewidth=1)
        axes.text(0.012, min(curve[1], 5.6), f"α = {alpha}", fontsize=9, color=PALETTE["faint"], va="bottom")
    for row in study.rows:
        filled = row.temperature == 0
        axes.plot(
            [row.c],
            [row.best.measured],
            MARKS[row.drafter],
            color=PALETTE[COLOURS[row.drafter]],
            fillstyle="full" if filled else "none",
            label=f"{row.drafter}, T = {row.temperature:g}" if row.task == study.rows[0].task else None,
        )
    axes.axhline(1, color=PALETTE["ink"], linewidth=1)
    axes.set_xlim(-0.02, max(0.6, *(row.c + 0.05 for row in study.rows)))
    axes.set_ylim(0, 6)
    axes.set_xlabel("c, a draft call over a target call")
    axes.set_ylabel("speed-up at the best k")
    figure_.legend(loc="outside lower center", ncols=3)
    return figure_


PICTURES = (
    Picture(
        "t5-lengths",
        "Four charts of speed-up against draft length, by task and temperature; numbers are in the table.",
        draw_lengths,
    ),
    Picture(
        "t5-costs",
        "Scatter chart of best speed-up against a draft call's cost, with the formula's curves; numbers in tables.",
        draw_costs,
    ),
)
