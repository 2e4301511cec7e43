"""A small model to be trained: made new or of the target's first layers, and written as a folder to load from."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from foredraft.errors import UnsupportedModelError
from foredraft.models.build import build_decoder
from foredraft.models.decoder import Decoder
from foredraft.models.info import LoadedModel
from foredraft.models.linear import DenseLinear, Linear, dense_linear
from foredraft.models.loading import load_model
from foredraft.models.mlp import GatedMlp
from foredraft.models.norm import RMSNorm
from foredraft.models.shape import DecoderShape
from foredraft.models.shape_config import shape_from_config
from foredraft.models.tokenizer import Tokenizer
from foredraft.models.tokenizer_folder import read_json
from foredraft.models.weights import Weight
from foredraft.train.config import DraftTraining

EMBEDDING_SIZE = 0.02
"""Root mean square of a new model's embedding."""
_TOKENIZER_FILES = ("tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab.*", "merges.txt", "*.jinja")


@dataclass(frozen=True, slots=True)
class Student:
    """A model in training.

    Attributes:
        model: The decoder; its weights are float32 and dense.
        config: Its ``config.json``.
    """

    model: Decoder
    config: Mapping[str, Any]

    def parameters(self) -> dict[str, Tensor]:
        """Every weight by name; those that are to be trained ask for gradients.

        Norms of queries and keys are not trained: they are stored once a layer and held once a head.
        """
        model = self.model
        found = {"embedding": model.embedding, "norm": model.final_norm.weight}
        if not model.shape.tied:
            found |= _of_linear("head", model.head)
        for i, layer in enumerate(model.layers):
            assert isinstance(layer.mlp, GatedMlp)
            for name, norm in (
                ("attn_norm", layer.attn_norm),
                ("post_attn_norm", layer.post_attn_norm),
                ("mlp_norm", layer.mlp_norm),
                ("post_mlp_norm", layer.post_mlp_norm),
            ):
                if norm is not None:
                    found[f"{i}.{name}"] = norm.weight
            for name, linear in (("qkv", layer.qkv), ("out", layer.out)):
                found |= _of_linear(f"{i}.{name}", linear)
            found |= _of_linear(f"{i}.gate_up", layer.mlp.gate_up) | _of_linear(f"{i}.down", layer.mlp.down)
        for value in found.values():
            value.requires_grad_(True)
        return found

    def weights(self) -> dict[str, Tensor]:
        """The weights under the names of transformers, float32 on the CPU."""
        model, shape = self.model, self.model.shape
        found = {"model.embed_tokens.weight": model.embedding, "model.norm.weight": self._norm(model.final_norm)}
        if not shape.tied:
            found["lm_head.weight"] = _parts(model.head, ())["weight"][0]
        kv = shape.kv_heads * shape.head_dim
        after, before = "post_attention_layernorm", "post_attention_layernorm"
        if shape.sandwich_norms:
            before = "pre_feedforward_layernorm"
        for i, layer in enumerate(model.layers):
            assert isinstance(layer.mlp, GatedMlp)
            named: dict[str, Tensor] = {}
            for names, linear, sizes in (
                ("q_proj k_proj v_proj", layer.qkv, (shape.heads * shape.head_dim, kv, kv)),
                ("o_proj", layer.out, ()),
                ("gate_proj up_proj", layer.mlp.gate_up, (shape.intermediate_size,) * 2),
                ("down_proj", layer.mlp.down, ()),
            ):
                block = "self_attn" if linear in (layer.qkv, layer.out) else "mlp"
                for kind, parts in _parts(linear, sizes).items():
                    named |= {f"{block}.{n}.{kind}": part for n, part in zip(names.split(), parts, strict=True)}
            named["input_layernorm.weight"] = self._norm(layer.attn_norm)
            named[f"{before}.weight"] = self._norm(layer.mlp_norm)
            if layer.post_attn_norm is not None and layer.post_mlp_norm is not None:
                named[f"{after}.weight"] = self._norm(layer.post_attn_norm)
                named["post_feedforward_layernorm.weight"] = self._norm(layer.post_mlp_norm)
            if layer.qk_norm is not None:
                named["self_attn.q_norm.weight"] = self._norm(layer.qk_norm)[0]
                named["self_attn.k_norm.weight"] = self._norm(layer.qk_norm)[-1]
            found |= {f"model.layers.{i}.{name}": value for name, value in named.items()}
        return {name: value.detach().float().cpu().clone() for name, value in found.items()}

    def _norm(self, norm: RMSNorm) -> Tensor:
        return norm.weight - 1 if self.model.shape.norm_plus_one else norm.weight


