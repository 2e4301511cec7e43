"""vLLM's CPU build, engine in this process: plain, n-gram, suffix, draft model, EAGLE-3. One row a process."""

from __future__ import annotations

import os
import time
from typing import Any

os.environ |= {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # the driver has set how many; its own binding takes every core but one
    "NUMBA_THREADING_LAYER": "workqueue",  # else its n-gram search leaves later products one thread
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_PLUGINS": "",
}

import vllm

from foredraft.bench.workers.serve import Generation, Request, serve

COUNTERS = {
    "vllm:spec_decode_num_drafts": "spec_steps",
    "vllm:spec_decode_num_draft_tokens": "drafted",
    "vllm:spec_decode_num_accepted_tokens": "accepted",
}


class Vllm:
    """A row is one ``LLM``; prefix caching is off, so that every prompt starts cold."""

    def __init__(self) -> None:
        self.rows: dict[str, Any] = {}
        self.number = 0

    def load(self, row: str, options: dict[str, Any]) -> dict[str, Any]:
        self.rows[row] = vllm.LLM(
            model=options["folder"],
            dtype=options["dtype"],
            max_model_len=options["max_context"],
            max_num_seqs=32,
            max_num_batched_tokens=max(2048, options["max_context"]),
            enable_prefix_caching=False,
            disable_log_stats=False,
            gpu_memory_utilization=0.1,  # of the machine's memory; without it a fifth must be free at the start
            distributed_executor_backend="uni",
            speculative_config=options.get("speculative"),
        )
        return {"version": vllm.__version__}

    def _counts(self, engine: Any) -> dict[str, int]:
        return {COUNTERS[metric.name]: int(metric.value) for metric in engine.get_metrics() if metric.name in COUNTERS}

    def generate(self, row: str, request: Request) -> Generation:
        llm = self.rows[row]
        engine = llm.llm_engine
        params = vllm.SamplingParams(
            temperature=request.temperature,
            max_tokens=request.max_tokens,
            ignore_eos=request.ignore_eos,
            seed=request.seed if request.temperature else None,
            detokenize=False,
        )
        before = self._counts(llm)
        outputs: dict[str, list[int]] = {}
        first: dict[str, tuple[float, int]] = {}
        started = time.perf_counter()
        for prompt in request.prompts:
            self.number += 1
            outputs[str(self.number)] = []
            engine.add_request(str(self.number), {"prompt_token_ids": prompt}, params)
        while engine.has_unfinished_requests():
            for out in engine.step():
                ids = list(out.outputs[0].token_ids)
                if ids and out.request_id not in first:
                    first[out.request_id] = (time.perf_counter() - started, len(ids))
                outputs[out.request_id] = ids
        wall = time.perf_counter() - started
        after = self._counts(llm)
        written = list(outputs.values())
        return Generation(
            written,
            sum(map(len, written)),
            wall,
            sum(at for at, _ in first.values()) / max(len(first), 1),
            sum(n for _, n in first.values()) / max(len(first), 1),
            {name: after[name] - before.get(name, 0) for name in after},
        )

    def cost(self, row: str, rows: list[int], context: int, repeats: int) -> dict[int, list[float]]:
        raise NotImplementedError("vLLM has no call for a single pass")


if __name__ == "__main__":
    serve(Vllm())
