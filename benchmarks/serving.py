"""Throughput against concurrency: 1 to 64 clients at once, on real servers, plain and speculative, beside vLLM's.

Each cell sends greedy requests of a fixed length through so many clients and counts tokens a second. The servers take
turns, cell by cell, and whoever is not measured is stopped, so that all see the same machine and none disturbs. A
first pass over all cells is always finished; further passes go on while there is time, and the best of a cell counts.
Finished cells are kept: an interrupted run goes on where it stopped.

    python benchmarks/serving.py [--concurrency 1 2 4 8 16 32 64] [--tokens 48] [--minutes 12] [--fresh]

vLLM's CPU build is measured where ``foredraft bench --install`` has put it, plainly and with its suffix decoding, on
the same weights, dequantised. With ``--url`` a server that already runs is measured as well, under ``--label``.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import hashlib
import json
import os
import signal
import sys
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Any

import httpx
from prompts import PROMPTS
from record import Record
from traffic import Child, Outcome, answering, free_port, histogram, quantiles, server, stream

from foredraft.bench.environments import UnavailableError, home, python_of, ready
from foredraft.bench.weights import dense_folder

LOADING = 600.0
"""Seconds that somebody else's server has to load its model; the first time it compiles, too."""


@dataclass(frozen=True)
class Served:
    """One server that is measured; ``child`` is None where it is not ours to stop."""

    url: str
    model: str | None = None
    child: Child | None = None


async def cell(one: Served, tokens: int, clients: int, requests: int) -> dict[str, Any]:
    """So many requests of so many tokens, ``clients`` at a time."""
    bodies = [
        {
            "prompt": PROMPTS[i % len(PROMPTS)],
            "max_tokens": tokens,
            "temperature": 0,
            "ignore_eos": True,
            **({"model": one.model} if one.model else {}),
        }
        for i in range(requests)
    ]
    gate, found = asyncio.Semaphore(clients), [Outcome() for _ in bodies]
    async with httpx.AsyncClient(timeout=900, limits=httpx.Limits(max_connections=clients)) as http:

        async def send(i: int) -> None:
            async with gate:
                found[i] = await stream(http, one.url, bodies[i])

        began = time.perf_counter()
        await asyncio.gather(*map(send, range(len(bodies))))
        seconds = time.perf_counter() - began
    failed = [outcome.error or outcome.status for outcome in found if outcome.error or outcome.status != 200]
    return {
        "seconds": round(seconds, 3),
        "requests": len(bodies),
        "tokens_per_second": round(sum(len(outcome.ids) for outcome in found) / seconds, 2),
        "first_token_ms": quantiles([histogram([outcome.first for outcome in found if outcome.first is not None])]),
        "inter_token_ms": quantiles([histogram([gap for outcome in found for gap in outcome.gaps])]),
        "failed": failed,
        "texts": [hashlib.sha256(str(outcome.ids).encode()).hexdigest()[:16] for outcome in found],
    }


@asynccontextmanager
async def vllm(args: argparse.Namespace, mode: str) -> AsyncIterator[Served]:
    """vLLM's own server, without what would make later requests cheaper than first ones."""
    port, folder = free_port(), str(dense_folder(args.target, lambda text: print(text, flush=True)))
    words = [str(python_of("vllm")), "-m", "vllm.entrypoints.openai.api_server", "--model", folder]
    words += ["--served-model-name", "m", "--dtype", args.vllm_dtype, "--max-model-len", "2048", "--port", str(port)]
    words += ["--max-num-seqs", str(args.batch), "--no-enable-prefix-caching", "--host", "127.0.0.1"]
    words += ["--gpu-memory-utilization", "0.1", "--generation-config", "vllm"]
    words += ["--distributed-executor-backend", "uni"]
    if mode != "plain":
        words += ["--speculative-config", json.dumps(SPECULATION[mode])]
    settings = {
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "NUMBA_THREADING_LAYER": "workqueue",  # else its n-gram search leaves later products one thread
        "VLLM_PLUGINS": "",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", str(len(os.sched_getaffinity(0)))),
    }
    log = home() / "logs" / f"serving-vllm-{mode}.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    async with answering(Child(words, log, **settings), url := f"http://127.0.0.1:{port}", log, LOADING) as child:
        yield Served(url, "m", child)


SPECULATION: dict[str, dict[str, Any]] = {
    "suffix": {"method": "suffix", "num_speculative_tokens": 16, "suffix_decoding_max_cached_requests": 0},
    "ngram": {"method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_max": 4, "prompt_lookup_min": 2},
}


