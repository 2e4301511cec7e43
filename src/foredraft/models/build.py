"""From a shape and a source of weights to a decoder."""

from __future__ import annotations

import torch
from torch import Tensor

from foredraft.models.cache import KVCache
from foredraft.models.decoder import Decoder, Layer
from foredraft.models.linear import DenseLinear, Linear, LinearFactory, dense_linear
from foredraft.models.memory import default_cache_bytes
from foredraft.models.mlp import GatedMlp, Mlp, MoeMlp
from foredraft.models.norm import RMSNorm
from foredraft.models.shape import DecoderShape
from foredraft.models.weights import TensorSource, require


def build_decoder(
    source: TensorSource,
    shape: DecoderShape,
    dtype: torch.dtype,
    device: torch.device,
    cache_bytes: int | None = None,
    max_context: int | None = None,
    make_linear: LinearFactory = dense_linear,
) -> Decoder:
    """Reads every weight of ``shape`` and assembles the decoder.

    Raises:
        ModelLoadError: A weight is missing, has the wrong shape or cannot be read.
    """
    with torch.inference_mode(False), torch.no_grad():
        builder = DecoderBuilder(source, shape, dtype, device, make_linear)
        embedding, layers, final = builder.embedding(), builder.layers(), builder.final_norm()
        head = builder.head(embedding)
    # The default budget is a share of the memory that is free now that the weights are in.
    budget = default_cache_bytes(device) if cache_bytes is None else cache_bytes
    cache = KVCache(shape.layers, shape.kv_heads, shape.head_dim, dtype, device, budget)
    longest = shape.max_positions if max_context is None else min(max_context, shape.max_positions)
    return Decoder(shape, embedding, layers, final, head, cache, longest)


class DecoderBuilder:
    """Reads one weight after another; :mod:`foredraft.models.parallel` reads shares of them."""

    def __init__(
        self,
        source: TensorSource,
        shape: DecoderShape,
        dtype: torch.dtype,
        device: torch.device,
        make_linear: LinearFactory,
    ) -> None:
        self._source, self._shape, self._dtype, self._device = source, shape, dtype, device
        self._make_linear = make_linear

    def embedding(self) -> Tensor:
        size = (self._shape.vocab_size, self._shape.hidden_size)
        return require(self._source, "token_embd.weight", size).dense(self._dtype).to(self._device).contiguous()

    def layers(self) -> list[Layer]:
        return [self._layer(i) for i in range(self._shape.layers)]

    def final_norm(self) -> RMSNorm:
        return self._norm("output_norm", self._shape.hidden_size)

    def head(self, embedding: Tensor) -> Linear:
        shape = self._shape
        if shape.tied and self._make_linear is dense_linear:
            return DenseLinear(embedding)  # one copy serves both
        return self._linear({"token_embd" if shape.tied else "output": shape.vocab_size}, shape.hidden_size, False)

    def _layer(self, i: int) -> Layer:
        shape, blk = self._shape, f"blk.{i}."
        width, kv_width = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
        qkv = {blk + "attn_q": width, blk + "attn_k": kv_width, blk + "attn_v": kv_width}
        sandwich = shape.sandwich_norms
        return Layer(
            attn_norm=self._norm(blk + "attn_norm", shape.hidden_size),
            qkv=self._linear(qkv, shape.hidden_size, shape.qkv_bias),
            qk_norm=self._qk_norm(blk) if shape.qk_norm else None,
            out=self._linear({blk + "attn_output": shape.hidden_size}, width, shape.out_bias),
            post_attn_norm=self._norm(blk + "post_attention_norm", shape.hidden_size) if sandwich else None,
            mlp_norm=self._norm(blk + "ffn_norm", shape.hidden_size),
            mlp=self._moe(blk) if shape.is_moe(i) else self._mlp(blk, "", shape.intermediate_size),
            post_mlp_norm=self._norm(blk + "post_ffw_norm", shape.hidden_size) if sandwich else None,
        )

    def _mlp(self, blk: str, suffix: str, inner: int) -> GatedMlp:
        outer, bias = self._shape.hidden_size, self._shape.mlp_bias
        gate_up = self._linear({f"{blk}ffn_gate{suffix}": inner, f"{blk}ffn_up{suffix}": inner}, outer, bias)
        return GatedMlp(gate_up, self._linear({f"{blk}ffn_down{suffix}": outer}, inner, bias), self._shape.activation)

    def _moe(self, blk: str) -> Mlp:
        moe, d = self._shape.moe, self._shape.hidden_size
        assert moe is not None
        router = self._linear({blk + "ffn_gate_inp": moe.experts}, d, False)
        experts = [self._mlp(blk, f"_exps.{e}", moe.intermediate) for e in range(moe.experts)]
        if not moe.shared_intermediate:
            return MoeMlp(moe, router, experts)
        gate = self._linear({blk + "ffn_gate_inp_shexp": 1}, d, False)
        return MoeMlp(moe, router, experts, self._mlp(blk, "_shexp", moe.shared_intermediate), gate)

    def _linear(self, rows: dict[str, int], width: int, bias: bool) -> Linear:
        """One linear from the named weights stacked; ``rows`` gives each one's output rows."""
        weights = [require(self._source, self._weight_name(name), (count, width)) for name, count in rows.items()]
        biases = [self._vector(name + ".bias", count) for name, count in rows.items()] if bias else None
        return self._make_linear(weights, torch.cat(biases) if biases else None, self._dtype, self._device)

    def _norm(self, name: str, size: int) -> RMSNorm:
        return RMSNorm(self._norm_weight(name, size), self._shape.norm_eps)

    def _norm_weight(self, name: str, size: int) -> Tensor:
        weight = self._vector(name + ".weight", size)
        return weight + 1 if self._shape.norm_plus_one else weight

    def _qk_norm(self, blk: str) -> RMSNorm:
        shape = self._shape
        q, k = (self._norm_weight(blk + name, shape.head_dim) for name in ("attn_q_norm", "attn_k_norm"))
        return RMSNorm(torch.cat([q.repeat(shape.heads, 1), k.repeat(shape.kv_heads, 1)]), shape.norm_eps)

    def _vector(self, name: str, size: int) -> Tensor:
        exact = torch.promote_types(self._dtype, torch.float32)
        return require(self._source, name, (size,)).dense(exact).to(self._device, copy=True)

    @staticmethod
    def _weight_name(name: str) -> str:
        return name if name.rpartition(".")[2].isdigit() else name + ".weight"
