"""Writes tiny transformers models as GGUF files, the way llama.cpp's converter does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from torch import Tensor

from foredraft.models.safetensors_folder import _LAYER, _SANDWICH

ARCHITECTURES = {
    "llama": "llama",
    "llama_wide_heads": "llama",
    "llama_bias_untied": "llama",
    "mistral_window": "llama",
    "mixtral": "llama",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "gemma": "gemma",
    "gemma2_gguf": "gemma2",
    "gemma3_gguf": "gemma3",
    "qwen2_moe_gguf": "qwen2moe",
    "qwen3_moe_gguf": "qwen3moe",
}


def write_gguf(model: Any, architecture: str, path: Path, kind: str = "F32", tokens: int = 0) -> None:
    """Writes the model and rounds its own matrices to what the file holds, so that it is the exact reference."""
    config = model.config
    writer = gguf.GGUFWriter(path, architecture)
    _metadata(writer, config, architecture)
    state = {name: weight.data for name, weight in model.named_parameters()}
    for name, weight in state.items():
        for target, part in _split(name, weight, config, architecture):
            _write(writer, target, part, kind if part.dim() > 1 and "ffn_gate_inp" not in target else "F32", config)
    if tokens:
        writer.add_tokenizer_model("gpt2")
        writer.add_token_list([f"t{i}" for i in range(tokens)])
        writer.add_token_merges([])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _metadata(writer: Any, config: Any, architecture: str) -> None:
    writer.add_name("tiny")
    writer.add_license("apache-2.0")
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    rope = config.rope_parameters
    writer.add_rope_freq_base(rope.get("full_attention", rope).get("rope_theta"))
    if getattr(config, "sliding_window", None):
        writer.add_sliding_window(config.sliding_window)
    if architecture == "gemma2":
        writer.add_attn_logit_softcapping(config.attn_logit_softcapping)
        writer.add_final_logit_softcapping(config.final_logit_softcapping)
    experts = getattr(config, "num_local_experts", None) or getattr(config, "num_experts", None)
    if experts:
        writer.add_expert_count(experts)
        writer.add_expert_used_count(config.num_experts_per_tok)
    if architecture.endswith("moe"):
        writer.add_expert_feed_forward_length(config.moe_intermediate_size)
    if architecture == "qwen2moe":
        writer.add_expert_shared_feed_forward_length(config.shared_expert_intermediate_size)


def _split(name: str, weight: Tensor, config: Any, architecture: str) -> list[tuple[str, Tensor]]:
    """GGUF names of one parameter; fused experts fall into two."""
    if not name.startswith("model.layers."):
        top = {"model.embed_tokens.weight": "token_embd.weight", "model.norm.weight": "output_norm.weight"}
        return [(top.get(name, "output.weight"), weight)]
    _, _, layer, rest = name.split(".", 3)
    if rest.endswith("experts.gate_up_proj"):
        gate, up = weight.chunk(2, 1)
        return [(f"blk.{layer}.ffn_gate_exps.weight", gate), (f"blk.{layer}.ffn_up_exps.weight", up)]
    if rest.endswith("experts.down_proj"):
        return [(f"blk.{layer}.ffn_down_exps.weight", weight)]
    sandwich = architecture in {"gemma2", "gemma3"}
    names = {theirs: mine for mine, theirs in (_LAYER | _SANDWICH if sandwich else _LAYER).items()}
    names["block_sparse_moe.gate"] = "ffn_gate_inp"
    stem, _, end = rest.rpartition(".")
    return [(f"blk.{layer}.{names[stem]}.{end}", weight)]


def _write(writer: Any, name: str, weight: Tensor, kind: str, config: Any) -> None:
    quantised = gguf.GGMLQuantizationType[kind]
    rounded = gguf.quants.dequantize(gguf.quants.quantize(weight.numpy(), quantised), quantised)
    weight.copy_(torch.from_numpy(np.ascontiguousarray(rounded)).view(weight.shape))
    stored = weight.clone()
    if writer.arch == "llama" and name.split(".")[-2] in {"attn_q", "attn_k"}:
        heads = config.num_attention_heads if "attn_q" in name else config.num_key_value_heads
        stored = stored.view(heads, 2, stored.shape[0] // heads // 2, -1).transpose(1, 2).reshape(stored.shape)
    if "norm" in name and writer.arch.startswith("gemma"):
        stored = stored + 1
    if name.endswith("ffn_gate_inp_shexp.weight"):
        stored = stored[0]  # converters squeeze it
    writer.add_tensor(name, gguf.quants.quantize(stored.numpy(), quantised), raw_dtype=quantised)
