"""Which weights can be packed, and what a packed matrix costs."""

from __future__ import annotations

from dataclasses import dataclass

from foredraft.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Source:
    """A way in which a file stores a row of weights.

    Attributes:
        name: GGML's name of the format, or ``"float32"`` / ``"bfloat16"``.
        number: Its number in the library.
        block: Weights a block; rows must hold whole blocks.
        block_bytes: Bytes a block.
    """

    name: str
    number: int
    block: int
    block_bytes: int

    def row_bytes(self, width: int) -> int:
        """Bytes of a row of ``width`` weights. Raises ConfigError if they are not whole blocks."""
        if width < 1 or width % self.block:
            raise ConfigError(
                f"a row of {width} weights is not made of whole blocks of {self.block}", field=f"{self.name} matrix"
            )
        return width // self.block * self.block_bytes


FLOAT32 = Source("float32", 0, 1, 4)
BFLOAT16 = Source("bfloat16", 1, 1, 2)

_QUANTISED = (
    Source("Q8_0", 2, 32, 34),
    Source("Q4_0", 3, 32, 18),
    Source("Q4_1", 4, 32, 20),
    Source("Q4_K", 5, 256, 144),
    Source("Q6_K", 6, 256, 210),
    Source("Q5_0", 7, 32, 22),
)
GGUF = {source.name: source for source in _QUANTISED}
"""Quantised formats that the kernels multiply as they are, by GGML name."""


def gguf_source(kind: str) -> Source:
    """The quantised format named ``kind``. Raises ConfigError if the kernels do not know it."""
    source = GGUF.get(kind)
    if source is None:
        raise ConfigError(
            f"no kernel multiplies {kind!r} weights as they are",
            field="kind",
            remedy=f"dequantise them and use from_float, or convert the file to one of {', '.join(GGUF)}",
        )
    return source
