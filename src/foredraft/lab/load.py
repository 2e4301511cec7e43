"""``foredraft lab load``: who decides how much a batch drafts: nobody, each request, or the batch, before or after.

Two settings. In the first target and drafter are tables and the clock is reckoned: a pass costs what a formula says, so
that the comparison has no noise and a machine is free to be one on which rows are free up to a number. In the second a
real model runs on this machine, with its EAGLE-3 head and with prompt lookup.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch

from foredraft import Engine, SamplingParams
from foredraft.config import SpeculationConfig
from foredraft.drafters.base import Drafter, DrafterContext
from foredraft.drafters.model import ModelDrafter
from foredraft.drafters.registry import create
from foredraft.engine.controller import Candidate, Controller
from foredraft.engine.load import CONFIDENCE_FROM, PRIOR, LoadAware
from foredraft.engine.result import Result
from foredraft.errors import ConfigError
from foredraft.lab.load_page import PICTURES, page, summary
from foredraft.lab.load_schema import LoadStudy, PolicyRow, Setting, Trusted
from foredraft.lab.progress import NoProgress, Progress
from foredraft.lab.speed import without_verdicts
from foredraft.lab.stats import ratio_interval
from foredraft.lab.study import StudyReport, load_now, must_be_writable, origin_of, timed, write_study
from foredraft.models.base import ForwardOutput, Segment
from foredraft.models.catalog import resolve
from foredraft.models.loading import LoadedModel, load_model
from foredraft.testing import TableModel

POLICIES = ("plain", "k = 2", "k = 4", "each alone", "auto", "k = 4, admitted", "auto, admitted")
"""``each alone``: every request picks its own length, as if the pass were its own; ``auto``: the batch's best by past
acceptance; ``admitted``: drafts are made first, and :func:`~foredraft.engine.load.admit` decides what is verified."""
VOCAB = 12


@dataclass(frozen=True, slots=True)
class Plan:
    """How large a study is."""

    batches: tuple[int, ...]
    table_tokens: int
    table_requests: int
    real_batches: tuple[int, ...]
    real_tokens: int
    rounds: int


FULL = Plan(
    batches=(1, 2, 4, 8, 16, 32),
    table_tokens=120,
    table_requests=8,
    real_batches=(1, 4, 16, 32),
    real_tokens=20,
    rounds=2,
)
QUICK = Plan(batches=(1, 4), table_tokens=16, table_requests=4, real_batches=(), real_tokens=4, rounds=1)
"""Seconds instead of minutes: to see that everything runs, not to learn anything from."""


class Alone(Controller):
    """Every request picks the length that is best for itself, with the pass to itself."""

    def _optimum(self, candidates: Sequence[Candidate], base_rows: int) -> list[int]:
        return [super(Alone, self)._optimum([candidate], 1)[0] for candidate in candidates]


@dataclass
class Clock:
    """A reckoned clock."""

    now: float = 0.0

    def __call__(self) -> float:
        return self.now


class Reckoned(TableModel):
    """A table whose passes take ``cost(rows)`` on a reckoned clock."""

    def __init__(self, logits: Callable[[tuple[int, ...]], list[float]], clock: Clock, cost: Callable[[int], float]):
        super().__init__(logits, VOCAB)
        self.clock, self.cost = clock, cost

    def forward(self, segments: Sequence[Segment], taps: Sequence[int] = ()) -> ForwardOutput:
        self.clock.now += self.cost(sum(len(segment.tokens) for segment in segments))
        return super().forward(segments, taps)


def target_cost(rows: int) -> float:
    """Reading bounds it up to 16 rows, then arithmetic does: milliseconds."""
    return 10.0 * max(1.0, rows / 16)


def draft_cost(rows: int) -> float:
    """A drafter of a thirtieth of the weights."""
    return target_cost(rows) / 30


def tables(seed: int) -> tuple[Callable[[tuple[int, ...]], list[float]], Callable[[tuple[int, ...]], list[float]]]:
    """Logits of target and drafter: alike and sure at easy places, unlike and unsure at hard ones."""

    @cache
    def of(tail: tuple[int, ...], phase: int, drafter: bool) -> tuple[float, ...]:
        place = random.Random(f"{seed}/{tail}/{phase}")
        easy = place.random() < 0.6
        common = [place.gauss(0, 4.0 if easy else 1.0) for _ in range(VOCAB)]
        own = random.Random(f"{seed}/{tail}/{phase}/{drafter}")
        return tuple(x + own.gauss(0, 0.4 if easy else 1.2) for x in common)

    def logits(drafter: bool) -> Callable[[tuple[int, ...]], list[float]]:
        return lambda prefix: list(of(tuple(prefix[-2:]), len(prefix) % 7, drafter))

    return logits(False), logits(True)


def run_load(
    out_dir: Path, *, seed: int = 0, quick: bool = False, progress: Progress | None = None
) -> StudyReport[LoadStudy]:
    """Measures, and writes ``load.json``, ``load.html`` and the picture.

    Args:
        out_dir: Folder for the results; made if missing.
        seed: Of tables and draws.
        quick: A toy version that takes seconds; it runs the tables alone.
        progress: Told about every stage.

    Raises:
        ConfigError: ``out_dir`` cannot be written, or the real model is not on this machine.
    """
    must_be_writable(out_dir)
    with without_verdicts():
        found = study(QUICK if quick else FULL, seed, quick, progress or NoProgress())
    return write_study(out_dir, "load", found, page(found), summary(found), PICTURES)


def study(plan: Plan, seed: int, quick: bool, progress: Progress) -> LoadStudy:
    """Runs the whole study and returns its tables."""
    seconds: dict[str, float] = {}
    load_before = load_now()
    if plan.real_batches and resolve("smollm2-135m") is None:
        raise ConfigError(
            "the real model is not here", field="smollm2-135m", remedy="foredraft models fetch smollm2-135m"
        )
    with timed("tables", seconds):
        settings = [_on_tables(plan, seed, progress)]
    if plan.real_batches:
        loaded = load_model("smollm2-135m")
        for name in ("eagle3", "lookup"):
            with timed(name, seconds):
                settings.append(_on_a_model(plan, loaded, name, seed, progress))
    return LoadStudy(
        seed=seed,
        quick=quick,
        settings=tuple(settings),
        rounds=plan.rounds,
        tokens=plan.real_tokens,
        threads=torch.get_num_threads(),
        seconds=seconds,
        load_before=load_before,
        provenance=origin_of(quick),
    )


def engine_for(target: object, drafter: Drafter, policy: str, batch: int, clock: Callable[[], float]) -> Engine:
    """An engine that decides by this policy."""
    name, _, admitted = policy.partition(", ")
    k: int | str = 0 if name == "plain" else int(name[4:]) if name.startswith("k = ") else "auto"
    wrapped = LoadAware(drafter) if admitted else drafter
    engine = Engine(
        target=target,  # type: ignore[arg-type]
        drafter=None if name == "plain" else wrapped,
        k=k,
        max_k=8,
        verify="block",
        max_batch=batch,
        prefix_reuse=False,
        clock=clock,
    )
    if isinstance(wrapped, LoadAware):
        wrapped.passes = engine.controller.passes
    if name == "each alone":
        alone = Alone()
        engine.controller = engine.scheduler.loop.controller = engine.watch.controller = alone
    return engine


def warm_up(engine: Engine, prompts: Sequence[list[int] | str], batch: int, tokens: int) -> None:
    """Lets the engine see what passes of few and of many rows cost: a policy cannot choose what it has no price of."""
    params = SamplingParams(temperature=1.0, max_tokens=tokens, ignore_eos=True)
    for k in (0, 1, 4) if engine.drafter is not None else (0,):
        engine.generate([prompts[i % len(prompts)] for i in range(batch)], params, speculation=SpeculationConfig(k=k))


def _on_tables(plan: Plan, seed: int, progress: Progress) -> Setting:
    progress.stage("tables", len(plan.batches) * len(POLICIES))
    p, q = tables(seed)
    rows: list[PolicyRow] = []
    records: list[tuple[float, bool]] = []
    for batch in plan.batches:
        speeds: dict[str, float] = {}
        for policy in POLICIES:
            clock = Clock()
            drafter = ModelDrafter(Reckoned(q, clock, draft_cost))
            engine = engine_for(Reckoned(p, clock, target_cost), drafter, policy, batch, clock)
            warm_up(engine, [[1, 2]], batch, 8)
            start = clock.now
            requests = max(plan.table_requests, 2 * batch)
            params = [
                SamplingParams(temperature=1.0, max_tokens=plan.table_tokens, seed=seed + i) for i in range(requests)
            ]
            results = engine.generate([[i % VOCAB, (i // VOCAB) % VOCAB] for i in range(requests)], params)
            speeds[policy] = sum(len(r.token_ids) for r in results) / (clock.now - start)
            drafted, accepted = _per_step(results)
            gain = speeds[policy] / speeds["plain"]
            rows.append(
                PolicyRow(batch=batch, policy=policy, gain=gain, interval=None, drafted=drafted, accepted=accepted)
            )
            if isinstance(engine.drafter, LoadAware):
                records += engine.drafter.records
            progress.advance(1, policy)
    text = (
        f"Tables of {VOCAB} tokens on a reckoned clock: a pass takes 10 ms up to 16 rows and grows with them beyond, "
        "a draft pass a thirtieth of that; six places in ten are easy for the drafter, and it is sure there."
    )
    return Setting(name="tables", text=text, rows=tuple(rows), trust=_trust(records))


def _per_step(results: Sequence[Result]) -> tuple[float, float]:
    stats = [result.stats for result in results]
    steps = sum(s.num_steps for s in stats)
    return sum(s.num_draft_tokens for s in stats) / steps, sum(s.num_accepted_draft_tokens for s in stats) / steps


def _trust(records: Sequence[tuple[float, bool]]) -> tuple[Trusted, ...]:
    edges = (*CONFIDENCE_FROM, 1.01)
    found = []
    for i, prior in enumerate(PRIOR):
        hits = [hit for confidence, hit in records if edges[i] <= confidence < edges[i + 1]]
        share = sum(hits) / len(hits) if hits else None
        found.append(Trusted(confidence_from=edges[i], tokens=len(hits), accepted=share, prior=prior))
    return tuple(found)


PROMPTS = (
    "The history of the city begins with",
    "A recipe for bread: mix flour, water, salt and yeast.",
    "Photosynthesis is the process by which",
    "def add(a, b):\n    return a + b\n\n\ndef sub(a, b):\n    return",
    "Dear Sir or Madam, I am writing to you because",
    "The cat sat on the mat. The cat sat on the mat. The cat",
    "In mathematics, a prime number is",
    "Once upon a time there was a",
)


def _on_a_model(plan: Plan, loaded: LoadedModel, name: str, seed: int, progress: Progress) -> Setting:
    """A real model; sampled requests with the head, greedy ones with lookup, whose copies carry no law."""
    greedy = name == "lookup"
    policies = [policy for policy in POLICIES if not (greedy and policy.endswith("admitted"))]
    progress.stage(f"{name} on a real model", len(plan.real_batches) * (plan.rounds + 1))
    rows: list[PolicyRow] = []
    records: list[tuple[float, bool]] = []
    for batch in plan.real_batches:
        engines = {
            policy: engine_for(loaded, _drafter(name, loaded), policy, batch, time.perf_counter) for policy in policies
        }
        for engine in engines.values():
            warm_up(engine, PROMPTS, batch, 4)
        seconds: dict[str, list[float]] = {policy: [] for policy in policies}
        results: dict[str, list[Result]] = {policy: [] for policy in policies}
        for number in range(-1, plan.rounds):  # round -1 warms up
            shift = number % len(policies)
            for policy in [*policies[shift:], *policies[:shift]]:
                params = [
                    SamplingParams(
                        temperature=0.0 if greedy else 1.0,
                        max_tokens=plan.real_tokens,
                        ignore_eos=True,
                        seed=seed + 1000 * (number + 1) + i,
                    )
                    for i in range(batch)
                ]
                start = time.perf_counter()
                done = engines[policy].generate([PROMPTS[i % len(PROMPTS)] for i in range(batch)], params)
                if number >= 0:
                    seconds[policy].append(time.perf_counter() - start)
                    results[policy] += done
            progress.advance(int(number >= 0))
        for policy in policies:
            gain, interval = ratio_interval(seconds["plain"], seconds[policy], seed)
            drafted, accepted = _per_step(results[policy])
            rows.append(
                PolicyRow(batch=batch, policy=policy, gain=gain, interval=interval, drafted=drafted, accepted=accepted)
            )
        records += [r for e in engines.values() if isinstance(e.drafter, LoadAware) for r in e.drafter.records]
    text = (
        "SmolLM2-135M with prompt lookup, greedy; copies carry no law, so there is nothing to admit by."
        if greedy
        else "SmolLM2-135M with its EAGLE-3 head, temperature 1, block verification."
    )
    return Setting(name=name, text=text, rows=tuple(rows), trust=_trust(records))


def _drafter(name: str, loaded: LoadedModel) -> Drafter:
    return create(name, DrafterContext(loaded.target, loaded.tokenizer))
