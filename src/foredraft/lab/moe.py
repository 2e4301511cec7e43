"""``foredraft lab moe``: what drafting costs a mixture of experts, whose rows are not free, and when it still pays."""

from __future__ import annotations

import random
import statistics
import time
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from foredraft import Engine, SamplingParams
from foredraft.lab.corpus import load_corpus
from foredraft.lab.moe_models import MoeSpec, distinct, experts_of_text, random_decoder, weights_of
from foredraft.lab.moe_page import PICTURES, page, summary
from foredraft.lab.moe_schema import BreakEven, Chosen, MoeModel, MoeStudy, RowsRow
from foredraft.lab.progress import NoProgress, Progress
from foredraft.lab.speed import on_one_thread, without_verdicts
from foredraft.lab.study import StudyReport, load_now, must_be_writable, origin_of, timed, write_study
from foredraft.models.base import Segment
from foredraft.models.decoder import Decoder
from foredraft.models.experts import touched
from foredraft.testing import ScriptedDrafter

TEXT = 60_000


@dataclass(frozen=True, slots=True)
class Plan:
    """How large a study is."""

    specs: tuple[MoeSpec, ...]
    rows: tuple[int, ...]
    calls: int
    positions: int
    batches: tuple[int, ...]
    ks: tuple[int, ...]
    rates: tuple[float, ...]
    run_batches: tuple[int, ...]
    rounds: int
    tokens: int
    fixed_k: int = 4


FULL = Plan(
    specs=(
        MoeSpec("Mixtral", width=384, layers=3, experts=8, top_k=2, intermediate=1344),
        MoeSpec("Qwen-MoE", width=384, layers=3, experts=60, top_k=4, intermediate=264, shared=1056),
    ),
    rows=(1, 2, 3, 4, 5, 6, 9, 12, 16, 24, 32, 64, 96, 160, 288),
    calls=15,
    positions=400,
    batches=(1, 2, 4, 8, 16, 32),
    ks=(1, 2, 4, 8),
    rates=(0.5, 0.8),
    run_batches=(1, 8),
    rounds=3,
    tokens=48,
)
QUICK = Plan(
    specs=(
        MoeSpec("Mixtral", width=64, layers=1, experts=8, top_k=2, intermediate=64),
        MoeSpec("Qwen-MoE", width=64, layers=1, experts=12, top_k=4, intermediate=32, shared=64),
    ),
    rows=(1, 2, 3, 5, 8),
    calls=3,
    positions=60,
    batches=(1, 2),
    ks=(1, 2),
    rates=(0.8,),
    run_batches=(1,),
    rounds=1,
    tokens=10,
)
"""Seconds instead of minutes: to see that everything runs, not to learn anything from."""


def run_moe(
    out_dir: Path, *, seed: int = 0, quick: bool = False, progress: Progress | None = None
) -> StudyReport[MoeStudy]:
    """Measures, and writes ``moe.json``, ``moe.html`` and the pictures.

    Args:
        out_dir: Folder for the results; made if missing.
        seed: Of weights and of the drafter's errors.
        quick: A toy version that takes seconds.
        progress: Told about every stage.

    Raises:
        ConfigError: ``out_dir`` cannot be written.
    """
    must_be_writable(out_dir)
    with on_one_thread(), without_verdicts():
        found = study(QUICK if quick else FULL, seed, quick, progress or NoProgress())
    return write_study(out_dir, "moe", found, page(found), summary(found), PICTURES)


def study(plan: Plan, seed: int, quick: bool, progress: Progress) -> MoeStudy:
    """Runs the whole study and returns its tables."""
    seconds: dict[str, float] = {}
    load_before = load_now()
    text = load_corpus("english", max_chars=TEXT)
    ids = text.encode(text.text)
    models = []
    for spec in plan.specs:
        with timed(spec.name, seconds):
            models.append(_measure(plan, spec, ids, text.vocab_size, seed, progress))
    return MoeStudy(
        seed=seed,
        quick=quick,
        text=text.source,
        models=tuple(models),
        threads=1,
        calls=plan.calls,
        rounds=plan.rounds,
        seconds=seconds,
        load_before=load_before,
        provenance=origin_of(quick),
    )


def _measure(plan: Plan, spec: MoeSpec, ids: Sequence[int], vocab: int, seed: int, progress: Progress) -> MoeModel:
    shape, twin_shape = spec.shape(vocab), spec.shape(vocab, dense=True)
    model, twin = random_decoder(shape, seed), random_decoder(twin_shape, seed)
    chosen = experts_of_text(model, ids[: plan.positions])
    ms = pass_costs((model, twin), ids, plan.rows, plan.calls, spec.name, progress)
    prior = model.pass_prior
    assert prior is not None
    rows = tuple(
        RowsRow(
            rows=n,
            distinct=statistics.fmean(distinct(layer, min(n, plan.positions)) for layer in chosen),
            independent=touched(spec.experts, spec.top_k, n),
            ms=ms[0][n],
            dense_ms=ms[1][n],
            ratio=ms[0][n] / ms[0][1],
            dense_ratio=ms[1][n] / ms[1][1],
            prior=prior(n),
        )
        for n in plan.rows
    )
    return MoeModel(
        name=spec.name,
        experts=spec.experts,
        top_k=spec.top_k,
        layers=spec.layers,
        parameters=weights_of(shape),
        active_parameters=weights_of(twin_shape),
        rows=rows,
        break_even=break_evens(ms, plan.batches, plan.ks),
        chosen=tuple(_choices(plan, (model, twin), ids, seed, spec.name, progress)),
    )


