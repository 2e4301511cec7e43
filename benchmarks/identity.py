"""Greedy identity on the real model: speculative text against plain text, token by token.

Every combination of dtype, drafter, draft length and batch size decodes the same prompts; plain decoding of each
prompt alone is the reference. Where a text differs, the position and the gap between plain decoding's two best
logits there are recorded: a difference is a near-tie only if that gap is under the stated tolerance.

    python benchmarks/identity.py [--dtypes float32 bfloat16] [--k 1 2 … 8] [--batches 1 8] [--tokens 200]

Interrupted runs go on where they stopped (``--fresh`` starts over).
"""

from __future__ import annotations

import argparse
import sys
import time
from typing import Any

import torch
from prompts import PROMPTS
from record import Record
from rich.progress import Progress

from foredraft import Engine, SamplingParams, SpeculationConfig
from foredraft.models.base import Segment

TOLERANCE = {"float32": 0.0, "bfloat16": 0.25}
"""Largest top-2 logit gap at which a difference counts as a near-tie, by dtype."""


def gap(engine: Engine, ids: list[int]) -> float:
    """Plain decoding's top-2 logit gap after ``ids``."""
    slot = engine.target.cache.allocate()
    try:
        row = engine.target.forward([Segment(slot, ids, len(ids) - 1)]).logits[0][0]
    finally:
        engine.target.cache.free(slot)
    best = torch.topk(row.float(), 2).values
    return float(best[0] - best[1])


def compare(engine: Engine, prompt: list[int], plain: list[int], spec: list[int]) -> dict[str, Any] | None:
    """None if identical, else the first difference."""
    if plain == spec:
        return None
    at = next((i for i, (a, b) in enumerate(zip(plain, spec, strict=False)) if a != b), min(len(plain), len(spec)))
    return {"position": at, "gap": gap(engine, prompt + plain[:at])}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="smollm2-135m")
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--drafters", nargs="+", default=["lookup:3,1", "model:smollm2-135m@28"])
    parser.add_argument("--k", nargs="+", type=int, default=list(range(1, 9)))
    parser.add_argument("--batches", nargs="+", type=int, default=[8, 1])
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--name", default="identity")
    parser.add_argument("--fresh", action="store_true")
    args = parser.parse_args()

    record = Record(args.name, args.fresh)
    record.data |= {"target": args.target, "tokens": args.tokens, "prompts": len(PROMPTS), "tolerance": TOLERANCE}
    params = SamplingParams(max_tokens=args.tokens, ignore_eos=True)
    combos = [(d, b, dr) for d in args.dtypes for b in args.batches for dr in args.drafters]
    with Progress() as progress:
        task = progress.add_task("identity", total=len(combos) * len(args.k))
        for dtype in args.dtypes:
            reference = Engine(args.target, dtype=dtype, prefix_reuse=False, max_batch=1)
            tokenizer = reference.tokenizer
            assert tokenizer is not None
            prompts = [tokenizer.chat([{"role": "user", "content": text}]) for text in PROMPTS]
            part = f"{dtype}/plain"
            if not record.has(part):
                started = time.perf_counter()
                texts = [r.token_ids for r in reference.generate(prompts, params)]
                record.put(part, {"seconds": time.perf_counter() - started, "token_ids": texts})
            plain = record.data["parts"][part]["token_ids"]
            for batch in args.batches:
                for drafter in args.drafters:
                    todo = [k for k in args.k if not record.has(f"{dtype}/batch {batch}/{drafter}/k={k}")]
                    progress.advance(task, len(args.k) - len(todo))
                    if not todo:
                        continue
                    engine = Engine(
                        args.target, drafter, dtype=dtype, prefix_reuse=False, max_batch=batch, verify="rejection"
                    )
                    for k in todo:
                        started = time.perf_counter()
                        results = engine.generate(prompts, params, speculation=SpeculationConfig(k=k))
                        seconds = time.perf_counter() - started
                        found = [
                            compare(reference, prompt, mine, result.token_ids)
                            for prompt, mine, result in zip(prompts, plain, results, strict=True)
                        ]
                        drafted = sum(r.stats.num_draft_tokens for r in results)
                        differences = [{"prompt": i} | d for i, d in enumerate(found) if d is not None]
                        record.put(
                            f"{dtype}/batch {batch}/{drafter}/k={k}",
                            {
                                "identical": len(found) - len(differences),
                                "differences": differences,
                                "unexplained": sum(d["gap"] > TOLERANCE[dtype] for d in differences),
                                "drafted": drafted,
                                "accepted": sum(r.stats.num_accepted_draft_tokens for r in results),
                                "seconds": seconds,
                            },
                        )
                        progress.advance(task)
    runs = {name: part for name, part in record.data["parts"].items() if "identical" in part}
    record.data["summary"] = {
        dtype: {
            "texts": sum(p["identical"] + len(p["differences"]) for n, p in runs.items() if n.startswith(dtype)),
            "identical": sum(p["identical"] for n, p in runs.items() if n.startswith(dtype)),
            "largest_gap": max(
                (d["gap"] for n, p in runs.items() if n.startswith(dtype) for d in p["differences"]), default=None
            ),
            "unexplained": sum(p["unexplained"] for n, p in runs.items() if n.startswith(dtype)),
        }
        for dtype in args.dtypes
    }
    record.save()
    print(record.data["summary"])
    return int(any(s["unexplained"] for s in record.data["summary"].values()))


if __name__ == "__main__":
    sys.exit(main())
