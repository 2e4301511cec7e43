"""EAGLE-3 checkpoints: the original layout and that of ``speculators``, read into one head.

Both hold the same tensors. The original names the layer ``midlayer`` and keeps its sizes at the top of ``config.json``;
``speculators`` names it ``layers.0`` and keeps them in ``transformer_layer_config``.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from torch.nn import functional

from foredraft.drafters.eagle_head import EagleHead, HeadShape, HeadWeights
from foredraft.drafters.eagle_step import Table
from foredraft.errors import ConfigError, ModelLoadError, UnsupportedModelError, VocabularyMismatchError
from foredraft.kernels import PackedLinear, available
from foredraft.models.base import Target
from foredraft.models.linear import DenseLinear, Linear
from foredraft.models.norm import RMSNorm
from foredraft.models.rope import make_rope

EMBEDDED = "smollm2-135m-eagle3"
"""Folder of the head that comes with the package."""
BITS = 4
"""Bits of each weight that are kept for drafting, unless others are asked for. A head reads all its weights for every
token; more bits cost more time than the acceptance that they bring is worth."""

_REFUSED = {"norm_before_fc": False, "fc_norm": False, "norm_output": False, "attention_bias": False, "mlp_bias": False}
_TARGET_MARK = "target_mark"


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """What a folder holds.

    Attributes:
        path: The folder.
        config: Its ``config.json``.
        sizes: The part of it that describes the layer.
        tensors: Weights under the names of ``speculators``.
        speculators: Whether the folder is in that layout.
    """

    path: Path
    config: Mapping[str, Any]
    sizes: Mapping[str, Any]
    tensors: Mapping[str, Tensor]
    speculators: bool


def read_checkpoint(path: Path) -> Checkpoint:
    """Reads a folder in either layout.

    Raises:
        ModelLoadError: A file is missing, damaged or a pickle.
    """
    try:
        config = json.loads((path / "config.json").read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise ModelLoadError(
            f"holds no readable config.json ({getattr(error, 'strerror', None) or error})",
            field=str(path),
            remedy="name the folder of an EAGLE-3 checkpoint",
        ) from None
    found = sorted(path.glob("*.safetensors"))
    if not found:
        pickled = sorted([*path.glob("*.bin"), *path.glob("*.pt"), *path.glob("*.pth")])
        problem = f"{pickled[0].name} is a pickle, which can run code when read" if pickled else "holds no weights"
        raise ModelLoadError(problem, field=str(path), remedy="convert it to safetensors")
    tensors: dict[str, Tensor] = {}
    for file in found:
        try:
            with safe_open(file, "pt") as opened:
                tensors |= {_name(name): opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
        except (SafetensorError, OSError) as error:
            raise ModelLoadError(f"is cut short or damaged ({error})", field=str(file)) from None
    nested = config.get("transformer_layer_config")
    return Checkpoint(path, config, nested or config, tensors, nested is not None)


def _name(name: str) -> str:
    return name.removeprefix("model.").replace("midlayer.", "layers.0.")


def head_shape(checkpoint: Checkpoint, target: Target | None = None) -> HeadShape:
    """The head's sizes as its files state them; ``target`` gives the number of layers where taps are left to it.

    Raises:
        ModelLoadError, UnsupportedModelError: A size is missing, or a switch is set that is not supported.
    """
    config, sizes = checkpoint.config, checkpoint.sizes
    for key, plain in _REFUSED.items():
        if config.get(key, sizes.get(key, plain)) not in (plain, None):
            raise UnsupportedModelError("is not supported", field=f"{checkpoint.path}: {key}")
    try:
        hidden, heads = int(sizes["hidden_size"]), int(sizes["num_attention_heads"])
        head_dim = int(sizes.get("head_dim") or hidden // heads)
        positions = int(sizes.get("max_position_embeddings") or 4096)
        rope = sizes.get("rope_parameters") or {
            "rope_theta": sizes.get("rope_theta", 10000.0),
            **(sizes.get("rope_scaling") or {}),
        }
        vocab = int(sizes["vocab_size"])
        return HeadShape(
            taps=_taps(config, target),
            target_hidden=int(config.get("target_hidden_size") or hidden),
            hidden=hidden,
            intermediate=int(sizes["intermediate_size"]),
            heads=heads,
            kv_heads=int(sizes.get("num_key_value_heads") or heads),
            head_dim=head_dim,
            vocab=vocab,
            draft_vocab=int(config.get("draft_vocab_size") or vocab),
            norm_eps=float(sizes.get("rms_norm_eps", 1e-6)),
            rope=make_rope(rope, head_dim, positions),
            max_positions=positions,
            norm_before_residual=bool(config.get("norm_before_residual", False)),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise ModelLoadError(
            f"lacks a size or has a wrong one ({error})", field=f"{checkpoint.path}/config.json"
        ) from None


def _taps(config: Mapping[str, Any], target: Target | None) -> tuple[int, ...]:
    """The tapped layers; by default those of the EAGLE-3 paper: 2, half of the layers, all but 3."""
    named = config.get("eagle_aux_hidden_state_layer_ids")
    named = named or (config.get("eagle_config") or {}).get("eagle_aux_hidden_state_layer_ids")
    if named:
        return tuple(int(tap) for tap in named)
    layers = getattr(getattr(target, "shape", None), "layers", None)
    if not isinstance(layers, int):
        raise ValueError("eagle_aux_hidden_state_layer_ids is missing and the target's layers are not known")
    return (2, layers // 2, layers - 3)


def token_ids(checkpoint: Checkpoint, shape: HeadShape) -> Tensor:
    """``[D]`` the target's id of each draft token, from the offsets ``d2t``.

    Raises:
        ModelLoadError: The map is missing, or names ids that do not exist.
    """
    own = torch.arange(shape.draft_vocab)
    offsets = checkpoint.tensors.get("d2t")
    if offsets is None:
        if shape.draft_vocab == shape.vocab:
            return own
        raise ModelLoadError(
            f"proposes {shape.draft_vocab} of {shape.vocab} tokens and does not say which: the id map d2t is missing",
            field=str(checkpoint.path),
            remedy="export the head again with its d2t tensor",
        )
    found = own + offsets.long() if offsets.shape == own.shape else own - 1
    if int(found.min()) < 0 or int(found.max()) >= shape.vocab or len(set(found.tolist())) != len(found):
        raise ModelLoadError(
            "d2t does not hold one offset a draft token (the target's id minus the draft id)",
            field=str(checkpoint.path),
            remedy="subtract the draft ids if it holds the target's ids themselves",
        )
    return found


def expected_sizes(shape: HeadShape) -> dict[str, tuple[int, ...]]:
    """Names and sizes of the weights of a checkpoint."""
    d, width, kv_width = shape.hidden, shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    return {
        "fc.weight": (d, len(shape.taps) * shape.target_hidden),
        "layers.0.hidden_norm.weight": (d,),
        "layers.0.input_layernorm.weight": (d,),
        "layers.0.self_attn.q_proj.weight": (width, 2 * d),
        "layers.0.self_attn.k_proj.weight": (kv_width, 2 * d),
        "layers.0.self_attn.v_proj.weight": (kv_width, 2 * d),
        "layers.0.self_attn.o_proj.weight": (d, width),
        "layers.0.post_attention_layernorm.weight": (d,),
        "layers.0.mlp.gate_proj.weight": (shape.intermediate, d),
        "layers.0.mlp.up_proj.weight": (shape.intermediate, d),
        "layers.0.mlp.down_proj.weight": (d, shape.intermediate),
        "norm.weight": (d,),
        "lm_head.weight": (shape.draft_vocab, d),
    }


def build_head(
    shape: HeadShape,
    tensors: Mapping[str, Tensor],
    ids: Tensor,
    embed: Callable[[Tensor], Tensor],
    bits: int = BITS,
    table: Table | None = None,
) -> EagleHead:
    """Packs weights for drafting.

    Args:
        shape: The head's sizes.
        tensors: Weights named as in :func:`expected_sizes`.
        ids: ``[D]`` the target's id of each draft token.
        embed: The target's embedding.
        bits: 4, 8 or 32: how many the packed weights keep. Rounding can cost acceptance, never exactness.
        table: What ``embed`` looks up, if it is packed.

    Raises:
        ModelLoadError: A tensor is missing or has another size.
    """
    for name, size in expected_sizes(shape).items():
        if name not in tensors or tuple(tensors[name].shape) != size:
            got = list(tensors[name].shape) if name in tensors else "nothing"
            raise ModelLoadError(f"must be {list(size)} (got {got})", field=name)

    def norm(name: str) -> RMSNorm:
        return RMSNorm(tensors[f"{name}.weight"].float(), shape.norm_eps)

    def product(*names: str) -> Linear:
        return packed_product(torch.cat([tensors[f"{name}.weight"].float() for name in names]), bits)

    layer = "layers.0."
    weights = HeadWeights(
        fc=product("fc"),
        input_norm=norm(layer + "input_layernorm"),
        hidden_norm=norm(layer + "hidden_norm"),
        q=product(layer + "self_attn.q_proj"),
        kv=product(layer + "self_attn.k_proj", layer + "self_attn.v_proj"),
        out=product(layer + "self_attn.o_proj"),
        mlp_norm=norm(layer + "post_attention_layernorm"),
        gate_up=product(layer + "mlp.gate_proj", layer + "mlp.up_proj"),
        down=product(layer + "mlp.down_proj"),
        final_norm=norm("norm"),
        lm_head=product("lm_head"),
        token_ids=ids,
    )
    return EagleHead(shape, weights, embed, table)


def packed_product(weight: Tensor, bits: int) -> Linear:
    """One product ``[out, in]``, of whose weights ``bits`` (4, 8 or 32) each are kept where there are kernels."""
    if not available():
        return DenseLinear(weight)
    if bits == 32 or weight.shape[1] % 32:
        return PackedLinear.from_float(weight)
    import gguf

    kind, inputs = ("Q4_1", "int8") if bits == 4 else ("Q8_0", "int16")
    blocks = gguf.quants.quantize(np.ascontiguousarray(weight.numpy()), gguf.GGMLQuantizationType[kind])
    size = (weight.shape[0], weight.shape[1])
    return PackedLinear.from_gguf_blocks(blocks, kind, size, activations="int8" if inputs == "int8" else "int16")


def load_head(path: Path, target: Target, bits: int = BITS) -> EagleHead:
    """The head in folder ``path``, ready to draft for ``target`` with so many bits of each weight.

    Raises:
        ModelLoadError, UnsupportedModelError, VocabularyMismatchError: The folder is damaged, or made for another
            target.
    """
    checkpoint = read_checkpoint(path)
    shape = head_shape(checkpoint, target)
    check_target(shape, target)
    ids = token_ids(checkpoint, shape)
    own = checkpoint.tensors.get("embed_tokens.weight")
    embed, table = getattr(target, "embed", None), getattr(target, "embedding_rows", None)
    if own is not None and tuple(own.shape) == (shape.vocab, shape.hidden):
        rows = PackedLinear.from_float(own, dtype="bfloat16" if own.dtype == torch.bfloat16 else "float32")
        embed, table = rows.rows, (rows, 1.0)
    if embed is None:
        raise ModelLoadError(
            "has no embed_tokens, and the target does not lend its embedding",
            field=str(path),
            remedy="export the head with its embedding",
        )
    check_mark(checkpoint, embed, shape)
    return build_head(shape, checkpoint.tensors, ids, embed, bits, table)


def embedded_head(target: Target, bits: int = BITS) -> EagleHead:
    """The head that comes with the package, for the embedded model.

    Raises:
        ConfigError: The target is another model, or this installation carries no head.
    """
    path = Path(str(files("foredraft") / "assets" / EMBEDDED))
    if not (path / "config.json").exists():
        raise ConfigError("no head comes with this installation", field="drafter eagle3", remedy="write eagle3:FOLDER")
    try:
        return load_head(path, target, bits)
    except VocabularyMismatchError:
        raise ConfigError(
            "the head that comes with foredraft serves smollm2-135m only",
            field="drafter eagle3",
            remedy="train one for your model ('foredraft train eagle3') and write eagle3:FOLDER",
        ) from None


def check_target(shape: HeadShape, target: Target) -> None:
    """Raises VocabularyMismatchError if the head was made for a target of other sizes."""
    own = getattr(target, "shape", None)
    hidden, layers = getattr(own, "hidden_size", None), getattr(own, "layers", None)
    for name, made_for, has in (
        ("vocabulary", shape.vocab, target.vocab_size),
        ("width", shape.target_hidden, hidden),
    ):
        if has is not None and made_for != has:
            raise VocabularyMismatchError(
                f"the head was made for a target of {name} {made_for}, this one has {has}",
                field="drafter eagle3",
                remedy="use a head trained for this target",
            )
    if layers is not None and not all(0 <= tap <= layers for tap in shape.taps):
        raise VocabularyMismatchError(
            f"the head taps layers {shape.taps}, the target has {layers}", field="drafter eagle3"
        )


def target_mark(embed: Callable[[Tensor], Tensor], vocab: int, size: int = 64) -> list[float]:
    """Numbers by which a head knows its target again: first components of embeddings spread over the vocabulary."""
    rows = embed(torch.arange(size) * (vocab // size)).float()
    return [round(value, 4) for value in rows[:, 0].tolist()]


def check_mark(checkpoint: Checkpoint, embed: Callable[[Tensor], Tensor], shape: HeadShape) -> None:
    """Raises VocabularyMismatchError if the head was trained for another model of the same sizes."""
    mark = checkpoint.config.get(_TARGET_MARK)
    if mark is None:
        return
    ours = torch.tensor(target_mark(embed, shape.vocab, len(mark)))
    if functional.cosine_similarity(ours, torch.tensor(mark), dim=0) < 0.9:
        raise VocabularyMismatchError(
            "the head was trained for another model of the same size",
            field=str(checkpoint.path),
            remedy="use a head trained for this target",
        )
