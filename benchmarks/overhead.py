"""What a step costs outside the models' forward passes, and where.

Decodes a few prompts at a fixed draft length and adds up, step by step, the wall time of ``Engine.step`` and of the
forward passes inside it (target's and drafter's). The rest is ours: scheduling, drafting without a model, sampling,
verification, commits, detokenisation, statistics.

    python benchmarks/overhead.py [--k 4] [--tokens 100]
"""

from __future__ import annotations

import argparse
import cProfile
import pstats
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

from prompts import CHAT, COPY
from record import Record

from foredraft import Engine, SamplingParams

CASES = {
    "lookup, greedy": ("lookup:3,1", SamplingParams()),
    "lookup, T=1, coupled": ("lookup:3,1", SamplingParams(temperature=1.0, seed=1)),
    "lookup, T=1, block": ("lookup:3,1", SamplingParams(temperature=1.0)),
    "lookup, T=0.8, top-p 0.95, penalties, block": (
        "lookup:3,1",
        SamplingParams(temperature=0.8, top_p=0.95, frequency_penalty=0.3, repetition_penalty=1.1),
    ),
    "model, greedy": ("model:smollm2-135m@28", SamplingParams()),
    "model, T=1, block": ("model:smollm2-135m@28", SamplingParams(temperature=1.0)),
}


class Stopwatch:
    """Adds up the time inside one function."""

    def __init__(self, inner: Callable[..., Any]) -> None:
        self.inner, self.seconds = inner, 0.0

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        started = time.perf_counter()
        try:
            return self.inner(*args, **kwargs)
        finally:
            self.seconds += time.perf_counter() - started


def measure(engine: Engine, params: SamplingParams, k: int, tokens: int) -> dict[str, Any]:
    """Step by step: wall time, forward time; medians, and the profile of the rest."""
    watches = []
    for owner in (engine.target, getattr(engine.drafter, "model", None)):
        if owner is not None:
            watch = Stopwatch(owner.forward)
            owner.forward = watch
            watches.append(watch)
    assert engine.tokenizer is not None
    shares, outside, walls = [], [], []
    profile = cProfile.Profile()
    for profiled in (False, True):
        for text in (CHAT[0], CHAT[1], COPY[0], COPY[3]):
            prompt = engine.tokenizer.chat([{"role": "user", "content": text}])
            request = engine.submit(prompt, params.model_copy(update={"max_tokens": tokens, "ignore_eos": True}))
            while request.finished_at is None:
                before = sum(watch.seconds for watch in watches)
                started = time.perf_counter()
                if profiled:
                    profile.runcall(engine.step)
                else:
                    engine.step()
                wall = time.perf_counter() - started
                inside = sum(watch.seconds for watch in watches) - before
                drafted = request.stats.trace[-1].drafted if request.stats.trace else 0
                if not profiled and drafted == k:
                    walls.append(wall)
                    outside.append(wall - inside)
                    shares.append((wall - inside) / wall)
    return {
        "steps_that_drafted_k": len(walls),
        "step_ms_median": 1e3 * statistics.median(walls),
        "outside_ms_median": 1e3 * statistics.median(outside),
        "outside_ms_p90": 1e3 * statistics.quantiles(outside, n=10)[-1],
        "outside_share_of_time": sum(outside) / sum(walls),
        "outside_share_median": statistics.median(shares),
        "profile": top(profile),
    }


def top(profile: cProfile.Profile, n: int = 14) -> list[dict[str, Any]]:
    """The dearest functions of ours by own and cumulative time (under the profiler, which inflates small calls)."""
    rows = []
    for (file, line, name), (_, calls, own, cumulative, _) in pstats.Stats(profile).stats.items():  # type: ignore[attr-defined]
        if "foredraft" in file and "/models/" not in file and "/kernels/" not in file:
            where = file[file.rindex("foredraft") :]
            rows.append({"where": f"{where}:{line} {name}", "calls": calls, "own_s": own, "total_s": cumulative})
    return sorted(rows, key=lambda row: -row["total_s"])[:n]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="smollm2-135m")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--k", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=100)
    args = parser.parse_args()
    record = Record("overhead", fresh=True)
    record.data |= {"target": args.target, "dtype": args.dtype, "k": args.k}
    for name, (drafter, params) in CASES.items():
        engine = Engine(args.target, drafter, dtype=args.dtype, k=args.k)
        part = measure(engine, params, args.k, args.tokens)
        record.put(name, part)
        print(f"{name}: {part['outside_share_median']:.2%} of a step, {part['outside_ms_median']:.2f} ms", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
