"""EAGLE-1 checkpoints in the original layout: ``fc`` over embedding and feature, and one layer without an input norm.

``config.json`` has the sizes of a Llama layer at its top and, where ``fc`` has none, ``"bias": false``. There is no LM
head and no norm at the end: the target's own read the features.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.nn import functional

from foredraft.drafters.eagle_checkpoint import (
    Checkpoint,
    check_target,
    head_shape,
    packed_product,
    read_checkpoint,
    target_mark,
)
from foredraft.drafters.eagle_head import HeadShape, HeadWeights
from foredraft.errors import ModelLoadError, UnsupportedModelError, VocabularyMismatchError
from foredraft.models.base import Target
from foredraft.models.decoder import Decoder
from foredraft.models.norm import RMSNorm


class FeatureReader:
    """The parts of the target that an EAGLE-1 head borrows: final norm and LM head.

    Raises:
        UnsupportedModelError: The target is no decoder of ours, whose parts are not known here.
    """

    def __init__(self, target: Target) -> None:
        if not isinstance(target, Decoder):
            raise UnsupportedModelError(
                "EAGLE-1 heads borrow the LM head of a model that foredraft's own decoder runs",
                field="target",
                remedy="use a Llama, Mistral, Qwen or Gemma model",
            )
        self._target = target

    @property
    def layers(self) -> int:
        return self._target.shape.layers

    def feature(self, final: Tensor) -> Tensor:
        """``[n, d]`` outputs of the last layer -> ``[n, d]`` float32, as they enter the LM head."""
        return self._target.final_norm(final.to(self._target.device).float()).cpu()

    def logits(self, features: Tensor) -> Tensor:
        """``[n, d]`` features -> ``[n, V]`` float32."""
        logits = self._target.head(features.to(self._target.device, self._target.dtype)).float()
        cap = self._target.shape.logit_softcap
        return (logits if cap is None else (logits / cap).tanh() * cap).cpu()


@dataclass(frozen=True, slots=True)
class Eagle1Weights:
    """The head's block, whose norms are absent, and the bias ``[d]`` of its ``fc``, if it has one."""

    block: HeadWeights
    bias: Tensor | None


def is_eagle1(checkpoint: Checkpoint) -> bool:
    """Whether a folder holds an EAGLE-1 head: one layer, and none of the norms that EAGLE-3 has."""
    names = checkpoint.tensors
    return "fc.weight" in names and "layers.0.hidden_norm.weight" not in names and "norm.weight" not in names


def eagle1_shape(checkpoint: Checkpoint, layers: int) -> HeadShape:
    """The head's sizes for a target of ``layers`` layers.

    Raises:
        ModelLoadError, UnsupportedModelError: A size is missing, or the folder holds what this layer has no place for.
    """
    if not is_eagle1(checkpoint):
        raise UnsupportedModelError(
            "holds no EAGLE-1 head", field=str(checkpoint.path), remedy="an EAGLE-3 head is used by eagle3:FOLDER"
        )
    if int(checkpoint.sizes.get("num_hidden_layers", 1)) != 1:
        raise UnsupportedModelError("must be 1", field=f"{checkpoint.path}: num_hidden_layers")
    sizes = head_shape(replace(checkpoint, config={**checkpoint.config, "eagle_aux_hidden_state_layer_ids": [layers]}))
    shape = replace(sizes, taps=(layers,), draft_vocab=sizes.vocab, norm_before_residual=False)
    places = {*eagle1_sizes(shape), "fc.bias", "embed_tokens.weight", "lm_head.weight"}
    unknown = sorted(set(checkpoint.tensors) - places)
    if unknown:
        raise UnsupportedModelError("is not part of an EAGLE-1 layer", field=f"{checkpoint.path}: {unknown[0]}")
    return shape


def eagle1_sizes(shape: HeadShape) -> dict[str, tuple[int, ...]]:
    """Names and sizes of the weights that must be there."""
    d, width, kv_width = shape.hidden, shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    return {
        "fc.weight": (d, 2 * d),
        "layers.0.self_attn.q_proj.weight": (width, d),
        "layers.0.self_attn.k_proj.weight": (kv_width, d),
        "layers.0.self_attn.v_proj.weight": (kv_width, d),
        "layers.0.self_attn.o_proj.weight": (d, width),
        "layers.0.post_attention_layernorm.weight": (d,),
        "layers.0.mlp.gate_proj.weight": (shape.intermediate, d),
        "layers.0.mlp.up_proj.weight": (shape.intermediate, d),
        "layers.0.mlp.down_proj.weight": (d, shape.intermediate),
    }


