"""Tiny random models of every family, made by transformers, and references to compare with."""

from __future__ import annotations

import os

os.environ["HF_HUB_OFFLINE"] = "1"

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor

from foredraft.models.base import Segment
from foredraft.models.catalog import resolve
from foredraft.models.loading import load_model

torch.set_num_threads(1)

SMOLLM2 = resolve("smollm2-135m") or Path("smollm2-135m.gguf")
"""The small real model; tests that need it are skipped where it is not there."""

_SIZE = {
    "vocab_size": 101,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_MOE = {"num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 64}

FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "llama_bias_untied": ("Llama", {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": False}),
    "llama_wide_heads": ("Llama", {"head_dim": 32, "tie_word_embeddings": True}),
    "llama_linear": ("Llama", {"rope_parameters": {"rope_type": "linear", "factor": 3.0, "rope_theta": 1e4}}),
    "llama_old_rope": ("Llama", {"rope_theta": 5e5}),
    "llama3_rope": (
        "Llama",
        {
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 5e5,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 64,
            }
        },
    ),
    "yarn": (
        "Qwen2",
        {
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 1e4,
                "factor": 4.0,
                "original_max_position_embeddings": 64,
            }
        },
    ),
    "mistral_window": ("Mistral", {"sliding_window": 16}),
    "qwen2": ("Qwen2", {"tie_word_embeddings": True}),
    "qwen2_window": ("Qwen2", {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 2}),
    "qwen3": ("Qwen3", {"head_dim": 24}),
    "gemma": ("Gemma", {"head_dim": 24}),
    "gemma2": ("Gemma2", {"head_dim": 24, "sliding_window": 8, "query_pre_attn_scalar": 40}),
    "gemma3": (
        "Gemma3Text",
        {"head_dim": 24, "sliding_window": 8, "query_pre_attn_scalar": 40, "sliding_window_pattern": 2},
    ),
    "mixtral": ("Mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "mixtral_window": ("Mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 8}),
    "qwen2_moe": ("Qwen2Moe", {**_MOE, "shared_expert_intermediate_size": 32, "decoder_sparse_step": 2}),
    "qwen3_moe": ("Qwen3Moe", {**_MOE, "head_dim": 24, "norm_topk_prob": True, "mlp_only_layers": [1]}),
    # What a GGUF file can say is less: no dense layers among experts, Gemma's query scale and period are implied.
    "gemma2_gguf": ("Gemma2", {"head_dim": 24, "sliding_window": 8, "query_pre_attn_scalar": 24}),
    "gemma3_gguf": (
        "Gemma3Text",
        {"head_dim": 24, "sliding_window": 8, "query_pre_attn_scalar": 24, "num_hidden_layers": 7},
    ),
    "qwen2_moe_gguf": ("Qwen2Moe", {**_MOE, "shared_expert_intermediate_size": 32}),
    "qwen3_moe_gguf": ("Qwen3Moe", {**_MOE, "head_dim": 24, "norm_topk_prob": True}),
}
"""Test name -> (class prefix in transformers, changes to the tiny configuration)."""

_CLASS = {"Gemma3Text": "Gemma3ForCausalLM"}


def make_hf(family: str, seed: int = 0) -> Any:
    """A tiny random transformers model with weights large enough for every part to matter."""
    prefix, changes = FAMILIES[family]
    config = getattr(transformers, prefix + "Config")(**{**_SIZE, **changes})
    config._attn_implementation = "eager"  # soft caps exist only there
    torch.manual_seed(seed)
    model = getattr(transformers, _CLASS.get(prefix, prefix + "ForCausalLM"))(config).eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            scale = 0.3 if "norm" in name else 1.5 * weight.shape[-1] ** -0.5 if weight.dim() > 1 else 0.5
            centre = 1.0 if "norm" in name and not prefix.startswith("Gemma") else 0.0
            weight.copy_(torch.randn(weight.shape) * scale + centre)
    return model


def save_and_load(model: Any, folder: Path, dtype: str = "float32", **options: Any) -> Any:
    """Our decoder from the model's own files."""
    model.save_pretrained(folder)
    return load_model(folder, dtype=dtype, device="cpu", cache_bytes=2**28, **options).target


@torch.no_grad()
def reference(model: Any, tokens: Sequence[int]) -> Tensor:
    """``[T, V]`` logits of transformers for one sequence."""
    return model(input_ids=torch.tensor([list(tokens)])).logits[0].float()


def random_tokens(count: int, seed: int = 0, vocab: int = 101) -> list[int]:
    return torch.randint(3, vocab, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def read(target: Any, slot: int, tokens: Sequence[int]) -> Tensor:
    """Appends and commits tokens; ``[T, V]`` logits."""
    logits = target.forward([Segment(slot, tokens)]).logits[0]
    target.cache.commit(slot, len(tokens))
    return logits


def fresh(target: Any, tokens: Sequence[int]) -> Tensor:
    """``[T, V]`` logits of a sequence read at once into a slot of its own."""
    slot = target.cache.allocate()
    logits = read(target, slot, tokens)
    target.cache.free(slot)
    return logits
