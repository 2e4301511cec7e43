"""A decoder's shape from GGUF metadata."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from foredraft.errors import ModelLoadError, UnsupportedModelError
from foredraft.models.gguf_file import GGUFFile
from foredraft.models.rope import make_rope
from foredraft.models.shape import DecoderShape, MoeShape, Rope

_GEMMA = {"gemma", "gemma2", "gemma3"}
_DENSE = {"llama", "qwen2", "qwen3", *_GEMMA}
_MOE = {"qwen2moe", "qwen3moe"}
_KEYS = set(
    """vocab_size context_length embedding_length block_count feed_forward_length tensor_data_layout
    attention.head_count attention.head_count_kv attention.key_length attention.value_length
    attention.layer_norm_rms_epsilon attention.sliding_window attention.sliding_window_pattern
    rope.dimension_count rope.freq_base rope.freq_base_swa rope.scale_linear rope.scaling.type rope.scaling.factor
    rope.scaling.original_context_length rope.scaling.finetuned attn_logit_softcapping final_logit_softcapping
    expert_count expert_used_count expert_feed_forward_length expert_shared_feed_forward_length""".split()  # noqa: SIM905
)
"""Keys that are understood; any other may change the arithmetic and is refused."""


class _Keys:
    """Metadata of one architecture, with errors that name the missing key."""

    def __init__(self, file: GGUFFile, architecture: str) -> None:
        self._file, self._prefix = file, architecture + "."

    def __call__(self, key: str, default: Any = None) -> Any:
        value = self._file.metadata.get(self._prefix + key, default)
        if value is None:
            raise ModelLoadError(
                f"metadata key {self._prefix + key!r} is missing",
                field=str(self._file.path),
                remedy="convert the model again with a current converter",
            )
        if isinstance(value, list) and key != "attention.sliding_window_pattern":
            raise UnsupportedModelError(f"{self._prefix + key!r} varies by layer", field=str(self._file.path))
        return value

    def has(self, key: str) -> bool:
        return self._prefix + key in self._file.metadata


def shape_from_gguf(file: GGUFFile) -> DecoderShape:
    """Reads the shape.

    Raises:
        UnsupportedModelError: An architecture, scaling or feature that the decoder cannot run.
        ModelLoadError: A key is missing.
    """
    name = file.metadata.get("general.architecture")
    if name not in _DENSE | _MOE:
        raise UnsupportedModelError(f"architecture {name!r} is not one that the decoder runs", field=str(file.path))
    keys = _Keys(file, name)
    for key in file.metadata:
        if key.startswith(name + ".") and key.removeprefix(name + ".") not in _KEYS:
            raise UnsupportedModelError(f"metadata key {key!r} is not understood", field=str(file.path))
    try:
        return _shape(name, file, keys)
    except (TypeError, ValueError, ArithmeticError) as error:
        raise ModelLoadError(
            f"its metadata contradict themselves ({error})", field=str(file.path), remedy="download it again"
        ) from None


def _shape(name: str, file: GGUFFile, keys: _Keys) -> DecoderShape:
    heads, d = keys("attention.head_count"), keys("embedding_length")
    head_dim = keys("attention.key_length", d // heads)
    if keys("attention.value_length", head_dim) != head_dim or keys("rope.dimension_count", head_dim) != head_dim:
        raise UnsupportedModelError("value heads or rotated parts narrower than key heads", field=str(file.path))
    layers, gemma = keys("block_count"), name in _GEMMA
    max_positions = keys("context_length")
    sandwich = name in {"gemma2", "gemma3"}
    return DecoderShape(
        architecture=name,
        vocab_size=file.tensors["token_embd.weight"].shape[0] if "token_embd.weight" in file.tensors else 0,
        hidden_size=d,
        intermediate_size=keys("feed_forward_length"),
        heads=heads,
        kv_heads=keys("attention.head_count_kv", heads),
        head_dim=head_dim,
        windows=_windows(name, keys, layers),
        rope=_rope(file, keys, head_dim, max_positions, 1e6 if name == "gemma3" else 1e4),
        rope_local=make_rope({"rope_theta": keys("rope.freq_base_swa", 1e4)}, head_dim, max_positions)
        if name == "gemma3"
        else None,
        norm_eps=keys("attention.layer_norm_rms_epsilon"),
        max_positions=max_positions,
        tied="output.weight" not in file.tensors,
        attention_scale=_attention_scale(name, d, heads, head_dim, layers),
        activation="gelu_tanh" if gemma else "silu",
        qkv_bias="blk.0.attn_q.bias" in file.tensors,
        out_bias="blk.0.attn_output.bias" in file.tensors,
        mlp_bias="blk.0.ffn_up.bias" in file.tensors,
        qk_norm=name in {"qwen3", "qwen3moe", "gemma3"},
        sandwich_norms=sandwich,
        norm_plus_one=False,  # converters add the one
        embedding_scale=d**0.5 if gemma else 1.0,
        attention_softcap=keys("attn_logit_softcapping", 50.0) if name == "gemma2" else None,
        logit_softcap=_final_softcap(name, keys),
        moe=_moe(name, keys),
    )


def _final_softcap(name: str, keys: _Keys) -> float | None:
    if name == "gemma2":
        return float(keys("final_logit_softcapping", 30.0))
    return float(keys("final_logit_softcapping")) if keys.has("final_logit_softcapping") else None


def _attention_scale(name: str, d: int, heads: int, head_dim: int, layers: int) -> float:
    """GGUF does not store Gemma's query scale; the two largest models divide by the square root of d / heads."""
    largest = {"gemma2": 46, "gemma3": 62}.get(name)
    width = d // heads if layers == largest else head_dim
    return 1 / math.sqrt(width)


