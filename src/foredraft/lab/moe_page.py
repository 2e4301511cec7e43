"""The study of mixtures of experts as one web page and two pictures."""

from __future__ import annotations

from html import escape

from matplotlib.figure import Figure

from foredraft.lab.moe_schema import MoeModel, MoeStudy
from foredraft.lab.plots import PALETTE, Picture
from foredraft.lab.sheet import busy, document, figure, origin, table, took


def summary(study: MoeStudy) -> str:
    """A few lines for the terminal and the top of the page."""
    lines = []
    for model in study.models:
        row = next((row for row in model.rows if row.rows == 5), model.rows[-1])
        needed = [even for even in model.break_even if even.batch == 1]
        lines.append(
            f"{model.name} ({model.top_k} of {model.experts} experts): {row.rows} rows touch {row.distinct:.1f} "
            f"experts a layer ({row.independent:.1f} if routed independently) and cost {row.ratio:.2f} rows, "
            f"{row.dense_ratio:.2f} in a dense model of the same work; at batch 1 drafting for nothing pays above "
            + ", ".join(f"α = {_alpha(even.alpha)} (k = {even.k})" for even in needed)
            + "."
        )
    lowest = min((chosen for model in study.models for chosen in model.chosen), key=lambda c: c.experts_gain)
    lines.append(
        f"k = auto: at worst {lowest.experts_gain:.2f}x of plain decoding (α = {lowest.rate}, batch {lowest.batch}), "
        f"where k = {lowest.fixed_k} gives {lowest.experts_fixed_gain:.2f}x."
    )
    return "\n".join(lines)


def _alpha(alpha: float | None) -> str:
    return "never" if alpha is None else f"{alpha:.2f}"


def page(study: MoeStudy) -> str:
    """The whole page."""
    facts = {"seed": study.seed, "load before": study.load_before, "seconds": took(study.seconds)}
    body = _setup(study) + busy(study.load_before) + "".join(_model(study, i) for i in range(len(study.models)))
    title = "What drafting costs a mixture of experts"
    return document(title, summary(study).splitlines(), body + origin(study.provenance, facts), study.quick)


def _setup(study: MoeStudy) -> str:
    rows = [
        [
            escape(model.name),
            f"{model.top_k} of {model.experts}",
            str(model.layers),
            f"{model.parameters:,}",
            f"{model.active_parameters:,}",
        ]
        for model in study.models
    ]
    return f"""<h2>What was measured</h2>
<p>In a dense model a pass over k+1 rows reads the same weights as a pass over one, so verification is nearly free
while reading bounds it. In a mixture of experts each row chooses experts of its own: more rows read more. If rows
chose independently, n of them would touch E (1 − (1 − top_k/E)<sup>n</sup>) of the E experts of a layer. Measured
here: how many consecutive positions of real text touch ({escape(study.text)}), and what passes cost on one thread of
this processor, beside a dense twin whose MLP is as wide as what one row runs. All weights are random, in the
proportions of the models named; routers that were trained differ in how alike neighbours choose.</p>""" + table(
        "The models", ["proportions of", "experts a row", "layers", "parameters", "of its dense twin"], rows
    )


def _model(study: MoeStudy, number: int) -> str:
    model = study.models[number]
    rows = [
        [
            str(row.rows),
            f"{row.distinct:.2f}",
            f"{row.independent:.2f}",
            f"{row.ms:.2f}",
            f"{row.ratio:.2f}",
            f"{row.prior:.2f}",
            f"{row.dense_ms:.2f}",
            f"{row.dense_ratio:.2f}",
        ]
        for row in model.rows
    ]
    head = ["rows", "experts touched", "independent", "pass, ms", "over one row", "cost model, unmeasured", "dense, ms"]
    head += ["over one row"]
    chosen = [
        [
            f"{row.batch}, α = {row.rate}",
            f"{row.experts_k:.2f}",
            f"{row.dense_k:.2f}",
            f"{row.experts_gain:.2f}×",
            f"{row.experts_fixed_gain:.2f}×",
            f"{row.dense_gain:.2f}×",
        ]
        for row in model.chosen
    ]
    return (
        f"<h2>{escape(model.name)}: {model.top_k} of {model.experts} experts</h2>"
        + table(f"Experts touched and cost, by rows ({study.calls} calls in turns)", head, rows)
        + figure(PICTURES[number], study, "Cost of a pass over that of one row; the cost model's prior beside it.")
        + "<p>A draft of k tokens, made for nothing, pays where the tokens of a step, Σ α<sup>i</sup>, outgrow the "
        "price of the longer pass. This α is needed; “never” means that even a draft that is always right is too dear. "
        "The dense twin's is in small print.</p>"
        + _break_even(model)
        + "<p>And what the engine makes of it: with <code>k = auto</code> it learns what passes cost, starting from "
        "the cost model's prior. The drafter is right with probability α at each token and takes no time.</p>"
        + table(
            f"Drafted tokens a step and gain over plain decoding, {study.rounds} rounds in turns",
            [
                "batch",
                "auto: drafted a step",
                "dense twin's",
                "auto: gain",
                f"k = {model.chosen[0].fixed_k}: gain",
                "dense twin's, auto",
            ],
            chosen,
        )
    )


def _break_even(model: MoeModel) -> str:
    ks = list(dict.fromkeys(even.k for even in model.break_even))
    by = {(even.batch, even.k): even for even in model.break_even}
    batches = list(dict.fromkeys(even.batch for even in model.break_even))
    rows = [
        [str(b), *(f"{_alpha(by[b, k].alpha)} <small>{_alpha(by[b, k].dense_alpha)}</small>" for k in ks)]
        for b in batches
    ]
    return table("Acceptance rate needed to break even", ["batch", *(f"k = {k}" for k in ks)], rows)


def _draw(study: MoeStudy, number: int) -> Figure:
    model = study.models[number]
    figure_ = Figure(figsize=(6.6, 3.8), layout="constrained")
    axes = figure_.add_subplot()
    rows = [row for row in model.rows if row.rows <= 64]
    at = [row.rows for row in rows]
    axes.plot(at, [row.ratio for row in rows], "o-", color=PALETTE["blue"], label="mixture of experts, measured")
    axes.plot(at, [row.prior for row in rows], "--", color=PALETTE["faint"], label="cost model, unmeasured")
    axes.plot(at, [row.dense_ratio for row in rows], "s-", color=PALETTE["orange"], label="dense twin, measured")
    axes.plot(
        at,
        [row.distinct / model.top_k for row in rows],
        ":",
        color=PALETTE["green"],
        label="experts touched, over one row's",
    )
    axes.set_xscale("log", base=2)
    axes.set_xticks(at, [str(n) for n in at])
    axes.set_xlabel("rows of the pass")
    axes.set_ylabel("cost over one row's")
    axes.set_ylim(bottom=0)
    figure_.legend(loc="outside lower center", ncols=2)
    return figure_


PICTURES = (
    Picture("moe-mixtral", "Line chart of a pass's cost by its rows; numbers are in the table.", lambda s: _draw(s, 0)),
    Picture("moe-qwen", "Line chart of a pass's cost by its rows; numbers are in the table.", lambda s: _draw(s, 1)),
)
