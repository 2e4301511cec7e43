"""Weights of a Hugging Face folder: one ``.safetensors`` file or shards with an index."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from foredraft.errors import ModelLoadError
from foredraft.models.weights import Weight

_INDEX = "model.safetensors.index.json"
_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
    "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
    "ffn_up_shexp": "mlp.shared_expert.up_proj",
    "ffn_down_shexp": "mlp.shared_expert.down_proj",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_SANDWICH = {"post_attention_norm": "post_attention_layernorm", "ffn_norm": "pre_feedforward_layernorm"}
_TOP = {"token_embd": "embed_tokens", "output_norm": "norm"}
_MIXTRAL_EXPERT = {"gate_proj": "w1", "down_proj": "w2", "up_proj": "w3"}
_PREFIXES = ("model.", "language_model.model.", "model.language_model.", "")


class SafetensorsFolder:
    """A :class:`~foredraft.models.weights.TensorSource` over a folder.

    Args:
        path: The folder.
        sandwich: The model has norms around attention and MLP, which moves the names of two of them.

    Raises:
        ModelLoadError: No safetensors (pickled weights are never read), a missing shard or a damaged file.
    """

    def __init__(self, path: Path, sandwich: bool = False) -> None:
        self.path = path
        self._names = _LAYER | _SANDWICH if sandwich else _LAYER
        self._files: dict[str, Any] = {}
        for file in _files(path):
            try:
                opened: Any = safe_open(file, framework="pt")
                names = opened.keys()
            except (SafetensorError, OSError) as error:
                raise ModelLoadError(
                    f"is cut short or damaged ({error})", field=str(file), remedy="download it again"
                ) from None
            self._files.update(dict.fromkeys(names, opened))
        self._prefix = next((p for p in _PREFIXES if p + "embed_tokens.weight" in self._files), "model.")

    def find(self, name: str) -> Weight | None:
        if name == "output.weight":
            prefix = self._prefix.removesuffix("model.") if self._prefix != "model." else ""
            return self._weight("lm_head.weight") or self._weight(prefix + "lm_head.weight")
        if not name.startswith("blk."):
            stem, _, kind = name.rpartition(".")
            return self._weight(f"{self._prefix}{_TOP[stem]}.{kind}") if stem in _TOP else None
        _, layer, rest = name.split(".", 2)
        blk = f"{self._prefix}layers.{layer}."
        if match := re.fullmatch(r"ffn_(gate|up|down)_exps\.(\d+)", rest):
            return self._expert(blk, f"{match[1]}_proj", int(match[2]))
        stem, _, kind = rest.rpartition(".")
        if stem not in self._names:
            return None
        found = self._weight(f"{blk}{self._names[stem]}.{kind}")
        return found or (self._weight(f"{blk}block_sparse_moe.gate.{kind}") if stem == "ffn_gate_inp" else None)

    def _expert(self, blk: str, projection: str, expert: int) -> Weight | None:
        """One expert's matrix, from any of the three ways in which files hold experts."""
        found = self._weight(f"{blk}mlp.experts.{expert}.{projection}.weight")
        found = found or self._weight(f"{blk}block_sparse_moe.experts.{expert}.{_MIXTRAL_EXPERT[projection]}.weight")
        if found:
            return found
        fused = self._weight(f"{blk}mlp.experts.{'down_proj' if projection == 'down_proj' else 'gate_up_proj'}")
        if fused is None or len(fused.shape) != 3 or expert >= fused.shape[0]:
            return None
        rows = fused.shape[1] if projection == "down_proj" else fused.shape[1] // 2
        first = rows if projection == "up_proj" else 0

        def read() -> Tensor:
            stored: Tensor = self._files[fused.name].get_slice(fused.name)[expert, first : first + rows]
            return stored

        return Weight(fused.name, (rows, fused.shape[2]), read)

    def _weight(self, name: str) -> Weight | None:
        file = self._files.get(name)
        if file is None:
            return None

        def read() -> Tensor:
            stored: Tensor = file.get_tensor(name)
            return stored

        return Weight(name, tuple(file.get_slice(name).get_shape()), read)


def _files(path: Path) -> list[Path]:
    index = path / _INDEX
    if not index.exists():
        files = sorted(path.glob("*.safetensors"))
        if files:
            return files
        pickled = sorted([*path.glob("*.bin"), *path.glob("*.pt"), *path.glob("*.pth")])
        if pickled:
            raise ModelLoadError(
                "is a pickle, which can run code when read and is refused",
                field=str(pickled[0]),
                remedy="convert the model to safetensors (save_pretrained does) and load that",
            )
        raise ModelLoadError(
            "holds no .safetensors file", field=str(path), remedy="check that the download is complete"
        )
    try:
        names = sorted(set(json.loads(index.read_text("utf-8"))["weight_map"].values()))
        files = [path / Path(name).name for name in names]
    except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
        raise ModelLoadError(f"cannot be read ({error!r})", field=str(index), remedy="download it again") from None
    for file in files:
        if not file.exists():
            raise ModelLoadError("shard is missing", field=str(file), remedy="download the model again")
    return files