def pass_costs(
    models: Sequence[Decoder], ids: Sequence[int], rows: Sequence[int], calls: int, name: str, progress: Progress
) -> list[dict[int, float]]:
    """Median milliseconds of passes by their rows, of all models in turns, over ever other text."""
    jobs = [(model, n) for model in models for n in rows]
    times: list[list[float]] = [[] for _ in jobs]
    slots = {id(model): model.cache.allocate() for model in models}
    progress.stage(f"{name}: cost of passes", calls)
    for number in range(calls + 1):
        for turn in range(len(jobs)):
            job = (turn + number) % len(jobs)
            model, n = jobs[job]
            start = (37 * number) % (len(ids) - n)
            segment = Segment(slots[id(model)], list(ids[start : start + n]))
            begun = time.perf_counter()
            model.forward([segment])
            if number:  # the first ones warm up
                times[job].append(1e3 * (time.perf_counter() - begun))
            model.cache.commit(slots[id(model)], 0)
        progress.advance(int(number > 0))
    medians = [statistics.median(found) for found in times]
    return [dict(zip(rows, medians[i * len(rows) :], strict=False)) for i in range(len(models))]


def cost_at(ms: Mapping[int, float], rows: int) -> float:
    """Between measured row counts linear; beyond the largest in proportion to it."""
    known = sorted(ms)
    at = bisect_left(known, rows)
    if at == len(known):
        return ms[known[-1]] * rows / known[-1]
    if known[at] == rows or at == 0:
        return ms[known[at]]
    left, right = known[at - 1], known[at]
    return ms[left] + (ms[right] - ms[left]) * (rows - left) / (right - left)


def break_even(ratio: float, k: int) -> float | None:
    """The α at which Σ αⁱ, i = 0…k, equals ``ratio``: a pass of verification over a plain one. None above 1."""
    if ratio >= k + 1:
        return None
    low, high = 0.0, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if sum(middle**i for i in range(k + 1)) < ratio else (low, middle)
    return high


def break_evens(ms: Sequence[Mapping[int, float]], batches: Sequence[int], ks: Sequence[int]) -> tuple[BreakEven, ...]:
    """For the mixture and its twin, every batch and every draft length."""

    def alpha(costs: Mapping[int, float], batch: int, k: int) -> float | None:
        return break_even(cost_at(costs, batch * (k + 1)) / cost_at(costs, batch), k)

    return tuple(
        BreakEven(batch=batch, k=k, alpha=alpha(ms[0], batch, k), dense_alpha=alpha(ms[1], batch, k))
        for batch in batches
        for k in ks
    )


def _choices(
    plan: Plan, models: Sequence[Decoder], ids: Sequence[int], seed: int, name: str, progress: Progress
) -> list[Chosen]:
    progress.stage(f"{name}: what the engine chooses", len(plan.run_batches) * len(plan.rates))
    found = []
    for batch in plan.run_batches:
        prompts = [list(ids[100 * i : 100 * i + 16]) for i in range(batch)]
        for rate in plan.rates:
            runs = [_race(plan, model, prompts, rate, seed) for model in models]
            progress.advance()
            found.append(
                Chosen(
                    batch=batch,
                    rate=rate,
                    experts_k=runs[0]["auto"][1],
                    dense_k=runs[1]["auto"][1],
                    experts_gain=runs[0][0][0] / runs[0]["auto"][0],
                    dense_gain=runs[1][0][0] / runs[1]["auto"][0],
                    fixed_k=plan.fixed_k,
                    experts_fixed_gain=runs[0][0][0] / runs[0][plan.fixed_k][0],
                )
            )
    return found


def _race(
    plan: Plan, model: Decoder, prompts: Sequence[list[int]], rate: float, seed: int
) -> dict[int | str, tuple[float, float]]:
    """Seconds, and drafted tokens a step, of plain decoding, a fixed draft length and the engine's own, in turns."""
    params = SamplingParams(max_tokens=plan.tokens, ignore_eos=True)
    settings: tuple[int | str, ...] = (0, plan.fixed_k, "auto")
    plain = Engine(target=model, max_batch=len(prompts), prefix_reuse=False).generate(prompts, params)
    drafter = ScriptedDrafter(oracle([[*p, *r.token_ids] for p, r in zip(prompts, plain, strict=True)], rate, seed))
    engines = {
        k: Engine(target=model, drafter=drafter, k=k, max_batch=len(prompts), prefix_reuse=False) for k in settings
    }
    seconds: dict[int | str, float] = dict.fromkeys(settings, 0.0)
    drafted: dict[int | str, list[int]] = {k: [0, 0] for k in settings}
    for number in range(plan.rounds + 1):
        for turn in range(len(settings)):
            k = settings[(turn + number) % len(settings)]
            begun = time.perf_counter()
            results = engines[k].generate(prompts, params)
            if number:  # the first round warms up, and lets the engine learn what passes cost
                seconds[k] += time.perf_counter() - begun
                drafted[k][0] += sum(r.stats.num_draft_tokens for r in results)
                drafted[k][1] += sum(r.stats.num_steps for r in results)
    return {k: (seconds[k], drafted[k][0] / drafted[k][1]) for k in settings}


def oracle(texts: Sequence[Sequence[int]], rate: float, seed: int) -> Callable[[tuple[int, ...], int], list[int]]:
    """Proposes what the texts go on with, except that each token is wrong with probability ``1 - rate``."""
    by_start = {tuple(text[:16]): text for text in texts}

    def propose(prefix: tuple[int, ...], k: int) -> list[int]:
        text = by_start[prefix[:16]]
        right = text[len(prefix) : len(prefix) + k]
        lucky = [random.Random(f"{seed}/{prefix[:16]}/{len(prefix) + i}").random() < rate for i in range(len(right))]
        return [token if ok else (token + 1) % 2 for token, ok in zip(right, lucky, strict=True)]

    return propose
