"""Every drafter on the same prompts against plain decoding, cold and warm.

Each prompt is decoded plainly and by every drafter in turn, several rounds interleaved, so that a change of the
machine's speed meets all alike; the fastest round counts. *Cold* is the first time that an engine meets a prompt
after ``Engine.reset``; *warm* the rounds after it, where drafters that keep past outputs may copy them. A combined
drafter is compared with the best of its parts, category by category: it should lose no more than 3 %.

    python benchmarks/drafters.py [--drafters lookup suffix …] [--tokens 160] [--rounds 3] [--categories chat copy]
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from prompts import CHAT, CODE, COPY, OTHER
from record import Record

from foredraft import Engine, Result, SamplingParams, SpeculationConfig
from foredraft.cli.demo_prompts import PROMPTS as DEMO
from foredraft.engine.stats import SpecStats

CATEGORIES = {"chat": CHAT, "code": CODE, "copy": COPY, "other": OTHER, "demo": [prompt.text for prompt in DEMO]}
DRAFTERS = [
    "lookup",
    "lookup-tree",
    "suffix",
    "suffix:factor=4",
    "model:smollm2-135m@28",
    "model:smollm2-135m@28,doubt=0.6",
    "eagle3",
    "combined:suffix+model:smollm2-135m@28",
    "combined:suffix+eagle3",
]
LOSS = 0.03


@dataclass
class Tally:
    """One drafter on one category: seconds of the fastest round of every prompt, and pooled counts."""

    tokens: int = 0
    seconds: float = 0.0
    plain_seconds: float = 0.0
    same: int = 0
    prompts: int = 0
    stats: SpecStats = field(default_factory=SpecStats)

    def add(self, results: Sequence[Result], plain: Sequence[Result]) -> None:
        best = min(results, key=seconds)
        self.tokens += len(best.token_ids) - 1
        self.seconds += seconds(best)
        self.plain_seconds += min(map(seconds, plain))
        self.same += all(result.token_ids == plain[0].token_ids for result in results)
        self.prompts += 1
        for result in results:
            self.stats.merge(result.stats)

    def report(self) -> dict[str, Any]:
        return {
            "tokens_per_second": self.tokens / self.seconds,
            "speedup": self.plain_seconds / self.seconds,
            "alpha": self.stats.draft_acceptance_rate,
            "tau": self.stats.mean_acceptance_length,
            "tokens_per_step": self.stats.tokens_per_step,
            "same_as_plain": f"{self.same}/{self.prompts}",
        }


def seconds(result: Result) -> float:
    return result.timings.decode_s


def measure(engines: dict[str, Engine], texts: Sequence[str], tokens: int, rounds: int, k: int | str) -> dict[str, Any]:
    """Cold and warm figures of every drafter on one category."""
    tallies = {name: {"cold": Tally(), "warm": Tally()} for name in engines if name != "plain"}
    params = SamplingParams(max_tokens=tokens, ignore_eos=True)
    speculation = SpeculationConfig(k=k)  # type: ignore[arg-type]
    for text in texts:
        tokenizer = engines["plain"].tokenizer
        assert tokenizer is not None
        prompt = tokenizer.chat([{"role": "user", "content": text}])
        runs: dict[str, list[Result]] = {name: [] for name in engines}
        for engine in engines.values():
            engine.reset()
        for _ in range(rounds):
            for name, engine in engines.items():
                runs[name] += engine.generate([prompt], params, speculation=speculation)
        for name, tally in tallies.items():
            tally["cold"].add(runs[name][:1], runs["plain"])
            tally["warm"].add(runs[name][1:] or runs[name], runs["plain"])
    return {name: {part: tally.report() for part, tally in parts.items()} for name, parts in tallies.items()}


def losses(categories: dict[str, dict[str, Any]]) -> dict[str, dict[str, float]]:
    """By how much each combined drafter is slower (positive) than the best of its parts, and than plain decoding."""
    found: dict[str, dict[str, float]] = {}
    for category, reports in categories.items():
        for name, report in reports.items():
            if name.startswith("combined:"):
                parts = [part for part in reports if part != name and part in name.removeprefix("combined:")]
                best = max([1.0, *(reports[part]["warm"]["speedup"] for part in parts)])
                found.setdefault(name, {})[category] = 1 - report["warm"]["speedup"] / best
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="smollm2-135m")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--activations", default="int8", help="float32, int16 or int8")
    parser.add_argument("--drafters", nargs="+", default=DRAFTERS)
    parser.add_argument("--categories", nargs="+", default=list(CATEGORIES), choices=list(CATEGORIES))
    parser.add_argument("--prompts", type=int, default=4, help="of each category")
    parser.add_argument("--tokens", type=int, default=160)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--k", default="auto")
    parser.add_argument("--name", default="drafters")
    args = parser.parse_args()
    k = args.k if args.k == "auto" else int(args.k)
    options = {"dtype": args.dtype, "activations": args.activations, "max_batch": 1, "prefix_reuse": False}
    engines = {
        name: Engine(args.target, None if name == "plain" else name, **options) for name in ["plain", *args.drafters]
    }
    for engine in engines.values():  # page in weights, learn what passes cost
        engine.generate(["Once upon a time"], SamplingParams(max_tokens=40))
    record = Record(args.name, fresh=True)
    record.data |= {"target": args.target, "k": k, "tokens": args.tokens, "rounds": args.rounds, **options}
    for category in args.categories:
        part = measure(engines, CATEGORIES[category][: args.prompts], args.tokens, args.rounds, k)
        record.put(category, part)
        for name, report in part.items():
            cold, warm = report["cold"], report["warm"]
            print(
                f"{category:6} {name:40} cold {cold['speedup']:5.2f} warm {warm['speedup']:5.2f} times plain, "
                f"alpha {warm['alpha'] or 0:.2f}, tau {warm['tau'] or 1:.2f}, same text {warm['same_as_plain']}",
                flush=True,
            )
    record.data["combined_loss"] = losses(record.data["parts"])
    record.save()
    worst = max((loss for by in record.data["combined_loss"].values() for loss in by.values()), default=0.0)
    print(f"combined drafters lose at most {worst:.1%} against the best of their parts (allowed: {LOSS:.0%})")
    return int(worst > LOSS)


if __name__ == "__main__":
    sys.exit(main())
