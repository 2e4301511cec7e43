"""``load_model``: any supported model from any place, ready to run."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import torch

from foredraft.errors import ConfigError, ModelLoadError, UnsupportedModelError
from foredraft.models.build import build_decoder
from foredraft.models.gguf_file import GGUFFile
from foredraft.models.info import LoadedModel, ModelInfo
from foredraft.models.linear import LinearFactory, dense_linear
from foredraft.models.locate import locate
from foredraft.models.memory import default_cache_bytes
from foredraft.models.safetensors_folder import SafetensorsFolder, file_bytes
from foredraft.models.shape import DecoderShape
from foredraft.models.shape_config import shape_from_config
from foredraft.models.shape_gguf import licence, shape_from_gguf
from foredraft.models.tokenizer_folder import read_json, tokenizer_from_folder
from foredraft.models.tokenizer_gguf import tokenizer_from_gguf
from foredraft.models.weights import TensorSource

__all__ = ["DtypeName", "LoadedModel", "ModelInfo", "load_model"]

DtypeName = Literal["auto", "float32", "bfloat16", "float64", "float16"]

_DTYPES = {name: getattr(torch, name) for name in ("float32", "bfloat16", "float64", "float16")}


def load_model(
    spec: str | Path,
    *,
    dtype: DtypeName = "auto",
    device: str = "auto",
    max_context: int | None = None,
    cache_bytes: int | None = None,
    layers: int | None = None,
    trust_remote_code: bool = False,
    make_linear: LinearFactory = dense_linear,
) -> LoadedModel:
    """Loads a model and its tokenizer.

    Args:
        spec: A folder with ``config.json`` and safetensors, a ``.gguf`` file, a catalog name or a hub id.
        dtype: Of the computation. ``auto``: bfloat16 on CUDA and on CPUs with instructions for it, else float32.
        device: ``auto`` (CUDA where there is one), ``cpu``, ``cuda`` or ``cuda:1``.
        max_context: Limit on the positions of a slot, below the model's own.
        cache_bytes: Budget of the KV cache; by default a quarter of the memory that is free after loading.
        layers: Keep only the first so many layers: a draft model by early exit.
        trust_remote_code: Lets a model outside the built-in families run its own Python code.
        make_linear: Builds the matrix products, see :mod:`foredraft.models.linear`.

    Raises:
        ModelLoadError: It cannot be found or read, is damaged, or lacks a weight.
        UnsupportedModelError: It can be read but not run losslessly.
        ConfigError: An argument is out of range.
    """
    where = _device(device)
    kind = _dtype(dtype, where)
    if max_context is not None and max_context < 1:
        raise ConfigError(f"must be at least 1 (got {max_context})", field="max_context")
    path = locate(spec)
    if path.suffix == ".gguf":
        file = GGUFFile(path)
        source: TensorSource = file
        shape = shape_from_gguf(file)
        name = str(file.metadata.get("general.name") or path.stem)
        tokenizer, terms = tokenizer_from_gguf(file.metadata, str(path)), licence(file.metadata)
        size = path.stat().st_size
    else:
        config = read_json(path / "config.json")
        try:
            shape = shape_from_config(config)
        except UnsupportedModelError as reason:
            return _by_adapter(path, kind, where, max_context, layers, trust_remote_code, reason)
        source = SafetensorsFolder(path, shape.sandwich_norms)
        name, terms, size = path.name, None, file_bytes(path)
        tokenizer = tokenizer_from_folder(path)
    shape = shape if layers is None else shape.truncated(layers)
    budget = default_cache_bytes(where) if cache_bytes is None else cache_bytes
    target = build_decoder(source, shape, kind, where, budget, max_context, make_linear)
    if tokenizer is not None and tokenizer.vocab_size > target.vocab_size:
        raise ModelLoadError(
            f"its tokenizer has {tokenizer.vocab_size} tokens, its logits only {target.vocab_size}",
            field=str(path),
            remedy="check that tokenizer and weights belong to one model",
        )
    info = ModelInfo(
        name=name,
        path=path,
        architecture=shape.architecture,
        layers=shape.layers,
        hidden_size=shape.hidden_size,
        vocab_size=shape.vocab_size,
        parameters=count_parameters(shape),
        dtype=str(kind).removeprefix("torch."),
        file_bytes=size,
        licence=terms,
    )
    return LoadedModel(target, tokenizer, info)


def count_parameters(shape: DecoderShape) -> int:
    """Numbers in the model's weights, a tied LM head counted once."""
    d, width, kv_width = shape.hidden_size, shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    attention = 2 * d * width + 2 * d * kv_width
    attention += (width + 2 * kv_width) * shape.qkv_bias + d * shape.out_bias + 2 * shape.head_dim * shape.qk_norm
    norms = d * (4 if shape.sandwich_norms else 2)
    total = shape.vocab_size * d * (1 if shape.tied else 2) + d
    for layer in range(shape.layers):
        mlp = 3 * d * shape.intermediate_size + (2 * shape.intermediate_size + d) * shape.mlp_bias
        if shape.moe is not None and shape.is_moe(layer):
            moe = shape.moe
            mlp = moe.experts * (3 * d * moe.intermediate + d)
            mlp += 3 * d * moe.shared_intermediate + d if moe.shared_intermediate else 0
        total += attention + norms + mlp
    return total


def _by_adapter(
    path: Path,
    dtype: torch.dtype,
    device: torch.device,
    max_context: int | None,
    layers: int | None,
    trust_remote_code: bool,
    reason: UnsupportedModelError,
) -> LoadedModel:
    """Models outside the families run through transformers, if they can be run losslessly there."""
    if layers is not None:
        raise UnsupportedModelError(
            f"cannot drop layers of this model ({reason})", field="layers", remedy="use a Llama-family model"
        ) from None
    from foredraft.models.hf import load_hf

    loaded: Any = load_hf(path, dtype, device, max_context, trust_remote_code)
    if not isinstance(loaded, LoadedModel):
        raise UnsupportedModelError(str(reason), field=str(path))
    return loaded


def _device(name: str) -> torch.device:
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise ConfigError(f"{name!r} is not a device", field="device", remedy="use auto, cpu or cuda") from None
    if device.type not in {"cpu", "cuda"} or (device.type == "cuda" and not torch.cuda.is_available()):
        raise ConfigError(f"{name!r} is not available here", field="device", remedy="use auto or cpu")
    return device


def _dtype(name: str, device: torch.device) -> torch.dtype:
    if name == "auto":
        fast = device.type == "cuda" or torch.ops.mkldnn._is_mkldnn_bf16_supported()
        return torch.bfloat16 if fast else torch.float32
    if name not in _DTYPES:
        raise ConfigError(f"{name!r} is not supported", field="dtype", remedy=f"use auto, {', '.join(_DTYPES)}")
    return _DTYPES[name]
