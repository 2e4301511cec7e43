"""What a trainer takes from the target: embeddings, the LM head's rows, and a layer to start from."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from foredraft.drafters.eagle_head import HeadShape
from foredraft.errors import UnsupportedModelError
from foredraft.kernels import PackedLinear
from foredraft.models.base import Target
from foredraft.models.decoder import Decoder
from foredraft.models.linear import DenseLinear, Linear
from foredraft.models.mlp import GatedMlp


class TargetParts:
    """The frozen parts of the target that training uses, for one draft vocabulary.

    Args:
        target: One of our decoders.
        token_ids: ``[D]`` int64: the draft vocabulary.

    Raises:
        UnsupportedModelError: Another kind of target, whose parts are not known here.
    """

    def __init__(self, target: Target, token_ids: Tensor) -> None:
        self.decoder = as_decoder(target)
        self.token_ids = token_ids
        self.rows = dense(self.decoder.head)[token_ids].float()

    def embed(self, tokens: Tensor) -> Tensor:
        """``[n]`` ids -> ``[n, d]`` float32."""
        return self.decoder.embed(tokens).float()

    def law(self, final: Tensor) -> Tensor:
        """The target's law over the draft vocabulary, renormalised: last layer's outputs ``[n, d]`` -> ``[n, D]``."""
        logits = functional.linear(self.decoder.final_norm(final.float()), self.rows)
        cap = self.decoder.shape.logit_softcap
        return (logits if cap is None else (logits / cap).tanh() * cap).softmax(-1)


def as_decoder(target: Target) -> Decoder:
    """The target as one of our decoders. Raises UnsupportedModelError if it is another kind of model."""
    if not isinstance(target, Decoder):
        raise UnsupportedModelError(
            "heads are trained for models that foredraft's own decoder runs",
            field="target",
            remedy="use a Llama, Mistral, Qwen or Gemma model",
        )
    return target


def dense(linear: Linear) -> Tensor:
    """The weights ``[out, in]`` of a linear as it multiplies with them."""
    if isinstance(linear, PackedLinear):
        return linear.dequantize()
    if isinstance(linear, DenseLinear):
        return linear.weight
    raise UnsupportedModelError(f"weights of {type(linear).__name__} cannot be read", field="target")


def initial_weights(target: Target, shape: HeadShape, token_ids: Tensor) -> dict[str, Tensor]:
    """Checkpoint names and values to start from: the target's last layer, final norm and LM head.

    The feature starts as the highest tap, and the embedding's half of q, k and v stays random, because no layer of
    the target has such an input. Weights that the head shares no size with are left out.
    """
    decoder = as_decoder(target)
    last, mlp, d = decoder.layers[-1], decoder.layers[-1].mlp, shape.hidden
    found = {"norm.weight": decoder.final_norm.weight, "lm_head.weight": dense(decoder.head)[token_ids]}
    if shape.target_hidden == d:
        fc = torch.zeros(d, len(shape.taps) * d)
        fc[:, -d:] = torch.eye(d)
        found["fc.weight"] = fc
    found["layers.0.hidden_norm.weight"] = last.attn_norm.weight
    found["layers.0.post_attention_layernorm.weight"] = last.mlp_norm.weight
    if isinstance(mlp, GatedMlp) and decoder.shape.intermediate_size == shape.intermediate:
        gate, up = dense(mlp.gate_up).chunk(2)
        found |= {"layers.0.mlp.gate_proj.weight": gate, "layers.0.mlp.up_proj.weight": up}
        found["layers.0.mlp.down_proj.weight"] = dense(mlp.down)
    same = decoder.shape.heads == shape.heads and decoder.shape.head_dim == shape.head_dim
    if same and decoder.shape.hidden_size == d:
        width, kv_width = shape.heads * shape.head_dim, decoder.shape.kv_heads * shape.head_dim
        parts = zip("qkv", torch.split(dense(last.qkv), [width, kv_width, kv_width]), strict=True)
        for name, part in parts:
            wanted = shape.heads if name == "q" else shape.kv_heads
            part = part.view(-1, shape.head_dim, d)
            part = part.repeat_interleave(wanted // part.shape[0], 0).reshape(wanted * shape.head_dim, d)
            found[f"layers.0.self_attn.{name}_proj.weight"] = torch.cat([torch.randn(part.shape) * 0.02, part], 1)
        found["layers.0.self_attn.o_proj.weight"] = dense(last.out)
    return {name: value.detach().float() for name, value in found.items()}
