"""``foredraft lab article``: the first reference study, reproduced from nothing but this machine's own text."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from foredraft.lab.acceptance import strips, table_a
from foredraft.lab.char_models import (
    DRAFTER,
    QUICK_DRAFTER,
    QUICK_TARGET,
    TARGET,
    CharModelSpec,
    TrainedModel,
    train_or_reuse,
)
from foredraft.lab.corpus import MAX_CHARS, Corpus, load_corpus
from foredraft.lab.exactness import table_c
from foredraft.lab.plots import PICTURES
from foredraft.lab.progress import NoProgress, Progress
from foredraft.lab.report import page
from foredraft.lab.report_prose import summary
from foredraft.lab.schema import Article, CorpusFacts, ModelFacts
from foredraft.lab.speed import batch_study, table_b
from foredraft.lab.study import load_now, must_be_writable, origin_of, timed, write_study
from foredraft.lab.training import Schedule
from foredraft.models.base import Target
from foredraft.models.linear import dense_linear
from foredraft.models.loading import load_model

CONTEXT = 96
STRIP_K = 8


@dataclass(frozen=True, slots=True)
class Plan:
    """How large a study is."""

    max_chars: int
    target: CharModelSpec
    drafter: CharModelSpec
    schedule: Schedule
    ks: tuple[int, ...]
    trials: int
    calls: int
    rounds: int
    tokens: int
    positions: int
    samples: int
    batches: tuple[int, ...]
    batch_rounds: int
    batch_tokens: int


FULL = Plan(
    max_chars=MAX_CHARS,
    target=TARGET,
    drafter=DRAFTER,
    schedule=Schedule(steps=1800, batch=8),
    ks=(1, 2, 3, 4, 6, 8),
    trials=300,
    calls=200,
    rounds=24,
    tokens=96,
    positions=400,
    samples=60_000,
    batches=(1, 2, 4, 8, 16, 32),
    batch_rounds=8,
    batch_tokens=64,
)
QUICK = Plan(
    max_chars=60_000,
    target=QUICK_TARGET,
    drafter=QUICK_DRAFTER,
    schedule=Schedule(steps=30, batch=4, context=160, warmup=5),
    ks=(1, 2, 4),
    trials=24,
    calls=5,
    rounds=2,
    tokens=16,
    positions=24,
    samples=300,
    batches=(1, 4),
    batch_rounds=2,
    batch_tokens=16,
)
"""Seconds instead of minutes: to see that everything runs, not to learn anything from."""


@dataclass(frozen=True, slots=True)
class ArticleReport:
    """What the study found and where it is written.

    Attributes:
        summary: A few lines of plain text for the terminal.
    """

    article: Article
    json_path: Path
    html_path: Path
    summary: str


def run_article(
    out_dir: Path,
    *,
    corpus: str = "english",
    seed: int = 0,
    retrain: bool = False,
    quick: bool = False,
    progress: Progress | None = None,
) -> ArticleReport:
    """Trains the two models (or reuses them), measures every table and writes ``article.json`` and ``article.html``.

    Args:
        out_dir: Folder for the results; made if missing.
        corpus: ``english``, ``korean``, or the path of a UTF-8 text file.
        seed: Of training, positions and draws.
        retrain: Train again even if the very models are in the cache.
        quick: A toy version that takes seconds.
        progress: Told about every stage.

    Raises:
        ConfigError: The corpus is not on this system or too short, or ``out_dir`` cannot be written.
        ForedraftError: The trained models cannot be kept.
    """
    must_be_writable(out_dir)
    article = study(QUICK if quick else FULL, corpus, seed, retrain, quick, progress or NoProgress())
    report = write_study(out_dir, "article", article, page(article), summary(article), PICTURES)
    return ArticleReport(article, report.json_path, report.html_path, report.summary)


def study(plan: Plan, corpus: str, seed: int, retrain: bool, quick: bool, progress: Progress) -> Article:
    """Runs the whole study and returns its tables."""
    seconds: dict[str, float] = {}
    load_before = load_now()
    text = load_corpus(corpus, max_chars=plan.max_chars)
    _, held_out = text.split()
    trained = [
        train_or_reuse(text, spec, plan.schedule, seed=seed, retrain=retrain, progress=progress)
        for spec in (plan.target, plan.drafter)
    ]
    target, drafter = (_load(model) for model in trained)
    shared: dict[str, Any] = {"seed": seed, "progress": progress}
    sizes: dict[str, Any]
    with timed("table_a", seconds):
        a = table_a(target, drafter, held_out, ks=plan.ks, trials=plan.trials, context=CONTEXT, **shared)
    with timed("table_b", seconds):
        sizes = {"calls": plan.calls, "rounds": plan.rounds, "tokens": plan.tokens}
        b = table_b(target, drafter, held_out, a, context=CONTEXT, **sizes, **shared)
    with timed("table_c", seconds):
        sizes = {"positions": plan.positions, "samples": plan.samples}
        c = table_c(target, drafter, held_out, text, context=CONTEXT, **sizes, **shared)
    with timed("batches", seconds):
        sizes = {"rounds": plan.batch_rounds, "tokens": plan.batch_tokens}
        k = b.best_k_measured
        batches = batch_study(
            target, drafter, held_out, k=k, batches=plan.batches, context=CONTEXT // 2, **sizes, **shared
        )
    return Article(
        seed=seed,
        quick=quick,
        corpus=_corpus_facts(text),
        models=tuple(_model_facts(model) for model in trained),
        table_a=a,
        table_b=b,
        table_c=c,
        batches=batches,
        strips=strips(target, drafter, held_out, text, k=STRIP_K, n=10, context=CONTEXT, seed=seed),
        seconds=seconds,
        load_before=load_before,
        provenance=origin_of(quick),
    )


def _load(model: TrainedModel) -> Target:
    """Layer by layer in torch, as the first study ran its models: a call's cost is then that of its layers.

    The compiled pass runs either model in about 0.15 ms, most of which is the call itself. A drafter of a quarter of
    the layers then costs nearly as much as the target, and there is nothing to be gained from drafting.
    """
    return load_model(model.folder, dtype="float32", make_linear=dense_linear).target


def _corpus_facts(corpus: Corpus) -> CorpusFacts:
    return CorpusFacts(
        name=corpus.name,
        source=corpus.source,
        licence=corpus.licence,
        sha256=corpus.sha256,
        characters=len(corpus.text),
        held_out_characters=sum(map(len, corpus.split()[1])),
        vocab_size=corpus.vocab_size,
        dropped=corpus.dropped,
    )


def _model_facts(model: TrainedModel) -> ModelFacts:
    facts = asdict(model)
    return ModelFacts(key=facts.pop("folder").name, **facts)
