"""Throughput against concurrency: 1 to 64 clients at once, plain and speculative, on a real server.

Each cell sends a fixed set of greedy requests through so many clients and counts tokens a second; plain and
speculative cells alternate, and each is the best of its repeats. Texts of both must agree.

    python benchmarks/serving.py [--concurrency 1 2 4 8 16 32 64] [--requests 32] [--tokens 64] [--repeats 3]

With ``--url`` an OpenAI-compatible server that already runs (vLLM, say) is measured instead, under ``--label``.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import sys
import time
from contextlib import AsyncExitStack
from typing import Any

import httpx
from prompts import PROMPTS
from record import Record
from traffic import Outcome, histogram, quantiles, server, stream


async def cell(url: str, args: argparse.Namespace, clients: int) -> dict[str, Any]:
    """All requests once, ``clients`` at a time."""
    bodies = [
        {
            "prompt": PROMPTS[i % len(PROMPTS)],
            "max_tokens": args.tokens,
            "temperature": 0,
            "ignore_eos": True,
            **({"model": args.model} if args.model else {}),
        }
        for i in range(max(args.requests, clients))
    ]
    gate, found = asyncio.Semaphore(clients), [Outcome() for _ in bodies]
    async with httpx.AsyncClient(timeout=900, limits=httpx.Limits(max_connections=clients)) as http:

        async def send(i: int) -> None:
            async with gate:
                found[i] = await stream(http, url, bodies[i])

        began = time.perf_counter()
        await asyncio.gather(*map(send, range(len(bodies))))
        seconds = time.perf_counter() - began
    failed = [outcome.error or outcome.status for outcome in found if outcome.error or outcome.status != 200]
    return {
        "seconds": round(seconds, 3),
        "tokens_per_second": round(sum(len(outcome.ids) for outcome in found) / seconds, 2),
        "first_token_ms": quantiles([histogram([outcome.first for outcome in found if outcome.first is not None])]),
        "inter_token_ms": quantiles([histogram([gap for outcome in found for gap in outcome.gaps])]),
        "failed": failed,
        "texts": [hashlib.sha256(str(outcome.ids).encode()).hexdigest()[:16] for outcome in found],
    }


async def measure(args: argparse.Namespace, record: Record) -> None:
    """Every cell, with servers that live through all of them."""
    async with AsyncExitStack() as stack:
        urls = {args.label: args.url} if args.url else {}
        if not args.url:
            common = [
                "--target",
                args.target,
                "--max-batch",
                str(args.batch),
                "--max-queue",
                "1024",
                "--queue-timeout",
                "none",
                "--no-prefix-reuse",
            ]
            for mode, options in (("plain", ["--plain"]), ("speculative", ["--drafter", args.drafter])):
                urls[mode], _child = await stack.enter_async_context(server(*common, *options))
        for clients in args.concurrency:
            for repeat in range(args.repeats):
                for mode, url in urls.items():
                    part = f"{mode}/{clients} clients/{repeat}"
                    if not record.has(part):
                        record.put(part, await cell(url, args, clients))
                        print(part, record.data["parts"][part]["tokens_per_second"], flush=True)


def summary(parts: dict[str, Any]) -> dict[str, Any]:
    """Best tokens a second by mode and concurrency, and how many texts differ from the first cell's."""
    best: dict[str, dict[str, float]] = {}
    first: dict[int, str] = {}
    differing = 0
    for name, part in parts.items():
        mode, clients, _ = name.split("/")
        row = best.setdefault(clients, {})
        row[mode] = max(row.get(mode, 0.0), part["tokens_per_second"])
        for i, text in enumerate(part["texts"]):
            differing += first.setdefault(i, text) != text
    return {"tokens_per_second": best, "texts_that_differ": differing}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="smollm2-135m")
    parser.add_argument("--drafter", default="lookup")
    parser.add_argument("--concurrency", nargs="+", type=int, default=[1, 2, 4, 8, 16, 32, 64])
    parser.add_argument("--requests", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--url")
    parser.add_argument("--label", default="other")
    parser.add_argument("--model", help="name that the server at --url wants")
    parser.add_argument("--name", default="serving")
    parser.add_argument("--fresh", action="store_true")
    args = parser.parse_args()

    record = Record(args.name, args.fresh)
    names = ("target", "drafter", "requests", "tokens", "batch")
    record.data["settings"] = {name: getattr(args, name) for name in names}
    asyncio.run(measure(args, record))
    record.data["summary"] = summary(record.data["parts"])
    record.save()
    print(record.data["summary"])
    return int(bool(record.data["summary"]["texts_that_differ"]) and not args.url)


if __name__ == "__main__":
    sys.exit(main())
