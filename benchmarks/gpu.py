"""The decoder on an accelerator: checked against the CPU, then timed, in one run that needs no network.

1. A small random model in float32 and bf16: its logits against the CPU's in float32, speculative text against plain.
2. Random weights of the shapes of 1B and 8B models in bf16: milliseconds of a pass over 1 … 32 rows a request at batch
   1, 8 and 32, and the bandwidth that one row reaches. Passes are timed as the engine runs them: the clock stops when
   the result has reached the CPU.
3. The embedded real model: plain and speculative decoding, interleaved.

    python benchmarks/gpu.py [--device cuda] [--shapes 1b 8b] [--minutes 5]

Results go to benchmarks/results/gpu.json. Passes are run as they are, without CUDA graphs.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch
from prompts import CHAT, COPY
from record import Record

from foredraft import Engine, SamplingParams
from foredraft.drafters.model import ModelDrafter
from foredraft.models.base import Segment
from foredraft.models.build import build_decoder
from foredraft.models.decoder import Decoder
from foredraft.models.shape import DecoderShape, Rope
from foredraft.models.weights import Weight

SIZES = {  # layers, hidden, intermediate, heads, key-value heads, vocabulary: the shapes of Llama-3.2-1B and 3.1-8B
    "tiny": (4, 128, 256, 4, 2, 512),
    "1b": (16, 2048, 8192, 32, 8, 128256),
    "8b": (32, 4096, 14336, 32, 8, 128256),
}
ROWS = (1, 2, 4, 8, 16, 32)
BATCHES = (1, 8, 32)
CONTEXT = 512


def shape_of(name: str, layers: int | None = None) -> DecoderShape:
    """The named shape, perhaps with fewer layers."""
    depth, hidden, inner, heads, kv_heads, vocab = SIZES[name]
    dim = hidden // heads
    rope = Rope(tuple(500000.0 ** (-2 * i / dim) for i in range(dim // 2)))
    return DecoderShape(
        architecture="llama",
        vocab_size=vocab,
        hidden_size=hidden,
        intermediate_size=inner,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=dim,
        windows=(None,) * (layers or depth),
        rope=rope,
        norm_eps=1e-5,
        max_positions=8192,
        tied=True,
        attention_scale=dim**-0.5,
    )


class RandomWeights:
    """Weights drawn on the device that they are for; the same for the same seed, device and dtype."""

    path = Path("random")

    def __init__(self, shape: DecoderShape, device: str, dtype: torch.dtype, seed: int = 0) -> None:
        self.shape, self.device, self.dtype = shape, device, dtype
        self.generator = torch.Generator(device).manual_seed(seed)

    def find(self, name: str) -> Weight:
        s, part = self.shape, name.split(".")[-2]
        width, kv_width = s.heads * s.head_dim, s.kv_heads * s.head_dim
        sizes: dict[str, tuple[int, ...]] = {
            "token_embd": (s.vocab_size, s.hidden_size), "attn_q": (width, s.hidden_size),
            "attn_k": (kv_width, s.hidden_size), "attn_v": (kv_width, s.hidden_size),
            "attn_output": (s.hidden_size, width), "ffn_gate": (s.intermediate_size, s.hidden_size),
            "ffn_up": (s.intermediate_size, s.hidden_size), "ffn_down": (s.hidden_size, s.intermediate_size),
        }  # fmt: skip
        size = sizes.get(part, (s.hidden_size,))
        return Weight(name, size, lambda: self._draw(size))

    def _draw(self, size: tuple[int, ...]) -> torch.Tensor:
        if len(size) == 1:
            return torch.ones(size, device=self.device)
        values = torch.randn(size, generator=self.generator, device=self.device, dtype=self.dtype)
        return values.mul_(size[-1] ** -0.5)


def build(name: str, device: str, dtype: torch.dtype, layers: int | None = None, draw_on: str = "") -> Decoder:
    """Weights drawn on ``draw_on`` in float32, or else where and as they are used: quicker, but other numbers."""
    shape = shape_of(name, layers)
    cache_bytes = (CONTEXT + 64) * 40 * 2 * shape.layers * shape.kv_heads * shape.head_dim * dtype.itemsize
    source = RandomWeights(shape, draw_on or device, torch.float32 if draw_on else dtype)
    return build_decoder(source, shape, dtype, torch.device(device), cache_bytes)


def logits_of(model: Decoder, tokens: list[int]) -> torch.Tensor:
    slot = model.cache.allocate()
    try:
        return model.forward([Segment(slot, tokens)]).logits[0].float().cpu()
    finally:
        model.cache.free(slot)


def check(device: str) -> dict[str, Any]:
    """Logits against float32 on the CPU, and speculative text against plain, by dtype."""
    found: dict[str, Any] = {}
    tokens = [(7 * i) % 500 for i in range(96)]
    for dtype in (torch.float32, torch.bfloat16):
        there = build("tiny", device, dtype, draw_on="cpu")
        reference = logits_of(build("tiny", "cpu", torch.float32, draw_on="cpu"), tokens)
        difference = (reference - logits_of(there, tokens)).abs().max()
        texts = {}
        for k in (0, 1, 4, 8):
            drafter = ModelDrafter(build("tiny", device, dtype, layers=2, draw_on="cpu"))
            engine = Engine(there, drafter, k=k, max_batch=4, prefix_reuse=False)
            prompts = [tokens[i : i + 20] for i in range(0, 40, 10)]
            texts[k] = [r.token_ids for r in engine.generate(prompts, SamplingParams(max_tokens=48, ignore_eos=True))]
        same = {k: sum(a == b for a, b in zip(texts[0], texts[k], strict=True)) for k in texts if k}
        found[str(dtype)] = {"largest_logit_difference": float(difference), "identical_texts_of_4_by_k": same}
    return found


def time_passes(name: str, device: str, until: float) -> dict[str, Any]:
    """Median ms of a pass with its logits on the CPU, by batch and rows a request."""
    model = build(name, device, torch.bfloat16)
    size = model.shape.parameters
    result: dict[str, Any] = {"parameters": size, "bytes": 2 * size, "ms": {}}
    slots = [model.cache.allocate() for _ in range(max(BATCHES))]
    for slot in slots:
        model.forward([Segment(slot, [(slot * 7 + i) % 500 for i in range(CONTEXT)], CONTEXT)])
        model.cache.commit(slot, CONTEXT)
    times: dict[tuple[int, int], list[float]] = {(b, n): [] for b in BATCHES for n in ROWS if b * n <= 256}
    for _ in range(24):
        for (batch, rows), seen in times.items():
            if time.monotonic() > until and seen:
                continue
            started = time.perf_counter()
            output = model.forward([Segment(slot, list(range(rows))) for slot in slots[:batch]])
            for logits in output.logits:
                logits.argmax(-1).cpu()
            seen.append(1e3 * (time.perf_counter() - started))
            for slot in slots[:batch]:
                model.cache.commit(slot, 0)
    for (batch, rows), seen in times.items():
        result["ms"].setdefault(str(batch), {})[str(rows)] = statistics.median(seen[2:] or seen)
    one = result["ms"]["1"]
    result["gbytes_a_second_at_one_row"] = 2 * size / one["1"] / 1e6
    result["cost8_over_cost1"] = one["8"] / one["1"]
    return result


def time_real(device: str, tokens: int) -> dict[str, Any]:
    """Tokens a second of the embedded model, plain and with prompt lookup, interleaved; and whether texts agree."""
    rates: dict[str, list[float]] = {"plain": [], "lookup": []}
    same = 0
    engines = {"plain": Engine(device=device, dtype="bfloat16", prefix_reuse=False),
               "lookup": Engine(drafter="lookup", device=device, dtype="bfloat16", prefix_reuse=False)}  # fmt: skip
    prompts = [CHAT[0], CHAT[1], *COPY]
    for text in [CHAT[2], *prompts]:  # the first one warms up
        ids = {}
        for name, engine in engines.items():
            assert engine.tokenizer is not None
            prompt = engine.tokenizer.chat([{"role": "user", "content": text}])
            started = time.perf_counter()
            ids[name] = engine.generate([prompt], SamplingParams(max_tokens=tokens, ignore_eos=True))[0].token_ids
            if text != CHAT[2]:
                rates[name].append(tokens / (time.perf_counter() - started))
        same += text != CHAT[2] and ids["plain"] == ids["lookup"]
    ratios = [b / a for a, b in zip(rates["plain"], rates["lookup"], strict=True)]
    return {"tokens_a_second": {name: statistics.median(values) for name, values in rates.items()},
            "speedup_by_prompt": ratios, "identical_texts": same, "prompts": len(prompts)}  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--shapes", nargs="+", choices=list(SIZES), default=["1b", "8b"])
    parser.add_argument("--minutes", type=float, default=5.0)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--name", default="gpu")
    args = parser.parse_args()
    until = time.monotonic() + 60 * args.minutes
    record = Record(args.name, fresh=True)
    record.data["device"] = args.device
    record.put("check", check(args.device))
    print(record.data["parts"]["check"], flush=True)
    record.put("real", time_real(args.device, args.tokens))
    print(record.data["parts"]["real"], flush=True)
    for i, name in enumerate(args.shapes):
        left = (until - time.monotonic()) / (len(args.shapes) - i)
        record.put(name, time_passes(name, args.device, time.monotonic() + left))
        print(name, record.data["parts"][name], flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
