"""What soak.py and serving.py share: a server in its own process, mixed requests, latencies of streams."""

from __future__ import annotations

import asyncio
import json
import os
import random
import re
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx


@dataclass
class Outcome:
    """One request as its client saw it.

    Attributes:
        status: HTTP status; 0 where the connection broke.
        ids: Token ids.
        first: Seconds to the first token; None if there was none.
        gaps: Seconds between deliveries.
        aborted: The client went away on purpose.
        error: What the stream said at its end, if that was an error.
    """

    status: int = 0
    ids: list[int] = field(default_factory=list)
    first: float | None = None
    gaps: list[float] = field(default_factory=list)
    aborted: bool = False
    error: str | None = None


@asynccontextmanager
async def server(*options: str) -> AsyncIterator[tuple[str, subprocess.Popen[str]]]:
    """``foredraft serve`` on a free port; ended with SIGTERM, which must give exit code 0."""
    child = subprocess.Popen(
        [sys.executable, "-m", "foredraft", "serve", "--port", "0", *options],
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"NO_COLOR": "1"},
    )
    assert child.stderr is not None
    try:
        url = None
        while url is None:
            line = await asyncio.to_thread(child.stderr.readline)
            if not line:
                raise RuntimeError("the server did not start")
            if found := re.search(r"on (http://\S+)/v1", line):
                url = found[1]
        drain = threading.Thread(target=lambda: [None for _ in child.stderr or ()], daemon=True)
        drain.start()
        yield url, child
        child.send_signal(signal.SIGTERM)
        await asyncio.to_thread(child.wait, 120)
        if child.returncode != 0:
            raise RuntimeError(f"the server ended with code {child.returncode}")
    finally:
        if child.poll() is None:
            child.kill()


async def stream(client: httpx.AsyncClient, url: str, body: dict[str, Any], abort_after: int | None = None) -> Outcome:
    """Sends one completion and reads its stream, going away after ``abort_after`` events if that is a number."""
    found, began, last, events = Outcome(), time.perf_counter(), None, 0
    body = body | {"stream": True, "return_token_ids": True}
    try:
        async with client.stream("POST", url + "/v1/completions", json=body) as answer:
            found.status = answer.status_code
            async for line in answer.aiter_lines():
                if not line.startswith("data: {"):
                    continue
                data = json.loads(line[6:])
                if "error" in data:
                    found.error = data["error"]["code"]
                    break
                now = time.perf_counter()
                if last is None:
                    found.first = now - began
                else:
                    found.gaps.append(now - last)
                last = now
                found.ids += data["choices"][0]["token_ids"]
                events += 1
                if events == abort_after:
                    found.aborted = True
                    break
    except httpx.TransportError as error:
        found.error = type(error).__name__
    return found


def mixed(rng: random.Random, prompts: list[str], tokens: int) -> dict[str, Any]:
    """A body of a random kind: half of them greedy with one of few prompts, so that answers can be compared."""
    kind = rng.randrange(8)
    body: dict[str, Any] = {"prompt": rng.choice(prompts), "max_tokens": rng.choice((8, tokens // 2, tokens))}
    if kind < 4:
        return body | {"temperature": 0, "speculation": {"off": True} if kind == 3 else {}}
    if kind == 4:
        return body | {"temperature": 0.8, "top_p": 0.9}
    if kind == 5:
        return body | {"temperature": 1.0, "seed": rng.randrange(1000), "min_p": 0.05}
    if kind == 6:
        return body | {"temperature": 0.7, "repetition_penalty": 1.1, "logprobs": 3}
    return body | {"temperature": 0, "stop": ["\n"], "prompt": body["prompt"] * 3}


def histogram(seconds: list[float]) -> dict[str, int]:
    """How often each time occurred, in milliseconds: compact, and it can be pooled."""
    counts = Counter(round(1000 * value) for value in seconds)
    return {str(ms): counts[ms] for ms in sorted(counts)}


def quantiles(histograms: Iterable[dict[str, int]]) -> dict[str, int | None]:
    """Median and 99th percentile of pooled histograms, in milliseconds."""
    pooled: Counter[int] = Counter()
    for one in histograms:
        pooled.update({int(ms): count for ms, count in one.items()})
    ordered = sorted(pooled.elements())
    return {
        f"p{int(q * 100)}": ordered[min(int(q * len(ordered)), len(ordered) - 1)] if ordered else None
        for q in (0.5, 0.99)
    }
