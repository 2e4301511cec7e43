"""foredraft itself."""

from __future__ import annotations

import time
import uuid
from typing import Any

from foredraft import Engine, SamplingParams, __version__
from foredraft.bench.workers.serve import Generation, Request, interleaved, serve
from foredraft.engine.stats import SpecStats
from foredraft.models.base import Segment
from foredraft.models.loading import LoadedModel, load_model


class Foredraft:
    """Rows share the weights of a target in the same format."""

    def __init__(self) -> None:
        self.models: dict[tuple[str, str, str], LoadedModel] = {}
        self.engines: dict[str, Engine] = {}

    def load(self, row: str, options: dict[str, Any]) -> dict[str, Any]:
        key = (options["target"], options["dtype"], options["activations"])
        if key not in self.models:
            self.models[key] = load_model(
                key[0], dtype=options["dtype"], activations=options["activations"], max_context=options["max_context"]
            )
        self.engines[row] = Engine(self.models[key], options["drafter"], dtype=options["dtype"], max_batch=32)
        return {"version": __version__}

    def generate(self, row: str, request: Request) -> Generation:
        engine = self.engines[row]
        tenant = ""
        if request.cold:
            engine.reset()
            tenant = uuid.uuid4().hex
        params = SamplingParams(
            temperature=request.temperature,
            max_tokens=request.max_tokens,
            ignore_eos=request.ignore_eos,
            seed=request.seed if request.temperature else None,
        )
        started = time.perf_counter()
        running = [engine.submit(prompt, params, tenant=tenant) for prompt in request.prompts]
        first: dict[int, tuple[float, int]] = {}
        while any(r.finished_at is None for r in running):
            engine.step()
            for i, r in enumerate(running):
                if i not in first and r.written:
                    first[i] = (time.perf_counter() - started, r.written)
        wall = time.perf_counter() - started
        stats = SpecStats()
        for r in running:
            if r.error is not None:
                raise r.error
            stats.merge(r.stats)
        return Generation(
            outputs=[list(r.output) for r in running],
            written=sum(r.written for r in running),
            wall=wall,
            ttft=sum(at for at, _ in first.values()) / len(first),
            first=sum(n for _, n in first.values()) / len(first),
            stats={
                "drafted": stats.num_draft_tokens,
                "accepted": stats.num_accepted_draft_tokens,
                "spec_steps": stats.num_spec_steps,
                "steps": stats.num_steps,
            },
        )

    def cost(self, row: str, rows: list[int], context: int, repeats: int) -> dict[int, list[float]]:
        target = self.engines[row].target
        slot = target.cache.allocate()
        ids = [100 + i % 900 for i in range(context)]
        target.forward([Segment(slot, ids, logits_from=context)])
        target.cache.commit(slot, context)

        def run(n: int) -> float:
            started = time.perf_counter()
            target.forward([Segment(slot, [200 + i for i in range(n)])])
            taken = time.perf_counter() - started
            target.cache.commit(slot, 0)
            return taken

        try:
            return interleaved(run, rows, repeats)
        finally:
            target.cache.free(slot)


if __name__ == "__main__":
    serve(Foredraft())
