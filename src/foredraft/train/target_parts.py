"""What a trainer takes from the target: embeddings, the LM head's rows, and a layer to start from."""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional

from foredraft.errors import UnsupportedModelError
from foredraft.kernels import PackedLinear
from foredraft.models.base import Target
from foredraft.models.decoder import Decoder
from foredraft.models.linear import DenseLinear, Linear


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
        self.rows = dense(self.decoder.head)[token_ids.to(self.decoder.device)].float()

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