def make_student(loaded: LoadedModel, options: DraftTraining, device: torch.device) -> Student:
    """The model that a run starts from.

    Args:
        loaded: The target.
        options: ``first_layers``, or the sizes of a new model.

    Raises:
        UnsupportedModelError: The target's first layers cannot be trained or written.
        ConfigError: The target has fewer layers.
    """
    if options.first_layers is not None:
        return _first_layers(loaded, options.first_layers, device)
    return _new(loaded, options, device)


def write_student(
    folder: Path,
    config: Mapping[str, Any],
    weights: Mapping[str, Tensor],
    loaded: LoadedModel,
    dtype: torch.dtype = torch.bfloat16,
) -> None:
    """Writes ``config.json``, ``model.safetensors`` and the target's tokenizer."""
    folder.mkdir(parents=True, exist_ok=True)
    stated = {**config, "dtype": str(dtype).removeprefix("torch.")}
    if loaded.tokenizer is not None and "eos_token_id" not in stated:
        stated["eos_token_id"] = sorted(loaded.tokenizer.eos_ids)
    (folder / "config.json").write_text(json.dumps(stated, indent=2) + "\n", "utf-8")
    save_file({n: v.to(dtype).contiguous() for n, v in weights.items()}, folder / "model.safetensors", {"format": "pt"})
    if loaded.info.path.is_dir():
        for pattern in _TOKENIZER_FILES:
            for file in loaded.info.path.glob(pattern):
                shutil.copyfile(file, folder / file.name)
    elif loaded.tokenizer is not None:
        _write_tokenizer(folder, loaded.tokenizer)


def _write_tokenizer(folder: Path, tokenizer: Tokenizer) -> None:
    """A tokenizer that came out of a GGUF file. One with ids that only pad is left out: folders cannot say which."""
    if tokenizer.has_padding_ids:
        return
    (folder / "tokenizer.json").write_text(tokenizer.backend.to_str(), "utf-8")
    settings: dict[str, Any] = dict(tokenizer.special_tokens)
    if tokenizer.has_chat_template:
        settings["chat_template"] = tokenizer.chat_template
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n", "utf-8")


def _first_layers(loaded: LoadedModel, layers: int, device: torch.device) -> Student:
    path = loaded.info.path
    stated = read_json(path / "config.json") if path.is_dir() else {}
    model = load_model(path, dtype="float32", device=str(device), layers=layers, make_linear=dense_linear).target
    assert isinstance(model, Decoder)  # `layers` is refused for other kinds
    if model.shape.moe is not None:
        raise UnsupportedModelError("mixtures of experts are not trained", field="first_layers", remedy="use layers")
    if stated:
        config: dict[str, Any] = {**stated, "num_hidden_layers": layers}
        if isinstance(config.get("layer_types"), list):
            config["layer_types"] = config["layer_types"][:layers]
        config.pop("torch_dtype", None)
    else:
        config = _config(model.shape)
    if "text_config" in config or shape_from_config(config) != _named(model.shape, config):
        raise UnsupportedModelError(
            "the first layers of this model cannot be written as a model of their own",
            field="first_layers",
            remedy="use a folder of safetensors of a text model, or layers for a new model",
        )
    model.embedding = model.embedding.clone()
    if model.shape.tied:
        model.head = DenseLinear(model.embedding)
    return Student(model, config)


def _named(shape: DecoderShape, config: Mapping[str, Any]) -> DecoderShape:
    return replace(shape, architecture=str(config.get("model_type")))


def _config(shape: DecoderShape) -> dict[str, Any]:
    """``config.json`` of a plain model of this shape; it says less than some shapes need, so read it again."""
    theta = shape.rope.inverse_frequencies
    base = theta[1] ** (-shape.head_dim / 2) if len(theta) > 1 else 10000.0
    kind = "qwen3" if shape.qk_norm else "qwen2" if shape.qkv_bias and not shape.out_bias else "llama"
    return {
        "architectures": [{"qwen3": "Qwen3ForCausalLM", "qwen2": "Qwen2ForCausalLM"}.get(kind, "LlamaForCausalLM")],
        "model_type": kind,
        "vocab_size": shape.vocab_size,
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.intermediate_size,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "rms_norm_eps": shape.norm_eps,
        "rope_parameters": {"rope_type": "default", "rope_theta": float(f"{base:.6g}")},
        "max_position_embeddings": shape.max_positions,
        "hidden_act": "silu",
        "attention_bias": shape.out_bias,
        "mlp_bias": shape.mlp_bias,
        "tie_word_embeddings": shape.tied,
    }


