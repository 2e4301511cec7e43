"""The gallery: every drafter under every verification rule on the same prompts, with acceptance, speed, memory and law.

Greedy requests are verified by exact match; at temperature 1 each of the three other rules has its turn. For every
prompt the drafters take turns, plain decoding first, so that a change of the machine's speed meets all alike:

- k=4 gives acceptance rate (α) and mean acceptance length (τ), which then compare between drafters;
- k=auto gives the speed, after ``Engine.reset`` (*cold*) and once more for drafters that keep past outputs (*warm*).

*Same text*: greedy and seeded texts must be plain decoding's, token for token. *Law*: under rejection and block
verification the place of every written token in the target's law, likeliest tokens first, must be uniform between 0
and 1 (a Kolmogorov-Smirnov test), and its surprise, -log p, must be the law's entropy on average (a z-test); the
smaller p counts, twice. A control that must fail is in the table, too.

Results go to ``results/drafters.json``, one part a prompt and drafter: an interrupted run goes on where it stopped, and
a drafter that is new is measured alone. ``docs/gallery.md`` and its picture are written from it.

    python benchmarks/drafters.py [--tokens 48] [--prompts 1] [--drafters lookup suffix …] [--fresh] [--page]
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import os
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gallery
import torch
from prompts import CHAT, CODE, COPY, OTHER
from record import Record
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from foredraft import Engine, Result, SamplingParams, SpeculationConfig
from foredraft.errors import ForedraftError
from foredraft.models import catalog
from foredraft.models.base import Segment
from foredraft.models.loading import LoadedModel, load_model

CATEGORIES = {"chat": CHAT, "code": CODE[1:], "copy": COPY[2:], "table": OTHER[2:]}
RULES = ("exact", "rejection", "block", "coupled")
GROUPS = {
    "smollm2-135m": (
        "lookup",
        "lookup-tree",
        "suffix",
        "suffix:tree",
        "model:smollm2-135m@28",
        "model:smollm2-135m@28,doubt=0.6",
        "tree:smollm2-135m@28",
        "early-exit",
        "eagle3",
        "tree:eagle3",
        "vocabulary:smollm2-135m@28,intersection",
        "vocabulary:smollm2-135m@28,text",
        "combined:suffix+eagle3",
        "combined:suffix+model:smollm2-135m@28",
    ),
    "qwen2.5-coder-0.5b": (
        "lookup",
        "vocabulary:smollm2-135m,intersection",
        "vocabulary:smollm2-135m,text",
    ),
}
"""Targets and their drafters. The second target has another tokenizer than its drafter; it gets one prompt, of code."""
NOT_SHOWN = {
    "eagle1": "no head of that kind comes with either target; eagle1:FOLDER runs one of your own (drafters.md)",
    "encoder-decoder": "drafts for encoder-decoder targets only (model-families.md)",
}
"""Registered drafters without a row, and why."""
CONTROL = 0.5
FIXED = 4
PLAIN_EVERY = 4


@dataclass(frozen=True, slots=True)
class Place:
    """One prompt under one rule; ``number`` seeds its requests."""

    rule: str
    category: str
    number: int
    text: str

    @property
    def params(self) -> dict[str, Any]:
        return {} if self.rule == "exact" else {"temperature": 1.0, "seed": self.number}


def places(categories: Sequence[str], prompts: int) -> list[Place]:
    return [
        Place(rule, category, number, text)
        for category in categories
        for number, text in enumerate(CATEGORIES[category][:prompts])
        for rule in RULES
    ]


class Gallery:
    """One target and its engines, made when a cell first needs them; all share the target's weights."""

    def __init__(self, target: str, options: argparse.Namespace, record: Record) -> None:
        self.name, self.options, self.record = target, options, record
        self.engines: dict[str, Engine | None] = {}
        self._loaded: LoadedModel | None = None

    @property
    def loaded(self) -> LoadedModel:
        if self._loaded is None:
            self._loaded = load_model(self.name, dtype=self.options.dtype, activations=self.options.activations)
        return self._loaded

    def engine(self, drafter: str) -> Engine | None:
        """The drafter's engine after a first text, its memory noted; None if it is refused, the reason noted."""
        if drafter not in self.engines:
            loaded = self.loaded
            before = resident()
            try:
                engine = Engine(
                    loaded,
                    None if drafter == "plain" else drafter,
                    dtype=self.options.dtype,
                    max_batch=1,
                    prefix_reuse=False,
                )
                engine.generate(["Once upon a time"], SamplingParams(max_tokens=40))  # learns what passes cost
            except ForedraftError as error:
                self.engines[drafter] = None
                self.record.data["refused"][f"{self.name}/{drafter}"] = str(error)
                return None
            self.engines[drafter] = engine
            self.record.data["memory"][f"{self.name}/{drafter}"] = max(resident() - before, 0)
        return self.engines[drafter]

    def visit(self, place: Place, drafters: Sequence[str]) -> Iterator[tuple[str, dict[str, Any]]]:
        """Plain decoding and each drafter on one prompt: a row each, as soon as it is measured."""
        plain = self.engine("plain")
        assert plain is not None
        assert plain.tokenizer is not None
        prompt = plain.tokenizer.chat([{"role": "user", "content": place.text}])
        params = SamplingParams(max_tokens=self.options.tokens, ignore_eos=True, **place.params)
        base = self._plain(plain, prompt, params)
        yield "plain", {"rate": rate(base), **self.law(prompt, base, place)}
        for turn, drafter in enumerate(drafters):
            engine = self.engine(drafter)
            if engine is None:
                continue
            if turn % PLAIN_EVERY == PLAIN_EVERY - 1:  # a machine that changes its speed spoils no ratio for long
                base = self._plain(plain, prompt, params)
            try:
                row = self._row(engine, place, prompt, params, base)
            except ForedraftError as error:
                row = {"refused": str(error)}
            yield drafter, row
        if place.rule == "rejection" and self.name == next(iter(GROUPS)):
            other = SamplingParams(max_tokens=self.options.tokens, ignore_eos=True, temperature=CONTROL)
            wrong = plain.generate([prompt], other)[0]
            yield "control", self.law(prompt, wrong, place)

    def _plain(self, plain: Engine, prompt: Sequence[int], params: SamplingParams) -> Result:
        """The faster of two runs: one that was disturbed would flatter every drafter after it."""
        return max((plain.generate([prompt], params)[0] for _ in range(2)), key=rate)

    def _row(
        self, engine: Engine, place: Place, prompt: Sequence[int], params: SamplingParams, base: Result
    ) -> dict[str, Any]:
        verify = "auto" if place.rule == "exact" else place.rule
        runs = []
        for k, cold in ((FIXED, True), ("auto", True), ("auto", False)):
            if cold:
                engine.reset()
            runs.append(engine.generate([prompt], params, speculation=SpeculationConfig(k=k, verify=verify))[0])  # type: ignore[arg-type]
        fixed, auto, warm = runs
        stats = fixed.stats
        row: dict[str, Any] = {
            "drafted": stats.num_draft_tokens,
            "accepted": stats.num_accepted_draft_tokens,
            "steps": stats.num_spec_steps,
            "all_steps": stats.num_steps,
            "cold": rate(auto) / rate(base),
            "warm": rate(warm) / rate(base),
            "k": (auto.stats.num_draft_tokens / auto.stats.num_steps) if auto.stats.num_steps else 0.0,
        }
        if place.rule in ("exact", "coupled"):
            row["same"] = sum(run.token_ids == base.token_ids for run in runs)
        else:
            row |= self.law(prompt, fixed, place)
        return row

    def law(self, prompt: Sequence[int], result: Result, place: Place) -> dict[str, list[float]]:
        """How the written tokens, the first apart, lie in the target's law.

        Returns:
            ``places``: of each the probability of likelier ones plus a random share of its own. ``surprise``: the sum
            of -log p of them over the entropies, and the variance of that sum.
        """
        if place.rule == "exact":
            return {}
        target, ids = self.loaded.target, [*prompt, *result.token_ids]
        slot = target.cache.allocate()
        try:
            logits = target.forward([Segment(slot, ids[:-1], len(prompt))]).logits[0]
        finally:
            target.cache.commit(slot, 0)
            target.cache.free(slot)
        log = logits.double().log_softmax(-1)
        p, rows = log.exp(), range(len(log))
        written = ids[len(prompt) + 1 :]
        own = p[rows, written][:, None]
        share = torch.rand(len(p), generator=torch.Generator().manual_seed(place.number), dtype=torch.float64)
        places = (p * (p > own)).sum(-1) + share * (p * (p == own)).sum(-1)
        weighed = p * log.clamp_min(-1e4)  # 0 · -inf is 0
        entropy = -weighed.sum(-1)
        excess = -log[rows, written] - entropy
        variance = (weighed * log.clamp_min(-1e4)).sum(-1) - entropy**2
        return {
            "places": [round(value, 5) for value in places.tolist()],
            "surprise": [float(excess.sum()), float(variance.sum())],
        }


