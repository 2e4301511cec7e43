"""The page's paragraphs: what each table shows, in figures taken from the tables."""

from __future__ import annotations

from html import escape

from foredraft.lab import seed_figures as seed
from foredraft.lab.schema import Article
from foredraft.lab.stats import expected_accepted


def lossless(article: Article) -> bool:
    """Whether every speculative sampler lies within the noise of true draws."""
    rows = article.table_c.rows
    return all(row.within_noise for row in rows if row.name in ("rejection", "block", "coupled"))


def summary(article: Article) -> str:
    """Three lines for the terminal and the top of the page."""
    a, b, c = article.table_a, article.table_b, article.table_c
    best = next(row for row in b.rows if row.k == b.best_k_measured)
    largest = max(row.tv for row in c.rows if row.name in ("rejection", "block", "coupled"))
    verdict = "within the noise" if lossless(article) else "NOT within the noise"
    return "\n".join(
        [
            f"Acceptance: α = {a.alpha:.3f} a judged character; a draft call costs {b.c:.2f} target calls.",
            f"Speed: {best.measured:.2f}x over plain decoding at the best draft length, k = {best.k} "
            f"({best.arithmetic:.2f}x by model calls alone, {best.predicted:.2f}x predicted).",
            f"Law: total variation of the speculative samplers at most {largest:.4f}, {verdict} of true draws "
            f"(95 %: {c.noise_band[0]:.4f} to {c.noise_band[1]:.4f}).",
        ]
    )


def setup(article: Article) -> str:
    """What was done, and on which text."""
    corpus = article.corpus
    return f"""
<p>A small model, the <em>drafter</em>, writes k characters ahead; the larger <em>target</em> checks them in one pass.
An acceptance rule decides how many of them stay, so that the text has exactly the law that it would have had without
the drafter. This page repeats on this machine a study whose figures stand in the columns <em>first study</em>
({escape(seed.SOURCE)}). Its models and its text were others: expect the same shapes, not the same digits.</p>
<p>Both models read the same {corpus.characters - corpus.held_out_characters:,} characters: {escape(corpus.source)}
(licence {escape(corpus.licence)}; {corpus.vocab_size} distinct characters; SHA-256
<code>{corpus.sha256[:16]}…</code>). All figures below were taken on the other
{corpus.held_out_characters:,} characters of it, which neither model has read, at temperature 1.</p>"""


def table_a(article: Article) -> str:
    """On acceptance."""
    a = article.table_a
    longest = a.rows[-1]
    drift = longest.mean_accepted - expected_accepted(a.alpha, longest.k)
    return f"""
<p>For every k, {a.rows[0].trials} rounds at random positions: the drafter samples k characters, the target judges
them. Longer drafts are accepted whole less often, yet more characters survive on average. Over all rounds a character
that is judged is accepted with probability α = {a.alpha:.3f}. Were that the same everywhere, the mean would be
Σ αⁱ, the column <em>from α</em>. Text is not like that, for some stretches are easy and others hard: the mean at
k&nbsp;=&nbsp;{longest.k} is {abs(drift):.2f} {"above" if drift > 0 else "below"} it. <em>Block</em> judges the same
drafts as wholes (Sun 2024, arXiv 2403.10444): just as lossless, and never worse in expectation.</p>"""


def table_b(article: Article) -> str:
    """On speed at batch 1."""
    b = article.table_b
    return f"""
<p>A target call of one row takes {b.target_ms:.3f} ms here, a draft call {b.draft_ms:.3f} ms (medians of {b.calls}
calls taken in turns on one processor thread, after {b.context} characters of context). Their ratio is
{1 / b.c:.2f}, and c = {b.c:.2f}. Both models run layer by layer in torch, as in the first study; the compiled pass
that serves real models runs either of these in about 0.15 ms, most of it the call itself, so that a drafter of a
quarter of the layers would save next to nothing.
The first study had {seed.TARGET_MS} and {seed.DRAFT_MS} ms, a ratio of
{seed.TARGET_MS / seed.DRAFT_MS:.2f}.</p>
<ul>
<li><em>Calls alone</em> reckons as the first study did: tokens a step over the time of the step's model calls. It
charges the target for the k+1 rows that it reads; the first study charged one row's price.</li>
<li><em>Predicted</em> is Leviathan's (1−α<sup>k+1</sup>) / ((1−α)(kc+1)) (arXiv 2211.17192), where rows are free and
α is constant.</li>
<li><em>Whole generation</em> is what a user gets: {b.rounds} texts of {b.tokens} characters written by the engine with
and without drafts, in turns, reading of the prompt included.</li>
</ul>
<p>The engine also samples, verifies and keeps books, and models as small as these cannot hide that: its step of plain
decoding takes {b.plain_step_ms:.3f} ms, the target call in it {b.target_ms:.3f} ms when measured alone. The best k is
{b.best_k_arithmetic} by calls alone, {b.best_k_predicted} predicted and {b.best_k_measured} measured (first study:
{seed.BEST_K}, by calls alone). With k = auto the engine reaches {b.auto:.2f}×
({b.auto_interval[0]:.2f}–{b.auto_interval[1]:.2f}). Plain decoding writes {b.plain_tokens_per_s:,.0f} characters a
second.</p>"""


def batches(article: Article) -> str:
    """On batch sizes."""
    study = article.batches
    first, last = study.rows[0], study.rows[-1]
    return f"""
<p>The first study argues, without measuring it, that the gain shrinks as the batch grows: a full batch already uses the
machine's arithmetic, and a rejected character is arithmetic thrown away. Measured here with k = {study.k}:
{first.fixed_gain:.2f}× at batch {first.batch}, {last.fixed_gain:.2f}× at batch {last.batch}. With k = auto the engine
may stop drafting where it does not pay.</p>"""


def table_c(article: Article) -> str:
    """On the law."""
    c = article.table_c
    worst = escape(c.worst_context[-48:].strip(" ").replace("\n", "↵"))
    verdict = (
        "Every speculative sampler lies within it: their output cannot be told from the target's own."
        if lossless(article)
        else "At least one speculative sampler lies <strong>outside</strong> it: this run does not show equal laws."
    )
    return f"""
<p>The distance between two laws is their total variation (TV): half the sum of the absolute differences. At
{c.positions} positions the models' laws are {c.tv_mean:.3f} apart on average
({c.tv_mean_interval[0]:.3f}–{c.tv_mean_interval[1]:.3f}; first study {seed.TV_MEAN}) and {c.tv_max:.3f} at the worst
(first study {seed.TV_MAX}), after “<code>{worst}</code>”. There the
next character was drawn by every rule, from drafts of {c.draft_length} characters, and its frequencies set against the
target's law.</p>
<p>Even true draws miss their own law by chance. For this many of them the TV is {c.noise_mean:.4f} on average and, 95
times in 100, between {c.noise_band[0]:.4f} and {c.noise_band[1]:.4f} (2,000 simulations). {verdict} The last row shows
that the test can fail: it accepts by the right rule but, after a rejection, draws from the target's law where it should
draw from the residual.</p>"""
