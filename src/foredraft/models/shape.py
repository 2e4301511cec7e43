"""Everything that distinguishes one decoder of the Llama family from another, as plain frozen data.

One :class:`DecoderShape` describes Llama, SmolLM2, Mistral, Qwen2, Qwen3, Gemma 1–3, Mixtral and the Qwen MoE models;
:mod:`foredraft.models.decoder` runs any of them. It is read from a Hugging Face ``config.json``
(:mod:`foredraft.models.shape_config`) or from GGUF metadata (:mod:`foredraft.models.shape_gguf`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from foredraft.errors import ConfigError, UnsupportedModelError

Activation = Literal["silu", "gelu_tanh"]


@dataclass(frozen=True, slots=True)
class Rope:
    """Rotary position embedding (Su 2021, arXiv 2104.09864), every kind of scaling already applied.

    Attributes:
        inverse_frequencies: ``head_dim / 2`` angles per position, in float32 precision.
        magnitude: Factor on cosine and sine (YaRN's attention factor); 1 for all other kinds.
    """

    inverse_frequencies: tuple[float, ...]
    magnitude: float = 1.0


@dataclass(frozen=True, slots=True)
class MoeShape:
    """A mixture-of-experts MLP: a softmax router over ``experts``, of which ``top_k`` run for each token.

    Attributes:
        normalise: Whether the weights of the chosen experts are rescaled to sum to one.
        intermediate: Inner width of one expert.
        shared_intermediate: Inner width of the expert that always runs behind a sigmoid gate; 0 for none.
        dense_layers: Layers that have an ordinary MLP instead.
    """

    experts: int
    top_k: int
    normalise: bool
    intermediate: int
    shared_intermediate: int = 0
    dense_layers: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True)
class DecoderShape:
    """Sizes and switches of a decoder.

    Attributes:
        architecture: Model type as its file names it, e.g. ``"llama"`` or ``"gemma3_text"``.
        vocab_size: ``V``, rows of the embedding.
        hidden_size: ``d``.
        windows: One entry a layer: how many tokens, itself included, a token attends to; None for all.
        rope: Rotary embedding of layers that attend to everything, and of all layers if ``rope_local`` is None.
        rope_local: Rotary embedding of windowed layers where it differs (Gemma 3).
        attention_scale: Factor on attention scores, usually ``head_dim ** -0.5``.
        attention_softcap: Scores become ``cap * tanh(scores / cap)`` (Gemma 2).
        logit_softcap: The same for the logits.
        embedding_scale: Factor on token embeddings (Gemma's ``sqrt(d)``).
        norm_plus_one: The file stores RMSNorm weights minus one (Gemma).
        qk_norm: RMSNorm over each head of queries and keys (Qwen3, Gemma 3).
        sandwich_norms: Norms after attention and MLP too, before the residual sum (Gemma 2 and 3).
        tied: The LM head is the embedding matrix.
        max_positions: Longest context that the model was made for.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    heads: int
    kv_heads: int
    head_dim: int
    windows: tuple[int | None, ...]
    rope: Rope
    norm_eps: float
    max_positions: int
    tied: bool
    attention_scale: float
    rope_local: Rope | None = None
    activation: Activation = "silu"
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    sandwich_norms: bool = False
    norm_plus_one: bool = False
    embedding_scale: float = 1.0
    attention_softcap: float | None = None
    logit_softcap: float | None = None
    moe: MoeShape | None = None

    def __post_init__(self) -> None:
        sizes = (self.vocab_size, self.hidden_size, self.intermediate_size, self.heads, self.kv_heads, self.head_dim)
        moe = () if self.moe is None else (self.moe.experts, self.moe.top_k, self.moe.intermediate)
        if any(not isinstance(size, int) or size < 1 for size in (*sizes, *moe, self.layers, self.max_positions)):
            raise UnsupportedModelError("a size is not a positive integer", field=self.architecture)
        if self.heads % self.kv_heads or self.head_dim % 2 or (self.moe and self.moe.top_k > self.moe.experts):
            raise UnsupportedModelError("its sizes do not fit one another", field=self.architecture)
        if any(window is not None and window < 1 for window in self.windows):
            raise UnsupportedModelError("a window is not positive", field=self.architecture)

    @property
    def layers(self) -> int:
        return len(self.windows)

    @property
    def parameters(self) -> int:
        """Numbers in the model's weights, a tied LM head counted once."""
        d, width, kv_width = self.hidden_size, self.heads * self.head_dim, self.kv_heads * self.head_dim
        attention = 2 * d * (width + kv_width) + 2 * self.head_dim * self.qk_norm
        attention += (width + 2 * kv_width) * self.qkv_bias + d * self.out_bias
        dense = 3 * d * self.intermediate_size + (2 * self.intermediate_size + d) * self.mlp_bias
        total = self.vocab_size * d * (1 if self.tied else 2) + d
        for layer in range(self.layers):
            mlp = dense
            if self.moe is not None and self.is_moe(layer):
                mlp = self.moe.experts * (3 * d * self.moe.intermediate + d)
                mlp += 3 * d * self.moe.shared_intermediate + d if self.moe.shared_intermediate else 0
            total += attention + mlp + d * (4 if self.sandwich_norms else 2)
        return total

    def is_moe(self, layer: int) -> bool:
        return self.moe is not None and layer not in self.moe.dense_layers

    def truncated(self, layers: int) -> DecoderShape:
        """The same decoder with only its first ``layers`` layers, an early-exit draft model."""
        if not 1 <= layers <= self.layers:
            raise ConfigError(f"must be between 1 and {self.layers} for this model (got {layers})", field="layers")
        return replace(self, windows=self.windows[:layers])
