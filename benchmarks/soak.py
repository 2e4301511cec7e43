"""Soak: many clients of mixed kinds with random aborts on the real small model, for minutes, on a real server.

Plain and speculative servers take turns in rounds, so that both see the same machine. At temperature 0 every whole
answer must be what plain decoding of that prompt alone writes, and every aborted one its beginning. After each round
nothing may be left: no running or waiting request, no slot but idle prefixes; every other pair of rounds keeps no
prefixes, so that no byte of the cache may be left either. Rounds are saved as they finish; an interrupted soak goes on
where it stopped.

    python benchmarks/soak.py --minutes 30 [--clients 64] [--round 60] [--drafters lookup suffix] [--fresh]
"""

from __future__ import annotations

import argparse
import asyncio
import random
import signal
import sys
import time
from typing import Any

import httpx
from prompts import PROMPTS
from record import Record
from traffic import Outcome, histogram, mixed, quantiles, server, stream

from foredraft import Engine, SamplingParams
from foredraft.drafters.choice import check_names

ABORTED = 0.15
"""Share of requests whose client goes away."""


def references(target: str, tokens: int, prompts: list[str]) -> dict[str, list[int]]:
    """What plain decoding writes for each prompt alone."""
    engine = Engine(target, None, max_batch=1, prefix_reuse=False)
    texts = [prompt * times for prompt in prompts for times in (1, 3)]
    return {text: engine.generate(text, SamplingParams(max_tokens=tokens))[0].token_ids for text in texts}


def wrong(body: dict[str, Any], found: Outcome, plain: dict[str, list[int]]) -> bool:
    """Whether a greedy answer is not plain decoding's."""
    if body["temperature"] != 0 or found.status != 200:
        return False
    expected = plain[body["prompt"]][: body["max_tokens"]]
    whole = not found.aborted and found.error is None and "stop" not in body
    return found.ids != (expected if whole else expected[: len(found.ids)])


async def client(
    rng: random.Random,
    url: str,
    until: float,
    args: argparse.Namespace,
    drafters: list[str],
    found: list[tuple[dict[str, Any], Outcome]],
) -> None:
    """One client: request after request until time is up."""
    async with httpx.AsyncClient(timeout=600) as http:
        while time.monotonic() < until:
            body = mixed(rng, PROMPTS[: args.prompts], args.tokens, drafters)
            abort = rng.randrange(1, 8) if rng.random() < ABORTED else None
            found.append((body, await stream(http, url, body, abort)))


async def settled(url: str) -> dict[str, Any]:
    """The server's own figures once nothing runs any more; a leak shows in them."""
    async with httpx.AsyncClient(timeout=60) as http:
        for _ in range(200):
            stats: dict[str, Any] = (await http.get(url + "/stats")).json()
            if stats["in_flight"] == 0 and stats["requests"]["running"] == stats["requests"]["waiting"] == 0:
                break
            await asyncio.sleep(0.1)
    return stats


async def one_round(args: argparse.Namespace, mode: str, seed: int, plain: dict[str, list[int]]) -> dict[str, Any]:
    """A server, its clients, and what came of it."""
    options = ["--target", args.target, "--max-batch", str(args.batch), "--max-queue", str(2 * args.clients)]
    options += ["--queue-timeout", "none", "--request-timeout", "none"]
    options += ["--no-prefix-reuse"] if seed % 2 else []
    drafters = [] if mode == "plain" else check_names(args.drafters)
    options += ["--plain"] if mode == "plain" else [word for spec in args.drafters for word in ("--drafter", spec)]
    async with server(*options) as (url, _child):
        found: list[tuple[dict[str, Any], Outcome]] = []
        until = time.monotonic() + args.round
        began = time.perf_counter()
        await asyncio.gather(
            *(client(random.Random(seed * 1000 + i), url, until, args, drafters, found) for i in range(args.clients))
        )
        seconds = time.perf_counter() - began
        stats = await settled(url)
    outcomes = [outcome for _, outcome in found]
    return {
        "requests": len(found),
        "aborted": sum(outcome.aborted for outcome in outcomes),
        "compared": sum(body["temperature"] == 0 and outcome.status == 200 for body, outcome in found),
        "wrong": sum(wrong(body, outcome, plain) for body, outcome in found),
        "failed": [outcome.error or outcome.status for outcome in outcomes if outcome.error or outcome.status != 200],
        "tokens": sum(len(outcome.ids) for outcome in outcomes),
        "seconds": round(seconds, 2),
        "first_token_ms": histogram([outcome.first for outcome in outcomes if outcome.first is not None]),
        "gaps_ms": histogram([gap for outcome in outcomes for gap in outcome.gaps]),
        "leaked_requests": stats["in_flight"] + stats["requests"]["running"] + stats["requests"]["waiting"],
        "leaked_slots": stats["cache"]["slots_in_use"] - stats["cache"]["slots_idle"],
        "leaked_bytes": 0 if seed % 2 == 0 else stats["cache"]["bytes_in_use"],
        "acceptance": {
            drafter: {name: stats["drafters"][drafter][name] for name in ("draft_acceptance_rate", "tokens_per_step")}
            for drafter in drafters
            if drafter in stats["drafters"]
        },
    }


def summary(parts: dict[str, Any]) -> dict[str, Any]:
    """Figures of each mode, pooled over its rounds."""
    table = {}
    for mode in ("plain", "speculative"):
        rounds = [part for name, part in parts.items() if name.startswith(mode)]
        if not rounds:
            continue
        names = (
            "requests",
            "aborted",
            "compared",
            "wrong",
            "tokens",
            "leaked_requests",
            "leaked_slots",
            "leaked_bytes",
        )
        table[mode] = {name: sum(part[name] for part in rounds) for name in names}
        table[mode] |= {
            "failed": sum(len(part["failed"]) for part in rounds),
            "tokens_per_second": round(sum(p["tokens"] for p in rounds) / sum(p["seconds"] for p in rounds), 2),
            "first_token_ms": quantiles([part["first_token_ms"] for part in rounds]),
            "inter_token_ms": quantiles([part["gaps_ms"] for part in rounds]),
        }
    return table


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="smollm2-135m")
    parser.add_argument("--drafters", nargs="+", default=["lookup", "suffix"], help="requests choose one at random")
    parser.add_argument("--minutes", type=float, default=30)
    parser.add_argument("--round", type=float, default=60, help="seconds of one round")
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--prompts", type=int, default=len(PROMPTS), help="how many of the prompts to use")
    parser.add_argument("--name", default="soak")
    parser.add_argument("--fresh", action="store_true")
    args = parser.parse_args()

    signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that the server ends with this program
    record = Record(args.name, args.fresh)
    settings = {name: getattr(args, name) for name in ("target", "drafters", "clients", "batch", "tokens", "round")}
    if record.data.setdefault("settings", settings) != settings:
        parser.error("the kept soak had other settings; use --fresh or another --name")
    plain = references(args.target, args.tokens, PROMPTS[: args.prompts])
    rounds = max(round(args.minutes * 60 / args.round), 2)
    for number in range(rounds):
        mode = ("plain", "speculative")[number % 2]
        part = f"{mode} {number // 2}"
        if record.has(part):
            continue
        record.put(part, asyncio.run(one_round(args, mode, number // 2, plain)))
        record.data["summary"] = summary(record.data["parts"])
        record.save()
        print(part, record.data["summary"][mode], flush=True)
    found = record.data["summary"].values()
    return int(any(mode["wrong"] or any(mode[name] for name in mode if "leaked" in name) for mode in found))


if __name__ == "__main__":
    sys.exit(main())
