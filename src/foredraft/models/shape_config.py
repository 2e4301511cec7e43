"""A decoder's shape from a Hugging Face ``config.json`` (the layout of transformers 5 and the older one)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from foredraft.errors import UnsupportedModelError
from foredraft.models.rope import make_rope
from foredraft.models.shape import Activation, DecoderShape, MoeShape, Rope

_MOE = {"mixtral", "qwen2_moe", "qwen3_moe"}
_GEMMA = {"gemma", "gemma2", "gemma3_text"}
FAMILIES = frozenset({"llama", "mistral", "qwen2", "qwen3", *_GEMMA, *_MOE})
"""Model types that the decoder runs."""

_COMMON = (
    "architectures model_type dtype torch_dtype transformers_version name_or_path initializer_range use_cache "
    "attention_dropout pretraining_tp bos_token_id eos_token_id pad_token_id unk_token_id sep_token_id "
    "output_router_logits router_aux_loss_coef router_jitter_noise chunk_size_feed_forward is_encoder_decoder "
    "output_attentions output_hidden_states return_dict id2label label2id problem_type cache_implementation "
    "task_specific_params generation_config head_dim num_attention_heads num_key_value_heads hidden_size "
    "num_hidden_layers intermediate_size vocab_size max_position_embeddings rms_norm_eps tie_word_embeddings "
    "rope_parameters rope_scaling rope_theta hidden_act hidden_activation attention_bias mlp_bias layer_types "
    "sliding_window use_sliding_window max_window_layers partial_rotary_factor torchscript tokenizer_class "
    "is_decoder is_llama_config transformers.js_config bos_token eos_token pad_token"
)
_NO_EFFECT = set(_COMMON.split())
"""Keys read below, and keys that change nothing when decoding."""

_OWN = {
    "gemma2": {"query_pre_attn_scalar", "final_logit_softcapping", "attn_logit_softcapping"},
    "gemma3_text": {
        *("query_pre_attn_scalar", "final_logit_softcapping", "attn_logit_softcapping"),
        *("rope_local_base_freq", "sliding_window_pattern", "_sliding_window_pattern"),
    },
    "mixtral": {"num_local_experts", "num_experts_per_tok", "num_experts"},
    "qwen2_moe": {
        *("num_experts", "num_local_experts", "num_experts_per_tok", "norm_topk_prob", "moe_intermediate_size"),
        *("shared_expert_intermediate_size", "decoder_sparse_step", "mlp_only_layers", "qkv_bias"),
    },
}
_OWN["qwen3_moe"] = _OWN["qwen2_moe"] - {"shared_expert_intermediate_size", "qkv_bias"}
_MEANINGLESS: tuple[Any, ...] = (None, False, "", (), [], {})
"""Values that leave a feature off, whatever it is."""

_ACTIVATIONS: dict[str, Activation] = {"silu": "silu", "gelu_pytorch_tanh": "gelu_tanh"}
_WINDOWED, _FULL = "sliding_attention", "full_attention"


def shape_from_config(config: Mapping[str, Any]) -> DecoderShape:
    """Reads the shape.

    Raises:
        UnsupportedModelError: Another model type, an unknown key that is switched on, or an unknown value: what
            the decoder does not know, it refuses.
    """
    name = config.get("model_type")
    if name == "gemma3" and isinstance(config.get("text_config"), Mapping):  # text part of a picture-reading model
        return shape_from_config({"tie_word_embeddings": True, "model_type": "gemma3_text", **config["text_config"]})
    if name not in FAMILIES:
        raise UnsupportedModelError(f"{name!r} is not one that the decoder runs", field="model_type")
    known = _NO_EFFECT | _OWN.get(name, set())
    for key, value in config.items():
        if key not in known and not key.startswith("_") and value not in _MEANINGLESS:
            raise UnsupportedModelError(f"{value!r:.60} is not understood for model type {name!r}", field=key)
    try:
        return _shape(name, config)
    except KeyError as missing:
        raise UnsupportedModelError("is missing from config.json", field=str(missing).strip("'")) from None
    except (TypeError, ValueError, ArithmeticError, AttributeError) as error:
        raise UnsupportedModelError(f"has a value of the wrong kind ({error})", field="config.json") from None


def _shape(name: str, config: Mapping[str, Any]) -> DecoderShape:
    d, heads, layers = config["hidden_size"], config["num_attention_heads"], config["num_hidden_layers"]
    defaults = {"qwen3": 128, "gemma": 256, "gemma2": 256, "gemma3_text": 256}
    head_dim = config.get("head_dim") or defaults.get(name) or d // heads
    windows, gemma = _windows(name, config, layers), name in _GEMMA
    rope, rope_local = _ropes(name, config, head_dim)
    bias = bool(config.get("attention_bias", False))
    return DecoderShape(
        architecture=name,
        vocab_size=config["vocab_size"],
        hidden_size=d,
        intermediate_size=config["intermediate_size"],
        heads=heads,
        kv_heads=config.get("num_key_value_heads") or heads,
        head_dim=head_dim,
        windows=windows,
        rope=rope,
        rope_local=rope_local,
        norm_eps=config.get("rms_norm_eps", 1e-6),
        max_positions=config["max_position_embeddings"],
        tied=bool(config.get("tie_word_embeddings", gemma)),
        attention_scale=(config.get("query_pre_attn_scalar", 256) if name in _GEMMA - {"gemma"} else head_dim) ** -0.5,
        activation=_activation(name, config),
        qkv_bias=config.get("qkv_bias", True) if name == "qwen2_moe" else name == "qwen2" or bias,
        out_bias=bias,
        mlp_bias=bool(config.get("mlp_bias", False)),
        qk_norm=name in {"qwen3", "qwen3_moe", "gemma3_text"},
        sandwich_norms=name in {"gemma2", "gemma3_text"},
        norm_plus_one=gemma,
        embedding_scale=d**0.5 if gemma else 1.0,
        attention_softcap=_attention_softcap(name, config),
        logit_softcap=config.get("final_logit_softcapping", 30.0 if name == "gemma2" else None),
        moe=_moe(name, config, layers) if name in _MOE else None,
    )


def _attention_softcap(name: str, config: Mapping[str, Any]) -> float | None:
    if name == "gemma2":
        cap: float | None = config.get("attn_logit_softcapping", 50.0)
        return cap
    if config.get("attn_logit_softcapping") is not None:  # Gemma 3 kept the key and dropped the feature
        raise UnsupportedModelError("is not defined for this model type", field="attn_logit_softcapping")
    return None


def _activation(name: str, config: Mapping[str, Any]) -> Activation:
    default = "gelu_pytorch_tanh" if name in _GEMMA else "silu"
    value = config.get("hidden_activation") or config.get("hidden_act") or default
    if name == "gemma" and value == "gelu":  # a slip in the first releases
        value = default
    if value not in _ACTIVATIONS:
        raise UnsupportedModelError(f"{value!r} is not supported", field="hidden_act")
    return _ACTIVATIONS[value]


def _windows(name: str, config: Mapping[str, Any], layers: int) -> tuple[int | None, ...]:
    window = config.get("sliding_window", 4096 if name in {"mistral", "gemma2", "gemma3_text"} else None)
    if name in {"llama", "gemma"} and window is not None:
        raise UnsupportedModelError("is not defined for this model type", field="sliding_window")
    if name.startswith("qwen") and not config.get("use_sliding_window", False):
        window = None
    types = config.get("layer_types")
    if types is None:
        types = [_FULL if window is None else _default_type(name, config, i) for i in range(layers)]
    if len(types) != layers or not set(types) <= {_WINDOWED, _FULL}:
        raise UnsupportedModelError(f"{types!r:.80} does not fit {layers} layers", field="layer_types")
    if name in {"mistral", "mixtral", "qwen3_moe"} and window is not None and "layer_types" in config:
        raise UnsupportedModelError("is ambiguous for this model type", field="layer_types")
    return tuple(window if kind == _WINDOWED else None for kind in types)


def _default_type(name: str, config: Mapping[str, Any], layer: int) -> str:
    if name in {"gemma2", "gemma3_text"}:
        period = 2 if name == "gemma2" else config.get("sliding_window_pattern") or 6
        return _WINDOWED if (layer + 1) % period else _FULL
    if name == "qwen2_moe":
        return _WINDOWED if (layer + 1) % 2 and layer < config.get("max_window_layers", 28) else _FULL
    if name in {"qwen2", "qwen3"}:
        return _WINDOWED if layer >= config.get("max_window_layers", 28) else _FULL
    return _WINDOWED


def _ropes(name: str, config: Mapping[str, Any], head_dim: int) -> tuple[Rope, Rope | None]:
    """Rotary embeddings of full and of windowed layers; the second is None where there is one kind."""
    longest = config["max_position_embeddings"]
    parameters = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
    theta = config.get("rope_theta") or {"mixtral": 1e6, "gemma3_text": 1e6}.get(name, 1e4)
    shared = {"rope_theta": theta, "partial_rotary_factor": config.get("partial_rotary_factor")}
    if name != "gemma3_text":
        if _FULL in parameters or _WINDOWED in parameters:
            raise UnsupportedModelError("is not defined per layer type for this model type", field="rope_parameters")
        return make_rope(shared | parameters, head_dim, longest), None
    local = {"rope_theta": config.get("rope_local_base_freq", 1e4)}
    if _FULL in parameters or _WINDOWED in parameters:
        full, local = shared | (parameters.get(_FULL) or {}), local | (parameters.get(_WINDOWED) or {})
    else:
        full = shared | parameters
    return make_rope(full, head_dim, longest), make_rope(local, head_dim, longest)


def _moe(name: str, config: Mapping[str, Any], layers: int) -> MoeShape:
    if name == "mixtral":
        experts = config.get("num_local_experts", config.get("num_experts", 8))
        return MoeShape(experts, config.get("num_experts_per_tok", 2), True, config["intermediate_size"])
    step, dense = config.get("decoder_sparse_step", 1), set(config.get("mlp_only_layers") or ())
    experts = config["num_experts"] if "num_experts" in config else config["num_local_experts"]
    return MoeShape(
        experts=experts,
        top_k=config["num_experts_per_tok"],
        normalise=bool(config.get("norm_topk_prob", False)),
        intermediate=config["moe_intermediate_size"],
        shared_intermediate=config.get("shared_expert_intermediate_size", 5632) if name == "qwen2_moe" else 0,
        dense_layers=frozenset(i for i in range(layers) if i in dense or (i + 1) % step),
    )
