"""What soak.py and serving.py share: a server in its own process, mixed requests, latencies of streams."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
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


class Child:
    """A server in a process group of its own, so that it and its workers can be held and ended together."""

    def __init__(self, words: list[str], log: Path | None = None, **environment: str) -> None:
        self._log = log.open("w") if log is not None else None
        self.process = subprocess.Popen(
            words,
            stdin=subprocess.DEVNULL,
            stdout=self._log or subprocess.DEVNULL,
            stderr=subprocess.STDOUT if self._log else subprocess.PIPE,
            text=True,
            start_new_session=True,
            cwd=log.parent if log is not None else None,  # modules of this folder must not stand before its own
            env=os.environ | environment,
        )

    def signal(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, number)

    def hold(self) -> None:
        """Stops every thread, so that an idle server takes nothing from the one that is measured."""
        self.signal(signal.SIGSTOP)

    def go_on(self) -> None:
        self.signal(signal.SIGCONT)

    def end(self, patience: float = 120.0) -> int:
        """Asks it to end, and makes it; returns its exit code."""
        self.go_on()
        if self.process.poll() is None:
            self.process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(patience)
        self.signal(signal.SIGKILL)  # workers that stayed
        if self._log is not None:
            self._log.close()
        return self.process.wait()


@asynccontextmanager
async def server(*options: str) -> AsyncIterator[tuple[str, Child]]:
    """``foredraft serve`` on a free port; ended with SIGTERM, which must give exit code 0."""
    child = Child([sys.executable, "-m", "foredraft", "serve", "--port", "0", *options], NO_COLOR="1")
    errors, said = child.process.stderr, list[str]()
    assert errors is not None
    try:
        url = None
        while url is None:
            said.append(await asyncio.to_thread(errors.readline))
            if not said[-1]:
                raise RuntimeError(f"the server did not start: {''.join(said[-3:]).strip()}")
            if found := re.search(r"on (http://\S+)/v1", said[-1]):
                url = found[1]
        drain = threading.Thread(target=lambda: [None for _ in errors], daemon=True)
        drain.start()
        yield url, child
        if (code := await asyncio.to_thread(child.end)) != 0:
            raise RuntimeError(f"the server ended with code {code}")
    finally:
        await asyncio.to_thread(child.end, 5.0)


@asynccontextmanager
async def answering(child: Child, url: str, log: Path, patience: float) -> AsyncIterator[Child]:
    """Waits until somebody else's server answers ``/v1/models``; ends it with the block."""
    until = time.monotonic() + patience
    try:
        async with httpx.AsyncClient(timeout=5) as http:
            while True:
                if child.process.poll() is not None or time.monotonic() > until:
                    raise RuntimeError(f"no answer from {url}; its log is {log}")
                with contextlib.suppress(httpx.TransportError):
                    if (await http.get(url + "/v1/models")).status_code == 200:
                        break
                await asyncio.sleep(0.5)
        yield child
    finally:
        await asyncio.to_thread(child.end, 30.0)


def free_port() -> int:
    """A port that is free now."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


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
                if not data["choices"]:  # the chunk with the usage
                    continue
                found.ids += data["choices"][0].get("token_ids") or []
                now = time.perf_counter()
                if last is None:
                    found.first = now - began
                else:
                    found.gaps.append(now - last)
                last = now
                events += 1
                if events == abort_after:
                    found.aborted = True
                    break
    except httpx.TransportError as error:
        found.error = type(error).__name__
    return found


def mixed(rng: random.Random, prompts: list[str], tokens: int, drafters: Sequence[str] = ()) -> dict[str, Any]:
    """A body of a random kind: half of them greedy with one of few prompts, so that answers can be compared.

    Args:
        drafters: Names that a request may choose from; empty where the server has none.
    """
    kind = rng.randrange(8)
    body: dict[str, Any] = {"prompt": rng.choice(prompts), "max_tokens": rng.choice((8, tokens // 2, tokens))}
    chosen = {"drafter": rng.choice(drafters)} if drafters else {}
    if kind < 4:
        return body | {"temperature": 0, "speculation": {"off": True} if kind == 3 else chosen}
    body["speculation"] = chosen
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
