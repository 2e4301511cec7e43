"""The law on the real model at T = 1: two-sample tests of the first tokens, speculative against plain.

Each rule decodes the same prompt many times with independent seeds; the counts of the second token, the third, and
the pair are compared with plain decoding's by a chi-square test (cells expected under 5 are pooled). The first token
comes from the prompt's own pass, the others from verified drafts.

    python benchmarks/law.py [--samples 20000] [--k 2]

Interrupted runs go on where they stopped (``--fresh`` starts over).
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from typing import Any

from record import Record
from rich.progress import Progress

from foredraft import Engine, SamplingParams, SpeculationConfig
from foredraft.testing.stats import total_variation, two_sample

PROMPT = "The"
SEEDS = {"plain": 0, "block": 3, "rejection": 2, "coupled": 4}
CHUNK = 1000


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="smollm2-135m")
    parser.add_argument("--drafter", default="model:smollm2-135m@28")
    parser.add_argument("--samples", type=int, default=20_000)
    parser.add_argument("--k", type=int, default=2)
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--fresh", action="store_true")
    parser.add_argument("--summary", action="store_true", help="only sum up what is there")
    args = parser.parse_args()

    record = Record("law", args.fresh)
    record.data |= {key: getattr(args, key) for key in ("target", "drafter", "samples", "k", "temperature")}
    record.data["prompt"] = PROMPT
    if args.summary:
        finish(record)
        return 0
    engine = Engine(args.target, args.drafter, max_batch=64, dtype="float32")
    with Progress() as progress:
        task = progress.add_task("samples", total=args.samples * len(SEEDS))
        for name, stream in SEEDS.items():
            for start in range(0, args.samples, CHUNK):
                part = f"{name}/{start}"
                if not record.has(part):
                    record.put(part, sample(engine, name, stream, start, args))
                progress.advance(task, CHUNK)
    finish(record)
    for name, row in record.data["summary"].items():
        print(name, row)
    return int(any(row["p_smallest"] < 1e-3 for row in record.data["summary"].values()))


def sample(engine: Engine, name: str, stream: int, start: int, args: argparse.Namespace) -> dict[str, object]:
    """One chunk: ``[second, third]`` tokens of every sample, and how drafting went."""
    plain = name.startswith("plain")
    each = [
        SamplingParams(temperature=args.temperature, max_tokens=4, seed=(stream << 40) + start + i, ignore_eos=True)
        for i in range(CHUNK)
    ]
    speculation = SpeculationConfig(k=0 if plain else args.k, verify="rejection" if plain else name)
    results = engine.generate([PROMPT] * CHUNK, each, speculation=speculation)
    return {
        "tokens": [result.token_ids[1:3] for result in results],
        "drafted": sum(result.stats.num_draft_tokens for result in results),
        "accepted": sum(result.stats.num_accepted_draft_tokens for result in results),
    }


def finish(record: Record) -> None:
    """Writes p-values and total variation of each rule against plain decoding, over the samples that are there."""
    parts: dict[str, list[dict[str, Any]]] = {name: [] for name in SEEDS}
    for part, value in record.data["parts"].items():
        parts[part.split("/")[0]].append(value)
    tokens = {name: [tuple(pair) for part in found for pair in part["tokens"]] for name, found in parts.items()}
    views = {"second": lambda pair: pair[0], "third": lambda pair: pair[1], "pair": lambda pair: pair}
    rows: dict[str, dict[str, float]] = {}
    for name in SEEDS:
        if name == "plain" or not tokens[name]:
            continue
        row: dict[str, float] = {"samples": len(tokens[name]), "plain_samples": len(tokens["plain"])}
        for view, of in views.items():
            a, b = Counter(map(of, tokens["plain"])), Counter(map(of, tokens[name]))
            keys = list(a | b)
            test = two_sample([a[key] for key in keys], [b[key] for key in keys])
            row[f"p_{view}"], row[f"dof_{view}"] = test.p_value, test.dof
            row[f"tv_{view}"] = total_variation([a[key] for key in keys], [b[key] for key in keys])
        row["p_smallest"] = min(row[f"p_{view}"] for view in views)
        drafted = sum(part["drafted"] for part in parts[name])
        row["acceptance_rate"] = sum(part["accepted"] for part in parts[name]) / drafted if drafted else 0.0
        rows[name] = row
    record.data["summary"] = rows
    record.save()


if __name__ == "__main__":
    sys.exit(main())
