"""Table B and the batch-size study: what calls cost, and what whole generations gain.

Everything that is compared is measured in turns within the same rounds, so that a machine that slows down slows
down all of it.
"""

from __future__ import annotations

import logging
import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch

from foredraft import Engine, SamplingParams
from foredraft.drafters.model import ModelDrafter
from foredraft.lab.acceptance import random_contexts
from foredraft.lab.progress import Progress
from foredraft.lab.rounds import Tokens
from foredraft.lab.schema import BatchRow, BatchStudy, SpeedRow, TableA, TableB
from foredraft.lab.stats import predicted_speedup, ratio_interval
from foredraft.models.base import Segment, Target

Setting = int | str
"""A draft length: 0 for plain decoding, ``auto`` for the adaptive one."""


THREADS = 1
"""Products this small gain little from a second thread, and lose much when another program wants the core."""


@contextmanager
def on_one_thread() -> Iterator[None]:
    """Runs torch on one thread, then on as many as before."""
    before = torch.get_num_threads()
    torch.set_num_threads(THREADS)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@dataclass
class Runs:
    """What one setting took, a number a round, and how many steps it made."""

    seconds: list[float] = field(default_factory=list)
    tokens: int = 0
    steps: int = 0

    @property
    def step_ms(self) -> float:
        return 1e3 * sum(self.seconds) / self.steps

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / sum(self.seconds)


def call_costs(
    target: Target, drafter: Target, context: Tokens, ks: Sequence[int], calls: int, progress: Progress
) -> tuple[dict[int, float], float]:
    """Median milliseconds of a target call by its rows (1 and every k+1), and of a draft call of one row."""
    rows = sorted({1, *(k + 1 for k in ks)})
    jobs = [(target, n) for n in rows] + [(drafter, 1)]
    slots = {id(model): _filled(model, context) for model in (target, drafter)}
    times: list[list[float]] = [[] for _ in jobs]
    progress.stage("table B: cost of calls", calls)
    for number in range(calls + 5):
        for turn in range(len(jobs)):
            job = (turn + number) % len(jobs)
            model, n = jobs[job]
            slot = slots[id(model)]
            segment = Segment(slot, list(context[:n]))
            start = time.perf_counter()
            model.forward([segment])
            elapsed = time.perf_counter() - start
            model.cache.commit(slot, 0)
            if number >= 5:  # the first ones warm up
                times[job].append(elapsed)
        progress.advance(int(number >= 5))
    for model in (target, drafter):
        model.cache.free(slots[id(model)])
    medians = [1e3 * statistics.median(t) for t in times]
    return dict(zip(rows, medians[:-1], strict=True)), medians[-1]


def _filled(model: Target, context: Tokens) -> int:
    slot = model.cache.allocate()
    model.forward([Segment(slot, list(context), len(context))])
    model.cache.commit(slot, len(context))
    return slot


def race_settings(
    target: Target,
    drafter: Target,
    settings: Sequence[Setting],
    prompts: Sequence[Sequence[Tokens]],
    tokens: int,
    seed: int,
    progress: Progress,
) -> dict[Setting, Runs]:
    """Generates for every round's prompts with every setting, in an order that rotates from round to round."""
    with without_verdicts():
        return _race(target, drafter, settings, prompts, tokens, seed, progress)


@contextmanager
def without_verdicts() -> Iterator[None]:
    """Whether speculation pays is what a study measures: the engines need not say it one by one."""
    logging.getLogger("foredraft").addFilter(_not_the_verdict)
    try:
        yield
    finally:
        logging.getLogger("foredraft").removeFilter(_not_the_verdict)


def _not_the_verdict(record: logging.LogRecord) -> bool:
    return "does not pay" not in record.getMessage()


def _race(
    target: Target,
    drafter: Target,
    settings: Sequence[Setting],
    prompts: Sequence[Sequence[Tokens]],
    tokens: int,
    seed: int,
    progress: Progress,
) -> dict[Setting, Runs]:
    batch = len(prompts[0])
    engines = {setting: _engine(target, drafter, setting, batch) for setting in settings}
    runs: dict[Setting, Runs] = {setting: Runs() for setting in settings}
    for number, round_prompts in enumerate([prompts[0], *prompts]):  # the first round warms up
        shift = number % len(settings)
        for setting in [*settings[shift:], *settings[:shift]]:
            params = [
                SamplingParams(temperature=1.0, max_tokens=tokens, seed=seed + 1000 * number + i) for i in range(batch)
            ]
            start = time.perf_counter()
            results = engines[setting].generate([list(prompt) for prompt in round_prompts], params)
            elapsed = time.perf_counter() - start
            if number:
                run = runs[setting]
                run.seconds.append(elapsed)
                run.tokens += sum(len(result.token_ids) for result in results)
                run.steps += max(result.stats.num_steps for result in results)
        progress.advance(int(number > 0))
    return runs


