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


def initial_weights(target: Target, shape: HeadShape, token_ids: Tensor, tap_scale: Tensor) -> dict[str, Tensor]:
    """Checkpoint names and values to start from; sizes that the head does not share with the target are left out.

    The feature starts as the highest tap, shrunk so that most of its dimensions are about one, and layer, final norm
    and LM head as the target's last. No layer of the target has the embedding's half of the input. The last third of
    the heads therefore starts by looking at its own row, where it reads the embedding: without that, the row's own
    token is lost in the mean over the text, and hundreds of steps pass before it is found.

    Args:
        target: The target.
        tap_scale: ``[len(taps) * target_hidden]`` usual size of each dimension of the tapped states.
    """
    decoder = as_decoder(target)
    last, mlp, d = decoder.layers[-1], decoder.layers[-1].mlp, shape.hidden
    found = {"norm.weight": decoder.final_norm.weight, "lm_head.weight": dense(decoder.head)[token_ids]}
    if decoder.shape.hidden_size != d:
        return {name: value.detach().float() for name, value in found.items() if value.shape[-1] == d}
    shrink = 1 / float(tap_scale[-d:].median())
    found["fc.weight"] = torch.cat([torch.zeros(d, (len(shape.taps) - 1) * d), torch.eye(d) * shrink], 1)
    found["layers.0.hidden_norm.weight"] = last.attn_norm.weight
    found["layers.0.post_attention_layernorm.weight"] = last.mlp_norm.weight
    if isinstance(mlp, GatedMlp) and decoder.shape.intermediate_size == shape.intermediate:
        gate, up = dense(mlp.gate_up).chunk(2)
        found |= {"layers.0.mlp.gate_proj.weight": gate, "layers.0.mlp.up_proj.weight": up}
        found["layers.0.mlp.down_proj.weight"] = dense(mlp.down) * shrink
    if (decoder.shape.heads, decoder.shape.head_dim) == (shape.heads, shape.head_dim):
        parts = _attention(dense(last.qkv), dense(last.out) * shrink, decoder.shape.kv_heads, shape)
        found |= {f"layers.0.self_attn.{name}_proj.weight": part for name, part in parts.items()}
    return {name: value.detach().float() for name, value in found.items()}


def _attention(qkv: Tensor, out: Tensor, kv_heads: int, shape: HeadShape) -> dict[str, Tensor]:
    """The target's heads over the feature, and heads of their own over the embedding."""
    d, dim, heads = shape.hidden, shape.head_dim, shape.heads
    own = heads // 3 if shape.kv_heads == heads else 0
    sizes = [heads * dim, kv_heads * dim, kv_heads * dim]
    parts = {}
    for name, part in zip("qkv", torch.split(qkv, sizes), strict=True):
        wanted = heads if name == "q" else shape.kv_heads
        rows = part.float().view(-1, dim, d)
        rows = rows.repeat_interleave(wanted // rows.shape[0], 0).reshape(wanted * dim, d)
        parts[name] = torch.cat([torch.randn(rows.shape) * 0.02, rows], 1)
    parts["o"] = out.float().clone()
    if own:
        first = (heads - own) * dim
        alike = torch.randn(own * dim, d) * (12 / (d * dim**0.5)) ** 0.5  # equal rows score about twelve
        value = torch.linalg.qr(torch.randn(d, own * dim))[0].T
        for name, rows in (("q", alike), ("k", alike), ("v", value)):
            parts[name][first:] = torch.cat([rows, torch.zeros_like(rows)], 1)
        parts["o"][:, first:] = torch.randn(d, own * dim) / (own * dim) ** 0.5
    return parts
