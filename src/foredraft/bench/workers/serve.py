"""What a worker understands: JSON objects, one a line, on stdin; one reply each on stdout.

``{"op": "load", "row": NAME, "options": {…}}``       -> ``{"info": {…}}``
``{"op": "generate", "row": NAME, …Request}``         -> ``{"outputs": …, "wall": …, …}``
``{"op": "cost", "row": NAME, "rows": [1, 2, …], …}``  -> ``{"ms": {"1": […], …}}``
``{"op": "quit"}``

A failure is ``{"error": "…"}`` and the worker lives on. Whatever an engine prints goes to stderr.
"""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
from dataclasses import asdict, dataclass, field
from typing import Any, Protocol, TextIO

try:
    import resource
except ImportError:  # not on Windows
    resource = None  # type: ignore[assignment]


@dataclass(frozen=True)
class Request:
    """What to decode.

    Attributes:
        prompts: Token ids of each; more than one are decoded together.
        messages: The same prompts as conversations, for engines that take only text.
        max_tokens: Most tokens of each answer.
        temperature: 0 is greedy; 1 is the model's own law, no filter.
        seed: For temperature 1.
        ignore_eos: Go on past the end-of-sequence token.
        cold: Forget everything learned from earlier prompts first.
    """

    prompts: list[list[int]]
    messages: list[list[dict[str, str]]]
    max_tokens: int
    temperature: float = 0.0
    seed: int = 0
    ignore_eos: bool = False
    cold: bool = True


@dataclass
class Generation:
    """What came out, and when.

    Attributes:
        outputs: Written ids of each prompt (bytes of the text where an engine gives no ids).
        written: Tokens written, all prompts together.
        wall: Seconds from the call to the last token.
        ttft: Seconds to the first token, mean over prompts; None if the engine does not tell.
        first: Tokens that came with the first one, mean over prompts.
        stats: ``drafted``, ``accepted``, ``spec_steps``, ``steps``: those that the engine tells.
    """

    outputs: list[list[int]]
    written: int
    wall: float
    ttft: float | None
    first: float = 1.0
    stats: dict[str, int] = field(default_factory=dict)


class Adapter(Protocol):
    """One engine."""

    def load(self, row: str, options: dict[str, Any]) -> dict[str, Any]:
        """Makes ``row`` ready and returns facts such as its version. Raises if it cannot be had."""

    def generate(self, row: str, request: Request) -> Generation:
        """Decodes and measures."""

    def cost(self, row: str, rows: list[int], context: int, repeats: int) -> dict[int, list[float]]:
        """Seconds of a target pass by row count, ``context`` tokens cached. Raises NotImplementedError if closed."""


class Stopwatch:
    """Notes when the tokens of one prompt arrive."""

    def __init__(self) -> None:
        self.started = time.perf_counter()
        self.ttft: float | None = None
        self.first = 0
        self.last = 0.0

    def tokens(self, n: int) -> None:
        self.last = time.perf_counter() - self.started
        if self.ttft is None and n > 0:
            self.ttft, self.first = self.last, n


def peak_memory() -> int | None:
    """Most resident bytes so far, of this process."""
    if resource is None:
        return None
    unit = 1 if sys.platform == "darwin" else 1024
    return int(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss) * unit


def answer(adapter: Adapter, message: dict[str, Any]) -> dict[str, Any]:
    """One message, one reply."""
    op = message.pop("op")
    row = message.pop("row", "")
    if op == "load":
        return {"info": adapter.load(row, message["options"])}
    if op == "generate":
        return asdict(adapter.generate(row, Request(**message))) | {"peak_memory": peak_memory()}
    if op == "cost":
        seconds = adapter.cost(row, **message)
        return {"ms": {str(n): [1e3 * t for t in times] for n, times in seconds.items()}}
    raise ValueError(f"unknown op {op!r}")


def serve(adapter: Adapter) -> None:
    """Answers until stdin closes."""
    replies: TextIO = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # engines print to stdout, from C++ too
    for line in sys.stdin:
        message = json.loads(line)
        if message["op"] == "quit":
            break
        try:
            reply = answer(adapter, message)
        except NotImplementedError as error:
            reply = {"error": str(error) or "the engine has no call for this"}
        except Exception as error:
            traceback.print_exc()
            reply = {"error": f"{type(error).__name__}: {error}"}
        replies.write(json.dumps(reply) + "\n")
        replies.flush()
    replies.close()
    sys.stderr.flush()
    os._exit(0)  # some engines hang in their own clean-up


def interleaved(run: Any, rows: list[int], repeats: int) -> dict[int, list[float]]:
    """Times ``run(n)`` for each n in turn, ``repeats`` rounds after one for warm-up; ``run`` returns seconds."""
    seconds: dict[int, list[float]] = {n: [] for n in rows}
    for round_number in range(repeats + 1):
        for n in rows:
            taken = run(n)
            if round_number:
                seconds[n].append(taken)
    return seconds