def _engine(target: Target, drafter: Target, setting: Setting, batch: int) -> Engine:
    """An engine of its own for each setting; prompts are always read anew."""
    return Engine(
        target=target,
        drafter=None if setting == 0 else ModelDrafter(drafter),
        k=setting,
        verify="rejection",
        max_batch=batch,
        max_step_tokens=4096,
        prefix_reuse=False,
    )


@on_one_thread()
def table_b(
    target: Target,
    drafter: Target,
    held_out: Sequence[Tokens],
    table: TableA,
    *,
    context: int,
    calls: int,
    rounds: int,
    tokens: int,
    seed: int,
    progress: Progress,
) -> TableB:
    """Measures table B for the draft lengths of table A."""
    ks = [row.k for row in table.rows]
    generator = torch.Generator().manual_seed(seed)
    [long] = random_contexts(held_out, 1, context, generator)
    target_ms, draft_ms = call_costs(target, drafter, long, ks, calls, progress)
    prompts = [random_contexts(held_out, 1, context // 2, generator) for _ in range(rounds)]
    progress.stage("table B: whole generations", rounds)
    runs = race_settings(target, drafter, [0, *ks, "auto"], prompts, tokens, seed, progress)
    c = draft_ms / target_ms[1]
    rows = []
    for row in table.rows:
        k = row.k
        step_ms = k * draft_ms + target_ms[k + 1]
        measured, interval = ratio_interval(runs[0].seconds, runs[k].seconds, seed)
        rows.append(
            SpeedRow(
                k=k,
                target_ms=target_ms[k + 1],
                tokens_per_step=row.mean_accepted + 1,
                step_ms=step_ms,
                arithmetic=(row.mean_accepted + 1) * target_ms[1] / step_ms,
                predicted=predicted_speedup(table.alpha, k, c),
                engine_step_ms=runs[k].step_ms,
                measured=measured,
                measured_interval=interval,
            )
        )
    auto, auto_interval = ratio_interval(runs[0].seconds, runs["auto"].seconds, seed)
    return TableB(
        target_ms=target_ms[1],
        draft_ms=draft_ms,
        c=c,
        threads=THREADS,
        context=context,
        calls=calls,
        rounds=rounds,
        tokens=tokens,
        plain_tokens_per_s=runs[0].tokens_per_s,
        plain_step_ms=runs[0].step_ms,
        rows=tuple(rows),
        auto=auto,
        auto_interval=auto_interval,
        best_k_arithmetic=max(rows, key=lambda r: r.arithmetic).k,
        best_k_predicted=max(rows, key=lambda r: r.predicted).k,
        best_k_measured=max(rows, key=lambda r: r.measured).k,
    )


@on_one_thread()
def batch_study(
    target: Target,
    drafter: Target,
    held_out: Sequence[Tokens],
    *,
    k: int,
    batches: Sequence[int],
    context: int,
    rounds: int,
    tokens: int,
    seed: int,
    progress: Progress,
) -> BatchStudy:
    """Gain against batch size, with draft length ``k`` and with the adaptive one."""
    generator = torch.Generator().manual_seed(seed + 1)
    progress.stage("batch sizes", rounds * len(batches))
    rows = []
    for batch in batches:
        prompts = [random_contexts(held_out, batch, context, generator) for _ in range(rounds)]
        runs = race_settings(target, drafter, [0, k, "auto"], prompts, tokens, seed, progress)
        fixed, fixed_interval = ratio_interval(runs[0].seconds, runs[k].seconds, seed)
        auto, auto_interval = ratio_interval(runs[0].seconds, runs["auto"].seconds, seed)
        rows.append(
            BatchRow(
                batch=batch,
                plain_tokens_per_s=runs[0].tokens_per_s,
                fixed_gain=fixed,
                fixed_interval=fixed_interval,
                auto_gain=auto,
                auto_interval=auto_interval,
            )
        )
    return BatchStudy(k=k, threads=THREADS, rounds=rounds, tokens=tokens, rows=tuple(rows))
