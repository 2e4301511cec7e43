"""llama.cpp through llama-cpp-python: plain, and the prompt lookup that this binding offers."""

from __future__ import annotations

import time
from typing import Any

import llama_cpp
from llama_cpp.llama_speculative import LlamaPromptLookupDecoding

from foredraft.bench.workers.serve import Generation, Request, Stopwatch, interleaved, serve


class LlamaCpp:
    """One context a row; the weights are mapped from the file and so shared."""

    def __init__(self) -> None:
        self.rows: dict[str, Any] = {}
        self.passes = 0

    def load(self, row: str, options: dict[str, Any]) -> dict[str, Any]:
        draft = options.get("lookup")
        model = llama_cpp.Llama(
            options["gguf"],
            n_ctx=options["max_context"],
            n_threads=options["threads"],
            n_threads_batch=options["threads"],
            draft_model=LlamaPromptLookupDecoding(num_pred_tokens=draft) if draft else None,
            verbose=False,
        )
        inner = model.eval

        def counted(tokens: Any) -> None:
            self.passes += 1
            inner(tokens)

        model.eval = counted
        self.rows[row] = model
        return {"version": llama_cpp.__version__}

    def generate(self, row: str, request: Request) -> Generation:
        [prompt] = request.prompts
        model = self.rows[row]
        if request.cold:
            model.reset()
        if request.temperature:
            model.set_seed(request.seed)
        self.passes = 0
        end = model.token_eos()
        ids: list[int] = []
        watch = Stopwatch()
        for token in model.generate(
            prompt, temp=request.temperature, top_k=0, top_p=1.0, min_p=0.0, repeat_penalty=1.0
        ):
            ids.append(int(token))
            watch.tokens(1)
            if len(ids) == request.max_tokens or (token == end and not request.ignore_eos):
                break
        return Generation([ids], len(ids), watch.last, watch.ttft, 1, {"steps": self.passes})

    def cost(self, row: str, rows: list[int], context: int, repeats: int) -> dict[int, list[float]]:
        model = self.rows[row]
        model.reset()
        model.eval([100 + i % 900 for i in range(context)])

        def run(n: int) -> float:
            started = time.perf_counter()
            model.eval([200 + i for i in range(n)])
            taken = time.perf_counter() - started
            model.n_tokens = context
            return taken

        return interleaved(run, rows, repeats)


if __name__ == "__main__":
    serve(LlamaCpp())
