"""The study of draft lengths under load as one web page and a picture."""

from __future__ import annotations

from html import escape

from matplotlib.figure import Figure

from foredraft.lab.load_schema import LoadStudy, PolicyRow, Setting
from foredraft.lab.plots import PALETTE, Picture
from foredraft.lab.sheet import busy, document, figure, origin, spread, table, took

STYLES = {
    "k = 2": ("faint", "o:"),
    "k = 4": ("faint", "s:"),
    "each alone": ("red", "^--"),
    "auto": ("blue", "o-"),
    "k = 4, admitted": ("green", "s-"),
    "auto, admitted": ("orange", "D-"),
}


def cell(setting: Setting, batch: int, policy: str) -> PolicyRow | None:
    """One row of the setting."""
    return next((row for row in setting.rows if (row.batch, row.policy) == (batch, policy)), None)


def batches(setting: Setting) -> list[int]:
    """Its batch sizes."""
    return list(dict.fromkeys(row.batch for row in setting.rows))


def worth(setting: Setting, policy: str, over: str) -> float | None:
    """Geometric mean over batches of one policy's gain over another's; None where it was not run."""
    product, count = 1.0, 0
    for batch in batches(setting):
        ours, theirs = cell(setting, batch, policy), cell(setting, batch, over)
        if ours is None or theirs is None:
            return None
        product, count = product * ours.gain / theirs.gain, count + 1
    return float(product ** (1 / count))


def summary(study: LoadStudy) -> str:
    """A few lines for the terminal and the top of the page."""
    lines = []
    for setting in study.settings:
        alone, fixed = worth(setting, "auto", "each alone"), worth(setting, "auto", "k = 4")
        line = f"{setting.name}: auto is {alone:.2f}x of each alone and {fixed:.2f}x of k = 4, mean over batches"
        admitted, ahead = worth(setting, "auto, admitted", "auto"), worth(setting, "k = 4, admitted", "k = 4")
        if admitted is not None and ahead is not None:
            verdict = "pays" if admitted > 1.02 else "does not pay" if admitted < 1.0 else "is not worth it"
            line += f"; admitting after drafting is {ahead:.2f}x of k = 4, and {admitted:.2f}x of auto: there it "
            line += verdict
        lines.append(line + ".")
    return "\n".join(lines)


def page(study: LoadStudy) -> str:
    """The whole page."""
    facts = {
        "seed": study.seed,
        "load before": study.load_before,
        "seconds": took(study.seconds),
        "threads": study.threads,
    }
    body = SETUP + busy(study.load_before) + "".join(_setting(study, i) for i in range(len(study.settings)))
    return document(
        "How much should a batch draft?",
        summary(study).splitlines(),
        body + origin(study.provenance, facts),
        study.quick,
    )


SETUP = """<h2>What was compared</h2>
<p>The more requests share a pass, the dearer its rows, and the fewer tokens should be drafted. Ways to decide:</p>
<ul><li><em>k = 2, k = 4</em>: always the same.</li> <li><em>each alone</em>: every request picks the length that is
best by its own acceptance so far, as if it had the pass to itself.</li> <li><em>auto</em>: what the engine does.
Before drafting, the possible tokens of all requests are sorted by the probability that they are reached and accepted,
by past acceptance; those that promise the most tokens a second are drafted.</li> <li><em>admitted</em>: as DSpark
does (arXiv 2607.05147). Drafts are made first; then, in the order of their predicted probability, tokens are admitted
to verification while the predicted throughput rises. That probability is learnt from how sure the drafter's law was
at each place. It never looks at which token was drawn before deciding about it, and meets tokens in order, so that
the output's law is untouched; searching the whole list would bend it.</li></ul>"""


def _setting(study: LoadStudy, number: int) -> str:
    setting = study.settings[number]
    sizes = batches(setting)
    policies = [policy for policy in STYLES if any(row.policy == policy for row in setting.rows)]
    rows = []
    for policy in policies:
        cells = [cell(setting, batch, policy) for batch in sizes]
        rows.append([escape(policy), *(_gain(found) if found else "–" for found in cells)])
    drafted = [
        [
            escape(policy),
            *(f"{r.drafted:.2f} <small>{r.accepted:.2f}</small>" for b in sizes if (r := cell(setting, b, policy))),
        ]
        for policy in policies
    ]
    head = ["policy", *(f"batch {batch}" for batch in sizes)]
    trust = [
        [f"from {t.confidence_from}", f"{t.tokens:,}", "–" if t.accepted is None else f"{t.accepted:.2f}", f"{t.prior}"]
        for t in setting.trust
    ]
    shown = any(t.tokens for t in setting.trust)
    return (
        f"<h2>{escape(setting.name)}</h2><p>{escape(setting.text)}</p>"
        + table("Tokens a second over plain decoding", head, rows)
        + (figure(PICTURES[0], study, "Gain over plain decoding by batch size, on tables.") if number == 0 else "")
        + table("Drafted tokens verified a step; accepted in small print", head, drafted)
        + (
            table(
                "How far confidence tells acceptance", ["confidence", "tokens", "accepted", "expected at first"], trust
            )
            if shown
            else ""
        )
    )


def _gain(row: PolicyRow) -> str:
    return f"{row.gain:.2f}×" if row.interval is None else spread(f"{row.gain:.2f}×", row.interval, "{:.2f}")


def draw(study: LoadStudy) -> Figure:
    """Gain against batch size for every policy, one panel a setting."""
    figure_ = Figure(figsize=(7.2, 3.4 * len(study.settings) + 0.6), layout="constrained")
    panels = figure_.subplots(len(study.settings), 1, squeeze=False)[:, 0]
    for axes, setting in zip(panels, study.settings, strict=True):
        for policy, (colour, mark) in STYLES.items():
            found = [(row.batch, row.gain) for row in setting.rows if row.policy == policy]
            if found:
                axes.plot(*zip(*found, strict=True), mark, color=PALETTE[colour], label=policy)
        axes.axhline(1, color=PALETTE["ink"], linewidth=1)
        axes.set_xscale("log", base=2)
        sizes = batches(setting)
        axes.set_xticks(sizes, [str(size) for size in sizes])
        axes.set_title(setting.name)
        axes.set_ylabel("speed-up over plain")
        axes.set_ylim(bottom=0)
    panels[-1].set_xlabel("requests at once")
    handles, labels = panels[0].get_legend_handles_labels()
    figure_.legend(handles, labels, loc="outside lower center", ncols=3)
    return figure_


PICTURES = (
    Picture("load-batches", "Line charts of speed-up against batch size by policy; numbers are in the tables.", draw),
)
