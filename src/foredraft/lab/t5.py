"""``foredraft lab t5``: the shape of the founding paper's table, from small encoder–decoder models trained here."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from foredraft.lab.corpus import MAX_CHARS, Corpus, load_corpus
from foredraft.lab.progress import NoProgress, Progress
from foredraft.lab.schema import CorpusFacts
from foredraft.lab.speed import on_one_thread, without_verdicts
from foredraft.lab.study import StudyReport, load_now, must_be_writable, origin_of, timed, write_study
from foredraft.lab.t5_measure import call_costs, examples, law_check, races
from foredraft.lab.t5_models import T5Spec, TrainedT5, train_or_reuse
from foredraft.lab.t5_page import PICTURES, page, summary
from foredraft.lab.t5_schema import Claim, PairRow, T5Facts, T5Study
from foredraft.lab.t5_task import TASKS, VOCABULARY, passages
from foredraft.lab.training import Schedule
from foredraft.models.encoder_decoder import load_encoder_decoder


@dataclass(frozen=True, slots=True)
class Plan:
    """How large a study is."""

    max_chars: int
    target: T5Spec
    base: T5Spec
    small: T5Spec
    schedule: Schedule
    ks: tuple[int, ...]
    calls: int
    rounds: int
    tokens: int
    sources: int
    samples: int
    law_tokens: int


FULL = Plan(
    max_chars=MAX_CHARS,
    target=T5Spec("target", encoder=1, decoder=8, width=64),
    base=T5Spec("base", encoder=1, decoder=2, width=64),
    small=T5Spec("small", encoder=1, decoder=1, width=48),
    schedule=Schedule(steps=1200, batch=32, learning_rate=5e-3, weight_decay=0.0),
    ks=(1, 3, 5, 7),
    calls=60,
    rounds=16,
    tokens=64,
    sources=24,
    samples=500,
    law_tokens=3,
)
QUICK = Plan(
    max_chars=60_000,
    target=T5Spec("target", encoder=1, decoder=2, width=32),
    base=T5Spec("base", encoder=1, decoder=1, width=32),
    small=T5Spec("small", encoder=1, decoder=1, width=16),
    schedule=Schedule(steps=6, batch=4, warmup=2),
    ks=(1, 3),
    calls=3,
    rounds=2,
    tokens=8,
    sources=2,
    samples=6,
    law_tokens=2,
)
"""Seconds instead of minutes: to see that everything runs, not to learn anything from."""


def run_t5(
    out_dir: Path,
    *,
    corpus: str = "english",
    seed: int = 0,
    retrain: bool = False,
    quick: bool = False,
    progress: Progress | None = None,
) -> StudyReport[T5Study]:
    """Trains the three models (or reuses them), measures, and writes ``t5.json``, ``t5.html`` and the pictures.

    Args:
        out_dir: Folder for the results; made if missing.
        corpus: ``english``, or the path of a UTF-8 text file.
        seed: Of training, sources and draws.
        retrain: Train again even if the very models are in the cache.
        quick: A toy version that takes seconds.
        progress: Told about every stage.

    Raises:
        ConfigError: The corpus is not on this system or too short, or ``out_dir`` cannot be written.
        ForedraftError: The trained models cannot be kept.
    """
    must_be_writable(out_dir)
    with on_one_thread(), without_verdicts():
        found = study(QUICK if quick else FULL, corpus, seed, retrain, quick, progress or NoProgress())
    return write_study(out_dir, "t5", found, page(found), summary(found), PICTURES)


def study(plan: Plan, corpus: str, seed: int, retrain: bool, quick: bool, progress: Progress) -> T5Study:
    """Runs the whole study and returns its tables."""
    seconds: dict[str, float] = {}
    load_before = load_now()
    with timed("corpus", seconds):
        text = load_corpus(corpus, max_chars=plan.max_chars)
        training, held_out, tokenizer = passages(text)
    with timed("training", seconds):
        trained = [
            train_or_reuse(
                spec,
                (training, held_out),
                text.sha256,
                plan.schedule,
                seed=seed,
                retrain=retrain,
                progress=progress,
            )
            for spec in (plan.target, plan.base, plan.small)
        ]
    models = {model.name: load_encoder_decoder(str(model.folder), "float32") for model in trained}
    with timed("costs", seconds):
        example = held_out.example("translate", torch.Generator().manual_seed(seed))
        costs = call_costs(models, example, plan.ks, plan.calls, progress)
    with timed("generations", seconds):
        rows = races(
            models, held_out, costs, ks=plan.ks, rounds=plan.rounds, tokens=plan.tokens, seed=seed, progress=progress
        )
    with timed("laws", seconds):
        laws = tuple(
            law_check(
                models,
                held_out,
                tokenizer,
                task,
                sources=plan.sources,
                samples=plan.samples,
                tokens=plan.law_tokens,
                seed=seed,
                progress=progress,
            )
            for task in TASKS
        )
    return T5Study(
        seed=seed,
        quick=quick,
        corpus=_corpus_facts(text, sum(len(block) for block in text.split()[1])),
        models=tuple(_model_facts(model) for model in trained),
        costs=costs,
        rows=tuple(rows),
        claims=claims(rows),
        laws=laws,
        examples=examples(models, held_out, tokenizer, plan.tokens, seed),
        rounds=plan.rounds,
        seconds=seconds,
        load_before=load_before,
        provenance=origin_of(quick),
    )


def claims(rows: Sequence[PairRow]) -> tuple[Claim, ...]:
    """What Leviathan's table 2 shows, held against ours."""
    by = {(row.task, row.temperature, row.drafter): row for row in rows}
    places = [(task, temperature) for task in TASKS for temperature in (0.0, 1.0)]
    both = [(by[*place, "small"], by[*place, "base"]) for place in places]
    cold_warm = [(by[task, 0.0, name], by[task, 1.0, name]) for task in TASKS for name in ("small", "base")]
    return (
        Claim(
            text="the larger drafter is accepted more often",
            holds=all(base.alpha >= small.alpha for small, base in both),
        ),
        Claim(
            text="a drafter is accepted less often at temperature 1 than at 0",
            holds=all(warm.alpha <= cold.alpha for cold, warm in cold_warm),
        ),
        Claim(
            text="the smaller drafter gains more all the same, because it is cheaper",
            holds=all(small.best.measured >= base.best.measured for small, base in both),
        ),
        Claim(
            text="the dearer drafter's best draft is no longer than the cheaper one's",
            holds=all(base.best_k <= small.best_k for small, base in both),
        ),
    )


def _corpus_facts(corpus: Corpus, held_out: int) -> CorpusFacts:
    return CorpusFacts(
        name=corpus.name,
        source=corpus.source,
        licence=corpus.licence,
        sha256=corpus.sha256,
        characters=len(corpus.text),
        held_out_characters=held_out,
        vocab_size=VOCABULARY,
        dropped=corpus.dropped,
    )


def _model_facts(model: TrainedT5) -> T5Facts:
    return T5Facts(
        name=model.name,
        key=model.folder.name,
        encoder_layers=model.encoder_layers,
        decoder_layers=model.decoder_layers,
        parameters=model.parameters,
        losses=model.losses,
        train_seconds=model.train_seconds,
        reused=model.reused,
    )