async def start(stack: AsyncExitStack, args: argparse.Namespace, absent: dict[str, str]) -> dict[str, Served]:
    """Every server that can be had, one after the other; each is stopped as soon as it is warm."""
    common = ["--target", args.target, "--max-batch", str(args.batch), "--max-queue", "1024", "--queue-timeout"]
    common += ["none", "--no-prefix-reuse", "--activations", args.activations]
    found: dict[str, Served] = {}

    async def warm(name: str, one: Served) -> None:
        await cell(one, 8, 2, 2)
        if one.child is not None:
            one.child.hold()
        found[name] = one
        print(f"{name} is ready", flush=True)

    for mode, options in (("plain", ["--plain"]), ("speculative", ["--drafter", args.drafter])):
        url, child = await stack.enter_async_context(server(*common, *options))
        await warm(mode, Served(url, None, child))
    if args.url:
        await warm(args.label, Served(args.url, args.model))
    for mode in () if args.no_vllm else ("plain", args.vllm_speculation):
        try:
            if not ready("vllm"):
                raise UnavailableError("vLLM is not installed; foredraft bench --install installs it")
            await warm(f"vllm {mode}", await stack.enter_async_context(vllm(args, mode)))
        except (UnavailableError, RuntimeError) as problem:
            absent[f"vllm {mode}"] = str(problem)
            print(f"vllm {mode}: {problem}", flush=True)
    return found


async def measure(args: argparse.Namespace, record: Record) -> None:
    """Every cell, with servers that live through all of them."""
    began = time.monotonic()
    absent: dict[str, str] = {}
    async with AsyncExitStack() as stack:
        servers = await start(stack, args, absent)
        record.data["absent"] = absent
        for repeat in range(args.repeats):
            for clients in args.concurrency:
                for mode, one in servers.items():
                    part = f"{mode}/{clients} clients/{repeat}"
                    if record.has(part) or (repeat and time.monotonic() - began > 60 * args.minutes):
                        continue
                    if one.child is not None:
                        one.child.go_on()
                    record.put(part, await cell(one, args.tokens, clients, max(2 * clients, args.requests)))
                    if one.child is not None:
                        one.child.hold()
                    print(part, record.data["parts"][part]["tokens_per_second"], flush=True)


def summary(parts: dict[str, Any]) -> dict[str, Any]:
    """Best cell of each mode and concurrency; and how many of our speculative texts are not those of plain decoding."""
    best: dict[str, dict[str, dict[str, Any]]] = {}
    ours: dict[int, set[str]] = {}
    for name, part in parts.items():
        mode, clients, _ = name.split("/")
        row = best.setdefault(clients.split()[0], {})
        kept = {key: part[key] for key in ("tokens_per_second", "first_token_ms", "inter_token_ms")}
        if mode not in row or kept["tokens_per_second"] > row[mode]["tokens_per_second"]:
            row[mode] = kept
        if mode in ("plain", "speculative"):
            for i, text in enumerate(part["texts"]):
                ours.setdefault(i % len(PROMPTS), set()).add(text)
    failed = {name: part["failed"] for name, part in parts.items() if part["failed"]}
    return {"best": best, "texts_that_differ": sum(len(texts) - 1 for texts in ours.values()), "failed": failed}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="smollm2-135m")
    parser.add_argument("--drafter", default="lookup")
    parser.add_argument("--activations", default="int8", help="ours; vLLM computes in --vllm-dtype")
    parser.add_argument("--concurrency", nargs="+", type=int, default=[1, 2, 4, 8, 16, 32, 64])
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--requests", type=int, default=12, help="of the smallest cells; others have two a client")
    parser.add_argument("--batch", type=int, default=64, help="most requests decoded together, of every server")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--minutes", type=float, default=12, help="no further pass is begun after so long")
    parser.add_argument("--url")
    parser.add_argument("--label", default="other")
    parser.add_argument("--model", help="name that the server at --url wants")
    parser.add_argument("--no-vllm", action="store_true")
    parser.add_argument("--vllm-dtype", choices=("auto", "bfloat16", "float32"), default="auto")
    parser.add_argument("--vllm-speculation", choices=tuple(SPECULATION), default="suffix")
    parser.add_argument("--name", default="serving")
    parser.add_argument("--fresh", action="store_true")
    args = parser.parse_args()
    if args.vllm_dtype == "auto":  # without instructions for it bfloat16 is the slower one
        args.vllm_dtype = "bfloat16" if {"avx512_bf16", "amx_bf16"} & set(_flags()) else "float32"

    signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that the servers end with this program
    record = Record(args.name, args.fresh)
    names = ("target", "drafter", "activations", "tokens", "requests", "batch", "vllm_dtype", "vllm_speculation")
    settings = {name: getattr(args, name) for name in names}
    if record.data.setdefault("settings", settings) != settings:
        parser.error("the kept cells had other settings; use --fresh or another --name")
    try:
        asyncio.run(measure(args, record))
    except KeyboardInterrupt:
        print("interrupted; what was measured is kept", file=sys.stderr)
    record.data["summary"] = summary(record.data["parts"])
    record.save()
    print(json.dumps(record.data["summary"], indent=1))
    return int(bool(record.data["summary"]["texts_that_differ"] or record.data["summary"]["failed"]))


def _flags() -> list[str]:
    with contextlib.suppress(OSError), open("/proc/cpuinfo") as found:
        return next((line.split() for line in found if line.startswith("flags")), [])
    return []


if __name__ == "__main__":
    sys.exit(main())