def build_eagle1(shape: HeadShape, tensors: Mapping[str, Tensor], target: Target, bits: int = 8) -> Eagle1Weights:
    """Packs weights for drafting; ``bits`` (8 or 32) are kept of each.

    Raises:
        ModelLoadError: A tensor is missing or has another size.
    """
    for name, size in eagle1_sizes(shape).items():
        if name not in tensors or tuple(tensors[name].shape) != size:
            got = list(tensors[name].shape) if name in tensors else "nothing"
            raise ModelLoadError(f"must be {list(size)} (got {got})", field=name)

    def product(*names: str) -> Any:
        return packed_product(torch.cat([tensors[f"{name}.weight"].float() for name in names]), bits)

    layer = "layers.0."
    block = HeadWeights(
        fc=product("fc"),
        input_norm=None,
        hidden_norm=None,
        q=product(layer + "self_attn.q_proj"),
        kv=product(layer + "self_attn.k_proj", layer + "self_attn.v_proj"),
        out=product(layer + "self_attn.o_proj"),
        mlp_norm=RMSNorm(tensors[layer + "post_attention_layernorm.weight"].float(), shape.norm_eps),
        gate_up=product(layer + "mlp.gate_proj", layer + "mlp.up_proj"),
        down=product(layer + "mlp.down_proj"),
        final_norm=None,
        lm_head=target.head,  # type: ignore[attr-defined]
        token_ids=torch.arange(shape.vocab),
    )
    bias = tensors.get("fc.bias")
    return Eagle1Weights(block, None if bias is None else bias.float())


def load_eagle1(
    path: Path, target: Target
) -> tuple[HeadShape, Eagle1Weights, Callable[[Tensor], Tensor], FeatureReader]:
    """What :class:`~foredraft.drafters.eagle1.Eagle1Head` is made of, from folder ``path``, for ``target``.

    Raises:
        ModelLoadError, UnsupportedModelError, VocabularyMismatchError: The folder is damaged, holds another kind of
            head, or one for another target.
    """
    reader = FeatureReader(target)
    checkpoint = read_checkpoint(path)
    shape = eagle1_shape(checkpoint, reader.layers)
    check_target(shape, target)
    embed = embedding_of(checkpoint.tensors, target)
    mark = checkpoint.config.get("target_mark")
    if mark is not None:
        ours = torch.tensor(target_mark(embed, shape.vocab, len(mark)))
        if functional.cosine_similarity(ours, torch.tensor(mark), dim=0) < 0.9:
            raise VocabularyMismatchError(
                "the head was trained for another model of the same size",
                field=str(path),
                remedy="use a head trained for this target",
            )
    return shape, build_eagle1(shape, checkpoint.tensors, target), embed, reader


def embedding_of(tensors: Mapping[str, Tensor], target: Target) -> Callable[[Tensor], Tensor]:
    """The checkpoint's own embedding, if it has one, else the target's; results are on the CPU."""
    own = tensors.get("embed_tokens.weight")
    if own is not None:
        table = own.float()
        return lambda tokens: functional.embedding(tokens, table)
    embed, device = getattr(target, "embed", None), getattr(target, "device", "cpu")
    if embed is None:
        raise ModelLoadError(
            "is missing, and the target does not lend its embedding",
            field="embed_tokens.weight",
            remedy="export the head with its embedding",
        )
    return lambda tokens: embed(tokens.to(device)).cpu()


def write_eagle1(
    folder: Path,
    shape: HeadShape,
    tensors: Mapping[str, Tensor],
    rope: Mapping[str, Any],
    *,
    mark: Sequence[float] = (),
    dtype: torch.dtype = torch.bfloat16,
) -> None:
    """Writes ``config.json`` and ``model.safetensors`` in the original layout, which vLLM's method ``eagle`` reads.

    Args:
        folder: Made if it is not there.
        tensors: Weights named as in :func:`eagle1_sizes`; ``fc.bias`` and ``embed_tokens.weight`` may be there.
        rope: Rotary parameters as in a ``config.json``.
        mark: See :func:`foredraft.drafters.eagle_checkpoint.target_mark`.
        dtype: Of the weights in the file.
    """
    folder.mkdir(parents=True, exist_ok=True)
    config: dict[str, Any] = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "bias": "fc.bias" in tensors,
        "hidden_size": shape.hidden,
        "intermediate_size": shape.intermediate,
        "num_hidden_layers": 1,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "vocab_size": shape.vocab,
        "rms_norm_eps": shape.norm_eps,
        "max_position_embeddings": shape.max_positions,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": False,
        "rope_theta": rope.get("rope_theta", 10000.0),
        "torch_dtype": str(dtype).removeprefix("torch."),
    }
    if rope.get("rope_type", "default") != "default":
        config["rope_scaling"] = {key: value for key, value in rope.items() if key != "rope_theta"}
    if mark:
        config["target_mark"] = list(mark)
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", "utf-8")
    names = [*eagle1_sizes(shape), *(n for n in ("fc.bias", "embed_tokens.weight") if n in tensors)]
    stored = {name: tensors[name].detach().to(dtype).contiguous() for name in names}
    save_file(stored, folder / "model.safetensors", {"format": "pt"})
