"""OpenVINO GenAI from the same GGUF: plain, prompt lookup, draft model."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import openvino as ov
import openvino_genai as genai

from foredraft.bench.workers.serve import Generation, Request, Stopwatch, serve


class Arrivals(genai.StreamerBase):  # type: ignore[misc]
    """Tells a stopwatch of tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.watch = Stopwatch()
        self.ids: list[int] = []

    def write(self, token: Any) -> Any:
        new = [int(t) for t in token] if hasattr(token, "__len__") else [int(token)]
        self.ids += new
        self.watch.tokens(len(new))
        return genai.StreamingStatus.RUNNING

    def end(self) -> None:
        """Nothing to do."""


class OpenVino:
    """One pipeline a row."""

    def __init__(self) -> None:
        self.rows: dict[str, tuple[Any, dict[str, Any]]] = {}

    def load(self, row: str, options: dict[str, Any]) -> dict[str, Any]:
        properties: dict[str, Any] = {"INFERENCE_NUM_THREADS": options["threads"], **options.get("properties", {})}
        if options.get("draft"):
            properties["draft_model"] = genai.draft_model(options["draft"], "CPU")
        if options.get("prompt_lookup"):
            properties["prompt_lookup"] = True
        pipeline = genai.LLMPipeline(options["gguf"], "CPU", **properties)
        self.rows[row] = (pipeline, options.get("generate", {}))
        return {"version": genai.__version__}

    def generate(self, row: str, request: Request) -> Generation:
        pipeline, extra = self.rows[row]
        config = genai.GenerationConfig()
        config.max_new_tokens = request.max_tokens
        config.do_sample = request.temperature > 0
        config.ignore_eos = request.ignore_eos
        config.apply_chat_template = False
        config.set_eos_token_id(pipeline.get_tokenizer().get_eos_token_id())
        if request.temperature:
            config.temperature, config.top_p, config.rng_seed = request.temperature, 1.0, request.seed
        for name, value in extra.items():
            setattr(config, name, value)
        width = max(map(len, request.prompts))
        ids = np.zeros((len(request.prompts), width), dtype=np.int64)
        mask = np.zeros_like(ids)
        for i, prompt in enumerate(request.prompts):
            ids[i, width - len(prompt) :] = prompt
            mask[i, width - len(prompt) :] = 1
        inputs = genai.TokenizedInputs(ov.Tensor(ids), ov.Tensor(mask))
        arrivals = Arrivals() if len(request.prompts) == 1 else None
        started = time.perf_counter()
        found = pipeline.generate(inputs, config, *([arrivals] if arrivals else []))
        wall = time.perf_counter() - started
        outputs = [[int(t) for t in tokens] for tokens in found.tokens]
        watch = arrivals.watch if arrivals else Stopwatch()
        return Generation(outputs, sum(map(len, outputs)), wall, watch.ttft, watch.first)

    def cost(self, row: str, rows: list[int], context: int, repeats: int) -> dict[int, list[float]]:
        raise NotImplementedError("GenAI has no call for a single pass")


if __name__ == "__main__":
    serve(OpenVino())