def _new(loaded: LoadedModel, options: DraftTraining, device: torch.device) -> Student:
    config: dict[str, Any] = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": loaded.target.vocab_size,
        "hidden_size": options.hidden,
        "intermediate_size": options.intermediate or 3 * options.hidden,
        "num_hidden_layers": options.layers,
        "num_attention_heads": options.heads,
        "num_key_value_heads": options.heads,
        "head_dim": options.hidden // options.heads,
        "rms_norm_eps": 1e-5,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "max_position_embeddings": loaded.target.max_context or 4096,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": True,
    }
    shape = shape_from_config(config)
    torch.manual_seed(options.seed)
    model = build_decoder(_NewWeights(shape, loaded.target), shape, torch.float32, device)
    return Student(model, config)


class _NewWeights:
    """Random weights of a plain model, as a :class:`~foredraft.models.weights.TensorSource`.

    The embedding is the target's along its main directions, where it can be read and is wide enough.
    """

    path = Path("new model")

    def __init__(self, shape: DecoderShape, target: object) -> None:
        d, inner = shape.hidden_size, shape.intermediate_size
        width = shape.heads * shape.head_dim
        self._target, self._shape = target, shape
        self._sizes: dict[str, tuple[int, ...]] = {"output_norm.weight": (d,)}
        for i in range(shape.layers):
            self._sizes |= {f"blk.{i}.{name}.weight": (d,) for name in ("attn_norm", "ffn_norm")}
            self._sizes |= {f"blk.{i}.attn_{name}.weight": (width, d) for name in "qkv"}
            self._sizes |= {f"blk.{i}.ffn_{name}.weight": (inner, d) for name in ("gate", "up")}
            self._sizes |= {f"blk.{i}.attn_output.weight": (d, width), f"blk.{i}.ffn_down.weight": (d, inner)}

    def find(self, name: str) -> Weight | None:
        if name == "token_embd.weight":
            return Weight(name, (self._shape.vocab_size, self._shape.hidden_size), self._embedding)
        size = self._sizes.get(name)
        return None if size is None else Weight(name, size, lambda: self._initial(name, size))

    def _initial(self, name: str, size: tuple[int, ...]) -> Tensor:
        if len(size) == 1:
            return torch.ones(size)
        quiet = (
            1 / math.sqrt(2 * self._shape.layers) if name.endswith(("attn_output.weight", "ffn_down.weight")) else 1.0
        )
        return torch.randn(size) * (quiet / math.sqrt(size[1]))

    def _embedding(self) -> Tensor:
        d = self._shape.hidden_size
        if not isinstance(self._target, Decoder) or self._target.shape.hidden_size < d:
            return torch.randn(self._shape.vocab_size, d).mul_(EMBEDDING_SIZE)
        with torch.no_grad():  # through `embed`, because the table itself may be packed
            parts = torch.split(torch.arange(self._shape.vocab_size, device=self._target.device), 4096)
            known = torch.cat([self._target.embed(part).float().cpu() for part in parts])
        directions = torch.linalg.eigh(known.T @ known)[1][:, -d:]
        found = torch.mm(known, directions)
        return found.mul_(EMBEDDING_SIZE / float(found.square().mean()) ** 0.5)


def _of_linear(name: str, linear: Linear) -> dict[str, Tensor]:
    assert isinstance(linear, DenseLinear)
    found = {name: linear.weight}
    return found if linear.bias is None else found | {f"{name}.bias": linear.bias}


def _parts(linear: Linear, rows: tuple[int, ...]) -> dict[str, list[Tensor]]:
    """Weight and bias, cut into stacks of ``rows``."""
    assert isinstance(linear, DenseLinear)
    found = {"weight": linear.weight} if linear.bias is None else {"weight": linear.weight, "bias": linear.bias}
    return {kind: list(torch.split(value, list(rows))) if rows else [value] for kind, value in found.items()}
