"""EAGLE-3 heads in the layout of ``speculators``, which vLLM loads."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from foredraft.drafters.eagle1_checkpoint import is_eagle1
from foredraft.drafters.eagle_checkpoint import expected_sizes, head_shape, read_checkpoint, token_ids
from foredraft.drafters.eagle_head import HeadShape
from foredraft.errors import ConfigError, UnsupportedModelError
from foredraft.models.rope import make_rope

SPECULATORS_VERSION = "0.3.0"
"""Version of the format that is written."""


@dataclass(frozen=True, slots=True)
class Verifier:
    """The model that a head drafts for, as its checkpoint names it.

    Attributes:
        name: Hub id, catalogue name or path.
        architecture: Class name in its ``config.json``.
        mark: See :func:`foredraft.drafters.eagle_checkpoint.target_mark`; empty if not known.
    """

    name: str
    architecture: str = "LlamaForCausalLM"
    mark: tuple[float, ...] = ()


def write_head(
    folder: Path,
    shape: HeadShape,
    tensors: Mapping[str, Tensor],
    ids: Tensor,
    verifier: Verifier,
    *,
    rope: Mapping[str, Any] | None = None,
    speculative_tokens: int = 5,
    dtype: torch.dtype = torch.bfloat16,
) -> None:
    """Writes ``config.json`` and ``model.safetensors``.

    Args:
        folder: Made if it is not there.
        tensors: Weights named as in :func:`foredraft.drafters.eagle_checkpoint.expected_sizes`; an
            ``embed_tokens.weight`` is written, too.
        ids: ``[D]`` the target's id of each draft token.
        verifier: The target.
        rope: The file's own rotary parameters; None reads an unscaled base off ``shape``.
        speculative_tokens: Draft length that the checkpoint recommends.
        dtype: Of the weights in the file.
    """
    folder.mkdir(parents=True, exist_ok=True)
    parameters = dict(rope) if rope is not None else {"rope_type": "default", "rope_theta": _base(shape)}
    layer = {
        "model_type": "llama",
        "hidden_size": shape.hidden,
        "intermediate_size": shape.intermediate,
        "num_hidden_layers": 1,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "vocab_size": shape.vocab,
        "rms_norm_eps": shape.norm_eps,
        "rope_theta": parameters.get("rope_theta"),
        "rope_parameters": parameters,
        "max_position_embeddings": shape.max_positions,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": False,
    }
    config = {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "speculators_version": SPECULATORS_VERSION,
        "draft_vocab_size": shape.draft_vocab,
        "norm_before_residual": shape.norm_before_residual,
        "norm_before_fc": False,
        "fc_norm": False,
        "norm_output": False,
        "target_hidden_size": shape.target_hidden,
        "eagle_aux_hidden_state_layer_ids": list(shape.taps),
        "embed_requires_grad": False,
        "dtype": str(dtype).removeprefix("torch."),
        "transformer_layer_config": layer,
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [
                {
                    "proposal_type": "greedy",
                    "speculative_tokens": speculative_tokens,
                    "verifier_accept_k": 1,
                    "accept_tolerance": 0.0,
                }
            ],
            "verifier": {"name_or_path": verifier.name, "architectures": [verifier.architecture]},
        },
    }
    if verifier.mark:
        config["target_mark"] = list(verifier.mark)
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", "utf-8")
    known = torch.zeros(shape.vocab, dtype=torch.bool)
    known[ids] = True
    names = [*expected_sizes(shape), *(["embed_tokens.weight"] if "embed_tokens.weight" in tensors else [])]
    stored = {name: tensors[name].detach().to(dtype).contiguous() for name in names}
    stored |= {"d2t": ids - torch.arange(len(ids)), "t2d": known}
    save_file(stored, folder / "model.safetensors", {"format": "pt"})


def export_head(source: Path, folder: Path, verifier: Verifier, *, speculative_tokens: int = 5) -> HeadShape:
    """Rewrites a head in either layout as ``speculators`` has it; the weights keep their bits.

    Raises:
        ModelLoadError, UnsupportedModelError: ``source`` cannot be read.
        ConfigError: ``folder`` is ``source``.
    """
    if folder.resolve() == source.resolve():
        raise ConfigError("is the folder that is read", field="out", remedy="name another folder")
    checkpoint = read_checkpoint(source)
    if is_eagle1(checkpoint):
        raise UnsupportedModelError(
            "is an EAGLE-1 head, which vLLM reads in the layout that it has",
            field=str(source),
            remedy="give vLLM the folder itself, with the method eagle",
        )
    shape = head_shape(checkpoint)
    sizes = checkpoint.sizes
    rope = sizes.get("rope_parameters") or {"rope_theta": sizes.get("rope_theta", 10000.0)}
    mark = tuple(checkpoint.config.get("target_mark", verifier.mark))
    write_head(
        folder,
        shape,
        checkpoint.tensors,
        token_ids(checkpoint, shape),
        Verifier(verifier.name, verifier.architecture, mark),
        rope=rope | (sizes.get("rope_scaling") or {}),
        speculative_tokens=speculative_tokens,
        dtype=checkpoint.tensors["lm_head.weight"].dtype,
    )
    return shape


def _base(shape: HeadShape) -> float:
    """The base of an unscaled rotary embedding."""
    inverse = shape.rope.inverse_frequencies
    base = inverse[1] ** (-shape.head_dim / 2) if len(inverse) > 1 else 10000.0
    base = float(f"{base:.6g}")
    again = make_rope({"rope_theta": base}, shape.head_dim, shape.max_positions)
    far = max(abs(a - b) for a, b in zip(again.inverse_frequencies, inverse, strict=True))
    if far > 1e-4 or shape.rope.magnitude != 1.0:
        raise UnsupportedModelError("a scaled rotary embedding needs its own parameters", field="rope")
    return base
