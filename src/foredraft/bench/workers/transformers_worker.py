"""Hugging Face transformers: ``generate`` plain, with prompt lookup, with an assistant model or early exit."""

from __future__ import annotations

import time
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM, DynamicCache
from transformers.generation.streamers import BaseStreamer

from foredraft.bench.workers.serve import Generation, Request, Stopwatch, interleaved, serve


class Arrivals(BaseStreamer):  # type: ignore[misc]
    """Tells a stopwatch of tokens; the first call brings the prompt."""

    def __init__(self) -> None:
        self.watch = Stopwatch()
        self.prompt_seen = False

    def put(self, value: Any) -> None:
        if self.prompt_seen:
            self.watch.tokens(value.numel())
        self.prompt_seen = True

    def end(self) -> None:
        """Nothing to do."""


class Transformers:
    """One model for all rows; ``generate`` takes the kind of speculation as an argument."""

    def __init__(self) -> None:
        self.models: dict[tuple[str, str], Any] = {}
        self.rows: dict[str, tuple[Any, dict[str, Any]]] = {}

    def _model(self, folder: str, dtype: str) -> Any:
        if (folder, dtype) not in self.models:
            model = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype), local_files_only=True)
            model.generation_config = transformers.GenerationConfig(eos_token_id=model.generation_config.eos_token_id)
            self.models[folder, dtype] = model.eval()
        return self.models[folder, dtype]

    def load(self, row: str, options: dict[str, Any]) -> dict[str, Any]:
        torch.set_num_threads(options["threads"])
        extra = dict(options.get("generate", {}))
        if "assistant" in options:
            extra["assistant_model"] = self._model(options["assistant"], options["dtype"])
        self.rows[row] = (self._model(options["folder"], options["dtype"]), extra)
        return {"version": transformers.__version__, "torch": torch.__version__}

    def generate(self, row: str, request: Request) -> Generation:
        model, extra = self.rows[row]
        width = max(map(len, request.prompts))
        batch = len(request.prompts)
        ids = torch.zeros(batch, width, dtype=torch.long)
        mask = torch.zeros(batch, width, dtype=torch.long)
        for i, prompt in enumerate(request.prompts):  # padded on the left
            ids[i, width - len(prompt) :] = torch.tensor(prompt)
            mask[i, width - len(prompt) :] = 1
        end = model.generation_config.eos_token_id
        pad = end[0] if isinstance(end, list) else end
        torch.manual_seed(request.seed)
        arrivals = Arrivals() if batch == 1 else None
        started = time.perf_counter()
        with torch.inference_mode():
            out = model.generate(
                ids,
                attention_mask=mask,
                max_new_tokens=request.max_tokens,
                min_new_tokens=request.max_tokens if request.ignore_eos else None,
                do_sample=request.temperature > 0,
                **({"temperature": request.temperature, "top_k": 0, "top_p": 1.0} if request.temperature else {}),
                pad_token_id=pad,
                streamer=arrivals,
                **extra,
            )
        wall = time.perf_counter() - started
        outputs = [row_ids[width:].tolist() for row_ids in out]
        watch = arrivals.watch if arrivals else Stopwatch()
        return Generation(outputs, sum(map(len, outputs)), wall, watch.ttft, watch.first)

    def cost(self, row: str, rows: list[int], context: int, repeats: int) -> dict[int, list[float]]:
        model, _ = self.rows[row]
        cache = DynamicCache(config=model.config)
        with torch.inference_mode():
            model(torch.arange(context)[None] % 900 + 100, past_key_values=cache, logits_to_keep=1)

            def run(n: int) -> float:
                started = time.perf_counter()
                model(torch.arange(n)[None] + 200, past_key_values=cache)
                taken = time.perf_counter() - started
                cache.crop(-n)
                return taken

            return interleaved(run, rows, repeats)


if __name__ == "__main__":
    serve(Transformers())
