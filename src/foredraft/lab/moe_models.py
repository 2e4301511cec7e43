"""Mixtures of experts with random weights in the proportions of known models, their dense twins, what rows touch."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from foredraft import kernels
from foredraft.models.base import Segment
from foredraft.models.build import build_decoder
from foredraft.models.decoder import Decoder
from foredraft.models.linear import dense_linear
from foredraft.models.mlp import MoeMlp
from foredraft.models.packed import packed_linear
from foredraft.models.shape import DecoderShape, MoeShape, Rope
from foredraft.models.weights import Weight

CONTEXT = 512
CACHE_BYTES = 256 << 20


@dataclass(frozen=True, slots=True)
class MoeSpec:
    """One mixture of experts and its dense twin, whose MLP is as wide as what one row runs.

    Attributes:
        name: The model whose proportions these are.
        shared: Inner width of the expert that always runs; 0 for none.
    """

    name: str
    width: int
    layers: int
    experts: int
    top_k: int
    intermediate: int
    shared: int = 0

    def shape(self, vocab: int, dense: bool = False) -> DecoderShape:
        """The decoder's shape; ``dense`` for the twin."""
        moe = MoeShape(self.experts, self.top_k, True, self.intermediate, self.shared)
        heads = self.width // 64
        return DecoderShape(
            architecture="llama" if dense else "mixtral",
            vocab_size=vocab,
            hidden_size=self.width,
            intermediate_size=self.top_k * self.intermediate + self.shared,
            heads=heads,
            kv_heads=max(1, heads // 4),
            head_dim=64,
            windows=(None,) * self.layers,
            rope=Rope(tuple(10_000 ** (-i / 32) for i in range(32))),
            norm_eps=1e-6,
            max_positions=CONTEXT,
            tied=True,
            attention_scale=64**-0.5,
            moe=None if dense else moe,
        )


class RandomWeights:
    """A source of weights that depend on seed and name alone; nothing is stored."""

    path = Path("random weights")

    def __init__(self, shape: DecoderShape, seed: int) -> None:
        self._seed = seed
        self._shapes = dict(_weights(shape))

    def find(self, name: str) -> Weight | None:
        size = self._shapes.get(name)
        return None if size is None else Weight(name, size, lambda: self._draw(name, size))

    def _draw(self, name: str, size: tuple[int, ...]) -> Tensor:
        if len(size) == 1:
            return torch.ones(size)
        number = int.from_bytes(hashlib.sha256(f"{self._seed}/{name}".encode()).digest()[:6], "big")
        generator = torch.Generator().manual_seed(number)
        scale = 1.0 if name.startswith("token_embd") else size[-1] ** -0.5
        return torch.randn(size, generator=generator) * scale


def _weights(shape: DecoderShape) -> Iterator[tuple[str, tuple[int, ...]]]:
    d, heads, keys = shape.hidden_size, shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    yield "token_embd.weight", (shape.vocab_size, d)
    yield "output_norm.weight", (d,)
    for i in range(shape.layers):
        blk = f"blk.{i}."
        yield from ((f"{blk}{norm}.weight", (d,)) for norm in ("attn_norm", "ffn_norm"))
        yield from ((f"{blk}attn_{p}.weight", (n, d)) for p, n in (("q", heads), ("k", keys), ("v", keys)))
        yield f"{blk}attn_output.weight", (d, heads)
        if shape.moe is None:
            yield from _mlp(blk, ".weight", d, shape.intermediate_size)
            continue
        yield f"{blk}ffn_gate_inp.weight", (shape.moe.experts, d)
        for expert in range(shape.moe.experts):
            yield from _mlp(blk, f"_exps.{expert}", d, shape.moe.intermediate)
        if shape.moe.shared_intermediate:
            yield f"{blk}ffn_gate_inp_shexp.weight", (1, d)
            yield from _mlp(blk, "_shexp.weight", d, shape.moe.shared_intermediate)


def _mlp(blk: str, suffix: str, d: int, inner: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    yield from ((f"{blk}ffn_{part}{suffix}", (inner, d)) for part in ("gate", "up"))
    yield f"{blk}ffn_down{suffix}", (d, inner)


def random_decoder(shape: DecoderShape, seed: int) -> Decoder:
    """The decoder in float32, by the compiled products where there are any."""
    make = packed_linear() if kernels.available() else dense_linear
    source = RandomWeights(shape, seed)
    return build_decoder(source, shape, torch.float32, torch.device("cpu"), CACHE_BYTES, make_linear=make)


def weights_of(shape: DecoderShape) -> int:
    """How many numbers the model holds."""
    return sum(torch.Size(size).numel() for _, size in _weights(shape))


@contextmanager
def routing(model: Decoder) -> Iterator[list[list[Tensor]]]:
    """Yields, for each layer with experts, the experts of every row of every pass: ``[rows, top_k]`` each."""
    found: list[list[Tensor]] = []
    routed = [layer.mlp for layer in model.layers if isinstance(layer.mlp, MoeMlp)]
    routers = [mlp.router for mlp in routed]
    for mlp, router in zip(routed, routers, strict=True):
        kept: list[Tensor] = []
        found.append(kept)
        mlp.router = _Watched(router, mlp._shape.top_k, kept)  # type: ignore[assignment]
    try:
        yield found
    finally:
        for mlp, router in zip(routed, routers, strict=True):
            mlp.router = router


class _Watched:
    """A router that notes which experts its rows get."""

    def __init__(self, router: object, top_k: int, kept: list[Tensor]) -> None:
        self._router, self._top_k, self._kept = router, top_k, kept

    def __call__(self, x: Tensor) -> Tensor:
        logits: Tensor = self._router(x)  # type: ignore[operator]
        self._kept.append(logits.topk(self._top_k, -1).indices)
        return logits


def experts_of_text(model: Decoder, tokens: Sequence[int]) -> list[Tensor]:
    """The experts of every position of a text, layer by layer: ``[len(tokens), top_k]`` each."""
    slot = model.cache.allocate()
    with routing(model) as found:
        model.forward([Segment(slot, list(tokens), len(tokens))])
    model.cache.commit(slot, 0)
    model.cache.free(slot)
    return [torch.cat(kept) for kept in found]


def distinct(chosen: Tensor, rows: int) -> float:
    """Mean number of distinct experts over windows of ``rows`` consecutive positions of ``[n, top_k]``."""
    windows = range(0, chosen.shape[0] - rows + 1, max(1, rows // 2))
    counts = [len(set(chosen[start : start + rows].flatten().tolist())) for start in windows]
    return sum(counts) / len(counts)
