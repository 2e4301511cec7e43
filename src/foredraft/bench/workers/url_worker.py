"""Any server that speaks the OpenAI chat API with streams. Its tokens are not told, so texts are compared as bytes."""

from __future__ import annotations

import json
import threading
import time
import urllib.request
from typing import Any

from foredraft.bench.counters import Acceptance, fetch
from foredraft.bench.workers.serve import Generation, Request, Stopwatch, serve
from foredraft.errors import ConfigError

STATS = {
    "num_draft_tokens": "drafted",
    "num_accepted_draft_tokens": "accepted",
    "num_spec_steps": "spec_steps",
    "num_steps": "steps",
}
LAG = 2.0
"""Seconds that a server's counters may be behind its answers."""


class OpenAiUrl:
    """A row is a server's base address; the first model that it lists is asked."""

    def __init__(self) -> None:
        self.rows: dict[str, tuple[str, str]] = {}

    def load(self, row: str, options: dict[str, Any]) -> dict[str, Any]:
        base = str(options["url"]).rstrip("/")
        with urllib.request.urlopen(f"{base}/models", timeout=10) as reply:
            model = str(json.load(reply)["data"][0]["id"])
        self.rows[row] = (base, model)
        return {"version": model}

    def generate(self, row: str, request: Request) -> Generation:
        base, model = self.rows[row]
        before = counters(base)
        watch = Stopwatch()
        answers: list[tuple[bytes, int, float | None]] = [(b"", 0, None)] * len(request.messages)
        problems: list[Exception] = []

        def ask(i: int) -> None:
            try:
                answers[i] = self._stream(base, model, request, i)
            except Exception as problem:
                problems.append(problem)

        threads = [threading.Thread(target=ask, args=(i,)) for i in range(len(request.messages))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if problems:
            raise problems[0]
        watch.tokens(1)
        times = [ttft for _, _, ttft in answers if ttft is not None]
        written = sum(n for _, n, _ in answers)
        return Generation(
            [list(text) for text, _, _ in answers],
            written,
            watch.last,
            sum(times) / len(times) if times else None,
            stats=_stats(base, before, written),
        )

    def _stream(self, base: str, model: str, request: Request, i: int) -> tuple[bytes, int, float | None]:
        body: dict[str, Any] = {
            "model": model,
            "messages": request.messages[i],
            "max_tokens": request.max_tokens,
            "temperature": request.temperature,
            "seed": request.seed,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if request.ignore_eos:
            body["ignore_eos"] = True
        asked = urllib.request.Request(
            f"{base}/chat/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        watch, text, written = Stopwatch(), "", 0
        with urllib.request.urlopen(asked, timeout=600) as reply:
            for line in reply:
                if not line.startswith(b"data:") or b"[DONE]" in line:
                    continue
                event = json.loads(line[5:])
                for choice in event.get("choices", []):
                    piece = choice.get("delta", {}).get("content") or ""
                    if piece:
                        watch.tokens(1)
                        text += piece
                        written += 1
                if event.get("usage"):
                    written = int(event["usage"]["completion_tokens"])
        return text.encode(), written, watch.ttft

    def cost(self, row: str, rows: list[int], context: int, repeats: int) -> dict[int, list[float]]:
        raise NotImplementedError("the API has no call for a single pass")


def counters(base: str) -> Acceptance | None:
    """All that the server has drafted and accepted so far; None if it does not tell."""
    try:
        return sum(fetch(base).values(), Acceptance())
    except ConfigError:
        return None


def _stats(base: str, before: Acceptance | None, written: int) -> dict[str, int]:
    """What was counted since; nobody else may use the server meanwhile."""
    end = time.monotonic() + LAG
    while before is not None and (now := counters(base)) is not None:
        counts = now.since(before).counts
        if counts["completion_tokens"] >= written or time.monotonic() > end:
            return {short: counts[name] for name, short in STATS.items() if name in counts}
        time.sleep(0.05)
    return {}


if __name__ == "__main__":
    serve(OpenAiUrl())
