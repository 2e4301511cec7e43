"""llama.cpp's own server, by the prebuilt xllamacpp: plain, every draftless speculation that it offers, draft model."""

from __future__ import annotations

import json
import threading
import time
import urllib.request
from collections.abc import Iterator
from typing import Any

import xllamacpp

from foredraft.bench.workers.serve import Generation, Request, Stopwatch, interleaved, serve

SLOTS = 32


class LlamaCpp:
    """One server a row. Its pools of earlier text cannot be emptied, so rows that have one start anew when cold."""

    def __init__(self) -> None:
        self.servers: dict[str, Any] = {}
        self.options: dict[str, dict[str, Any]] = {}

    def load(self, row: str, options: dict[str, Any]) -> dict[str, Any]:
        self.options[row] = options
        self.servers[row] = self._server(options)
        return {"version": f"xllamacpp {xllamacpp.__version__}"}

    def _server(self, options: dict[str, Any]) -> Any:
        params = xllamacpp.CommonParams()
        params.model.path = options["gguf"]
        slots = SLOTS if options.get("batches") else 1
        params.n_parallel = slots
        params.kv_unified = True
        params.n_ctx = max(options["max_context"], 400 * slots)
        params.fit_params = False
        params.cache_ram_mib = 0
        params.verbosity = 0
        for pool in (params.cpuparams, params.cpuparams_batch, params.speculative.draft.cpuparams):
            pool.n_threads = options["threads"]
        kind = options.get("speculation")
        if kind is not None:
            name = f"COMMON_SPECULATIVE_TYPE_{kind}"
            params.speculative.types = [getattr(xllamacpp.common_speculative_type, name)]
        if "ngram_simple" in options:  # its defaults find copies of 12 tokens only
            params.speculative.ngram_simple.size_n, params.speculative.ngram_simple.size_m = options["ngram_simple"]
        if options.get("draft"):
            params.speculative.draft.mparams.path = options["draft"]
            params.speculative.draft.cpuparams_batch.n_threads = options["threads"]
            params.speculative.draft.n_max = 4
        return xllamacpp.Server(params)

    def generate(self, row: str, request: Request) -> Generation:
        options = self.options[row]
        if request.cold and options.get("remembers"):
            self.servers.pop(row, None)
            self.servers[row] = self._server(options)
        found: list[tuple[list[int], Stopwatch, dict[str, Any]]] = [([], Stopwatch(), {})] * len(request.prompts)
        problems: list[Exception] = []

        def ask(i: int) -> None:
            try:
                found[i] = self._stream(row, request, i)
            except Exception as problem:
                problems.append(problem)

        threads = [threading.Thread(target=ask, args=(i,)) for i in range(len(request.prompts))]
        started = time.perf_counter()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        wall = time.perf_counter() - started
        if problems:
            raise problems[0]
        outputs = [ids for ids, _, _ in found]
        n = len(outputs)
        return Generation(
            outputs,
            sum(map(len, outputs)),
            wall,
            sum(watch.ttft or wall for _, watch, _ in found) / n,
            sum(watch.first for _, watch, _ in found) / n,
            {
                "drafted": sum(int(timings.get("draft_n", 0)) for _, _, timings in found),
                "accepted": sum(int(timings.get("draft_n_accepted", 0)) for _, _, timings in found),
            },
        )

    def _stream(self, row: str, request: Request, i: int) -> tuple[list[int], Stopwatch, dict[str, Any]]:
        body = {
            "prompt": request.prompts[i],
            "n_predict": request.max_tokens,
            "temperature": request.temperature,
            "seed": request.seed,
            "samplers": ["temperature"],
            "ignore_eos": request.ignore_eos,
            "cache_prompt": not request.cold,
            "return_tokens": True,
            "stream": True,
        }
        watch, ids = Stopwatch(), list[int]()
        timings: dict[str, Any] = {}
        for event in self._post(row, body):
            if new := event.get("tokens") or []:
                ids += new
                watch.tokens(len(new))
            timings = event.get("timings") or timings
        return ids, watch, timings

    def _post(self, row: str, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
        address = f"{self.servers[row].listening_address}/completion"
        asked = urllib.request.Request(address, json.dumps(body).encode(), {"Content-Type": "application/json"})
        with urllib.request.urlopen(asked, timeout=600) as reply:
            for line in reply:
                if line.startswith(b"data:"):
                    yield json.loads(line[5:])
                elif line.startswith(b"{"):
                    yield json.loads(line)

    def cost(self, row: str, rows: list[int], context: int, repeats: int) -> dict[int, list[float]]:
        """By the server's own clock: reading n more tokens of a prompt whose beginning is cached.

        It computes logits for the last of them only, which flatters it.
        """
        beginning = [100 + i % 900 for i in range(context)]
        tail = 0

        def run(n: int) -> float:
            nonlocal tail
            tail += 1
            prompt = [*beginning, 1000 + tail % 500, *range(200, 199 + n)]  # nothing of the last tail is cached
            [event] = self._post(row, {"prompt": prompt, "n_predict": 1, "cache_prompt": True, "temperature": 0.0})
            timings = event["timings"]
            if tail > 1 and timings["prompt_n"] != n:
                raise RuntimeError(f"read {timings['prompt_n']} tokens where {n} were new")
            return float(timings["prompt_ms"]) / 1e3

        run(1)
        return interleaved(run, rows, repeats)


if __name__ == "__main__":
    serve(LlamaCpp())
