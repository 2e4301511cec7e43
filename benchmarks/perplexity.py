"""What packed weights and rounded inputs do to a model: perplexity on held-out text, beside the same file dequantised.

python benchmarks/perplexity.py [--target smollm2-135m] [--tokens 2048]
"""

from __future__ import annotations

import argparse
import math
import pydoc_data.topics
from collections.abc import Callable

import torch
from record import Record

from foredraft.models.base import Segment
from foredraft.models.linear import dense_linear
from foredraft.models.loading import LoadedModel, load_model

CHUNK = 128

WAYS: dict[str, Callable[[str], LoadedModel]] = {
    "dequantised float32": lambda name: load_model(name, dtype="float32", make_linear=dense_linear),
    "packed, float32 inputs": lambda name: load_model(name, dtype="float32"),
    "packed, int16 inputs": lambda name: load_model(name, dtype="float32", activations="int16"),
    "packed, int8 inputs": lambda name: load_model(name, dtype="float32", activations="int8"),
    "packed, bfloat16 model": lambda name: load_model(name, dtype="bfloat16"),
}


def text() -> str:
    """Python's language reference as it comes with Python (PSF licence)."""
    topics = pydoc_data.topics.topics
    return "\n".join(topics[name] for name in ("strings", "execmodel", "customization", "formatstrings"))


def perplexity(model: LoadedModel, tokens: int) -> float:
    assert model.tokenizer is not None
    ids = model.tokenizer.encode(text())[:tokens]
    slot = model.target.cache.allocate()
    total = 0.0
    for start in range(0, len(ids) - 1, CHUNK):
        part = ids[start : min(start + CHUNK, len(ids) - 1)]
        logits = model.target.forward([Segment(slot, part)]).logits[0]
        model.target.cache.commit(slot, len(part))
        wanted = torch.tensor(ids[start + 1 : start + 1 + len(part)])
        total -= float(logits.double().log_softmax(-1).gather(1, wanted[:, None]).sum())
    return math.exp(total / (len(ids) - 1))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="smollm2-135m")
    parser.add_argument("--tokens", type=int, default=2048)
    args = parser.parse_args()
    record = Record("perplexity", fresh=True)
    record.data |= {"target": args.target, "tokens": args.tokens, "text": text.__doc__}
    first = 0.0
    for name, load in WAYS.items():
        value = perplexity(load(args.target), args.tokens)
        first = first or value
        record.put(name, {"perplexity": value, "against_dequantised": value / first - 1})
        print(f"{name}: {value:.4f} ({value / first - 1:+.4%})", flush=True)


if __name__ == "__main__":
    main()