def rate(result: Result) -> float:
    """Tokens a second, the first token's pass apart."""
    return (len(result.token_ids) - 1) / result.timings.decode_s


def resident() -> int:
    """Bytes of this process that lie in memory, after what was freed has been given back."""
    gc.collect()
    if sys.platform == "linux":
        ctypes.CDLL(None).malloc_trim(0)
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return 0


def run(options: argparse.Namespace, record: Record) -> None:
    work = []
    for target, drafters in GROUPS.items():
        if options.target not in (None, target):
            continue
        if catalog.find(target) is not None and catalog.resolve(target) is None:
            record.data["refused"][f"{target}/all"] = f"not here: foredraft models fetch {target}"
            continue
        first = target == next(iter(GROUPS))
        wanted = options.categories if first else [c for c in options.categories if c == "code"]
        chosen = [name for name in drafters if not options.drafters or name in options.drafters]
        for place in places(wanted, options.prompts if first else 1):
            key = f"{target}/{place.rule}/{place.category}/{place.number}/"
            missing = [name for name in chosen if not record.has(key + name)]
            if missing:
                work.append((target, place, key, missing))
    made: Gallery | None = None
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns) as progress:
        task = progress.add_task("rows", total=sum(len(missing) for *_, missing in work))
        for target, place, key, missing in work:
            if made is None or made.name != target:
                made = None  # its memory is given back first
                made = Gallery(target, options, record)
            progress.update(task, description=f"{target}, {place.category}, {place.rule}")
            started = time.perf_counter()
            for drafter, row in made.visit(place, missing):
                record.data["seconds"] += time.perf_counter() - started
                started = time.perf_counter()
                if drafter in missing or not record.has(key + drafter):
                    record.put(key + drafter, row)
                progress.advance(task, drafter in missing)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", choices=list(GROUPS), help="only this one")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--activations", default="int8", help="float32, int16 or int8")
    parser.add_argument("--drafters", nargs="+", help="only these")
    parser.add_argument("--categories", nargs="+", default=list(CATEGORIES), choices=list(CATEGORIES))
    parser.add_argument("--prompts", type=int, default=1, help="of each category")
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--name", default="drafters")
    parser.add_argument("--fresh", action="store_true", help="forget what was measured before")
    parser.add_argument("--page", action="store_true", help="measure nothing; write the page from what is there")
    options = parser.parse_args()
    record = Record(options.name, options.fresh)
    settings = {key: getattr(options, key) for key in ("dtype", "activations", "prompts", "tokens")}
    if record.data.setdefault("settings", settings) != settings and not options.page:
        print(f"kept results were measured with {record.data['settings']}; give the same, or --fresh", file=sys.stderr)
        return 2
    record.data.setdefault("memory", {})
    if not options.page:
        record.data["refused"] = {}  # what was missing may be here by now
    record.data.setdefault("seconds", 0.0)
    if not options.page:
        run(options, record)
    record.data["not_shown"] = NOT_SHOWN
    record.data["drafters"] = {target: list(drafters) for target, drafters in GROUPS.items()}
    record.data["summary"] = gallery.summary(record.data)
    record.save()
    print(gallery.write(record.data))
    print(f"measured in {record.data['seconds'] / 60:.1f} minutes")
    return int(bool(record.data["summary"]["faults"]))


if __name__ == "__main__":
    sys.exit(main())