def _windows(name: str, keys: _Keys, layers: int) -> tuple[int | None, ...]:
    if not keys.has("attention.sliding_window"):
        return (None,) * layers
    window = int(keys("attention.sliding_window")) or None
    period = {"gemma2": 2, "gemma3": 6}.get(name, 1)
    if keys.has("attention.sliding_window_pattern"):
        pattern = keys("attention.sliding_window_pattern")
        if isinstance(pattern, list):
            return tuple(window if local else None for local in pattern)
        period = int(pattern)
    return tuple(window if period == 1 or (i + 1) % period else None for i in range(layers))


def _rope(file: GGUFFile, keys: _Keys, head_dim: int, max_positions: int, base: float) -> Rope:
    kind = keys("rope.scaling.type", "none")
    parameters: dict[str, Any] = {"rope_theta": keys("rope.freq_base", base)}
    if keys.has("rope.scale_linear"):  # the key of old converters
        kind, parameters["factor"] = "linear", keys("rope.scale_linear")
    if kind != "none":
        parameters["rope_type"] = kind
        parameters["factor"] = keys("rope.scaling.factor", parameters.get("factor"))
        if keys.has("rope.scaling.original_context_length"):
            parameters["original_max_position_embeddings"] = keys("rope.scaling.original_context_length")
        if keys.has("rope.scaling.attn_factor"):
            raise UnsupportedModelError("a scaled YaRN attention factor is not supported", field=str(file.path))
    rope = make_rope(parameters, head_dim, max_positions)
    divisors = file.find("rope_freqs.weight")  # Llama 3.1's scaling, worked out by the converter
    if divisors is None:
        return rope
    values: list[float] = divisors.read().double().tolist()
    return Rope(tuple(f / s for f, s in zip(rope.inverse_frequencies, values, strict=True)), rope.magnitude)


def _moe(name: str, keys: _Keys) -> MoeShape | None:
    if not keys.has("expert_count"):
        return None
    if name not in _MOE | {"llama"}:
        raise UnsupportedModelError(f"experts in architecture {name!r}", field=f"{name}.expert_count")
    inner = keys("feed_forward_length") if name == "llama" else keys("expert_feed_forward_length")
    shared = keys("expert_shared_feed_forward_length") if name == "qwen2moe" else 0
    return MoeShape(keys("expert_count"), keys("expert_used_count"), name != "qwen2moe", inner, shared)


def licence(metadata: Mapping[str, Any]) -> str | None:
    """The licence that the metadata names, if any."""
    value = metadata.get("general.license")
    return str(value) if value else None
