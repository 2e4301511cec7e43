"""A decoder whose passes run in one call of the compiled kernels, over packed weights, on a CPU."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Literal, cast

import torch
from torch import Tensor

from foredraft.errors import UnsupportedModelError
from foredraft.kernels.decoder_pass import DecoderPass, PassLayer, PassSegment, PassShape
from foredraft.kernels.linear import PackedLinear
from foredraft.models.base import ForwardOutput, Segment
from foredraft.models.decoder import Decoder, Layer
from foredraft.models.experts import PassPrior
from foredraft.models.mlp import GatedMlp
from foredraft.models.rope import half_angles
from foredraft.models.shape import DecoderShape

PASS_ROWS = (1, 2, 4, 8, 16)
PASS_COSTS = {
    "float32": (1.0, 1.12, 1.48, 2.06, 4.1),
    "int16": (1.0, 1.1, 1.35, 1.8, 3.3),
    "int8": (1.0, 1.05, 1.15, 1.48, 2.54),
    "bfloat16": (1.0, 1.0, 1.16, 1.56, 2.61),
}
"""Cost of a pass of so many rows over that of one, by type: near the curves of docs/benchmarks.md."""


class FusedDecoder(Decoder):
    """The same model as ``decoder``, which must have been built with :func:`foredraft.models.packed.packed_linear`.

    The bits of a row depend on its own path of tokens only: not on ``k``, on other requests of the pass or on threads.

    Raises:
        UnsupportedModelError: Mixture-of-experts layers, linears that are not packed, or a width of heads that the
            kernels do not have. Run ``decoder`` itself then.
    """

    def __init__(self, decoder: Decoder) -> None:
        shape, head = decoder.shape, decoder.head
        if not isinstance(head, PackedLinear) or decoder.dtype not in (torch.float32, torch.bfloat16):
            raise UnsupportedModelError("its weights are not packed", remedy="build it with packed_linear()")
        if shape.head_dim % 8:
            raise UnsupportedModelError(f"heads of width {shape.head_dim} have no kernel", field="head_dim")
        table = head if shape.tied else PackedLinear.from_float(decoder.embedding, None, _name(decoder.dtype))
        # The dense embedding is given up: rows come out of the packed one.
        empty = decoder.embedding.new_empty(0, shape.hidden_size)
        super().__init__(shape, empty, decoder.layers, decoder.final_norm, head, decoder.cache, decoder.max_context)
        layers = [_layer(layer, shape, i) for i, layer in enumerate(decoder.layers)]
        cache_dtype = decoder.dtype
        self._table, self._pass_head = table, head
        self._pass = DecoderPass(_shape(shape), layers, decoder.final_norm.weight, table, head, cache_dtype)
        self._angles: list[tuple[Tensor, Tensor]] = []

    def embed(self, tokens: Tensor) -> Tensor:
        """``[N]`` ids -> ``[N, d]`` hidden states that enter the first layer (tap 0), float32."""
        return self._table.rows(tokens) * self.shape.embedding_scale

    @property
    def embedding_rows(self) -> tuple[PackedLinear, float]:
        """The packed matrix whose rows are the embeddings, and the factor that they are multiplied with."""
        return self._table, self.shape.embedding_scale

    @property
    def pass_prior(self) -> PassPrior:
        """Weights are read once for all rows, but every row is multiplied with them.

        A batch that believed the first rows that nobody has measured yet to be free would draft a long way for all its
        requests at once, and pay for it.
        """
        costs = PASS_COSTS["bfloat16" if self.dtype == torch.bfloat16 else self._pass_head.activations]

        def prior(rows: float) -> float:
            i = min(max(bisect_left(PASS_ROWS, rows), 1), len(PASS_ROWS) - 1)
            slope = (costs[i] - costs[i - 1]) / (PASS_ROWS[i] - PASS_ROWS[i - 1])
            return costs[i] + slope * (rows - PASS_ROWS[i])

        return prior

    def forward(self, segments: Sequence[Segment], taps: Sequence[int] = ()) -> ForwardOutput:
        """One pass over packed segments (see :meth:`foredraft.models.base.Target.forward`); taps are float32."""
        steps = self._check(segments, taps)
        cache = self.cache
        starts = [cache.length(segment.slot) for segment in segments]
        sizes = [len(step) for step in steps]
        cache.reserve({segment.slot: size for segment, size in zip(segments, sizes, strict=True)})
        places = [start + depth for start, step in zip(starts, steps, strict=True) for depth in step]
        rows: list[int] = []
        wanted: list[int] = []
        first = 0
        for segment, size in zip(segments, sizes, strict=True):
            rows.append(size - segment.logits_from)
            wanted.extend(range(first + segment.logits_from, first + size))
            first += size
        logits, tapped, likeliest = self._pass(
            [token for segment in segments for token in segment.tokens],
            places,
            self._tables(max(places)),
            [
                PassSegment(size, start, cache.rows(segment.slot), segment.parents)
                for segment, size, start in zip(segments, sizes, starts, strict=True)
            ],
            wanted,
            taps,
        )
        for segment, step in zip(segments, steps, strict=True):
            cache.set_pending(segment.slot, step)
        ends = list(accumulate(rows))
        best = [likeliest[end - size : end] for end, size in zip(ends, rows, strict=True)]
        return ForwardOutput(_parts(logits, rows), [] if tapped is None else _parts(tapped, sizes), best)

    def first_layers(self, count: int, rounded: bool = False) -> FusedDecoder:
        early = cast("FusedDecoder", super().first_layers(count))
        layers = [_rounded(layer) if rounded else layer for layer in self._pass.layers[:count]]
        head = PackedLinear(self._pass_head.matrices, self._pass_head.bias, "int8") if rounded else self._pass_head
        norm, dtype = self.final_norm.weight, self._pass.cache_dtype
        early._pass = DecoderPass(self._pass.shape, layers, norm, self._table, head, dtype)
        return early

    def _tables(self, longest: int) -> list[tuple[Tensor, Tensor]]:
        if not self._angles or self._angles[0][0].shape[0] <= longest:
            ropes = (self.shape.rope,) if self.shape.rope_local is None else (self.shape.rope, self.shape.rope_local)
            self._angles = [half_angles(rope, max(256, 2 * longest)) for rope in ropes]
        return self._angles


def _parts(x: Tensor, sizes: Sequence[int]) -> list[Tensor]:
    return [x] if len(sizes) == 1 else list(torch.split(x, list(sizes)))


def _rounded(layer: PassLayer) -> PassLayer:
    """The same weights in memory, multiplied with rounded inputs."""

    def rounded(part: PackedLinear) -> PackedLinear:
        return PackedLinear(part.matrices, part.bias, "int8")

    return replace(
        layer,
        qkv=rounded(layer.qkv),
        out=rounded(layer.out),
        gate_up=rounded(layer.gate_up),
        down=rounded(layer.down),
    )


def _shape(shape: DecoderShape) -> PassShape:
    return PassShape(
        hidden=shape.hidden_size,
        heads=shape.heads,
        kv_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        intermediate=shape.intermediate_size,
        norm_eps=shape.norm_eps,
        attention_scale=shape.attention_scale,
        attention_softcap=shape.attention_softcap,
        logit_softcap=shape.logit_softcap,
        embedding_scale=shape.embedding_scale,
        tanh_gelu=shape.activation == "gelu_tanh",
    )


def _layer(layer: Layer, shape: DecoderShape, i: int) -> PassLayer:
    mlp = layer.mlp
    if not isinstance(mlp, GatedMlp):
        raise UnsupportedModelError("mixture-of-experts layers have no fused pass")
    parts = layer.qkv, layer.out, mlp.gate_up, mlp.down
    qkv, out, gate_up, down = (part for part in parts if isinstance(part, PackedLinear))
    return PassLayer(
        attn_norm=layer.attn_norm.weight,
        qkv=qkv,
        qk_norm=None if layer.qk_norm is None else layer.qk_norm.weight,
        out=out,
        post_attn_norm=None if layer.post_attn_norm is None else layer.post_attn_norm.weight,
        mlp_norm=layer.mlp_norm.weight,
        gate_up=gate_up,
        down=down,
        post_mlp_norm=None if layer.post_mlp_norm is None else layer.post_mlp_norm.weight,
        window=shape.windows[i],
        rope=int(shape.rope_local is not None and shape.windows[i] is not None),
    )


def _name(dtype: torch.dtype) -> Literal["float32", "bfloat16"]:
    return "float32" if dtype == torch.float32 else "bfloat16"
