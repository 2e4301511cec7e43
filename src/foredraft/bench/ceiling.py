"""How fast a machine could decode at best: bytes that a plain step must read, over the measured speed of memory."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from foredraft.models.gguf_file import GGUFFile
from foredraft.models.shape_gguf import shape_from_gguf

DENSE_ENGINES = {"transformers", "vllm"}
KV_BYTES = {"foredraft": 4, "transformers": 2, "vllm": 2, "llama.cpp": 2, "openvino": 1}
"""Bytes of one number of the KV cache as each engine keeps it by default."""


@dataclass(frozen=True, slots=True)
class Traffic:
    """What a plain step of one request reads.

    Attributes:
        packed: Bytes of the weights as the GGUF holds them; of an untied embedding only one row is read.
        numbers: The same weights counted in numbers.
        kv_numbers: Numbers of keys and values for each token of context.
    """

    packed: int
    numbers: int
    kv_numbers: int

    def step_bytes(self, engine: str, activations: str, context: float) -> float:
        """Bytes that a plain step at this context must read.

        Args:
            engine: Name of the engine, which decides the format of weights and cache.
            activations: ``bfloat16`` says that foredraft ran dense weights.
            context: Tokens in the cache.
        """
        dense = engine in DENSE_ENGINES or activations == "bfloat16"
        width = 4 if engine in DENSE_ENGINES and activations == "float32" else 2
        weights = width * self.numbers if dense else self.packed
        return weights + KV_BYTES.get(engine, 2) * self.kv_numbers * context


def traffic(gguf: Path) -> Traffic:
    """Counts a model's weights."""
    file = GGUFFile(gguf)
    shape = shape_from_gguf(file)
    read = {name: entry for name, entry in file.tensors.items() if shape.tied or name != "token_embd.weight"}
    numbers = 0
    for entry in read.values():
        size = 1
        for side in entry.shape:
            size *= side
        numbers += size
    kv = 2 * shape.layers * shape.kv_heads * shape.head_dim
    return Traffic(sum(entry.nbytes for entry in read.values()), numbers, kv)
