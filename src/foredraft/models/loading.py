"""``load_model``: any supported model from any place, ready to run."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

import torch

from foredraft import kernels
from foredraft.errors import ConfigError, ForedraftError, ModelLoadError, UnsupportedModelError
from foredraft.kernels import Activations
from foredraft.models.build import build_decoder
from foredraft.models.decoder import Decoder
from foredraft.models.fused import FusedDecoder
from foredraft.models.gguf_file import GGUFFile
from foredraft.models.info import LoadedModel, ModelInfo
from foredraft.models.linear import LinearFactory, dense_linear
from foredraft.models.locate import locate
from foredraft.models.packed import packed_linear
from foredraft.models.safetensors_folder import SafetensorsFolder
from foredraft.models.shape import DecoderShape
from foredraft.models.shape_config import shape_from_config
from foredraft.models.shape_gguf import licence, shape_from_gguf
from foredraft.models.tokenizer import Tokenizer
from foredraft.models.tokenizer_folder import read_json, tokenizer_from_folder
from foredraft.models.tokenizer_gguf import tokenizer_from_gguf
from foredraft.models.weights import TensorSource

if TYPE_CHECKING:
    from foredraft.models.hf import HfTarget
    from foredraft.models.hf_devices import DeviceMap

__all__ = ["DtypeName", "LoadedModel", "ModelInfo", "load_model"]

DtypeName = Literal["auto", "float32", "bfloat16", "float64", "float16"]

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float64": torch.float64, "float16": torch.float16}


def load_model(
    spec: str | Path,
    *,
    dtype: DtypeName = "auto",
    device: str = "auto",
    max_context: int | None = None,
    cache_bytes: int | None = None,
    layers: int | None = None,
    trust_remote_code: bool = False,
    activations: Activations = "float32",
    only_drafts: bool = False,
    make_linear: LinearFactory | None = None,
    tensor_parallel: int = 1,
    device_map: DeviceMap | None = None,
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
        activations: How inputs enter products with quantised weights, see :data:`foredraft.kernels.Activations`.
            Anything but ``float32`` rounds them: faster, and another model by a little, for plain decoding too.
        only_drafts: The model will only write drafts, where rounding costs no exactness: inputs are rounded as far
            as the kernels can.
        make_linear: Builds the matrix products, see :mod:`foredraft.models.linear`. None: weights packed in the bits
            that the file holds (:mod:`foredraft.models.packed`) and passes in one call (:mod:`foredraft.models.fused`)
            where a CPU, dtype and compiled kernels allow, else dense ones. To train a model pass ``dense_linear``.
        tensor_parallel: Split weights and cache over so many processes (see docs/multi-device.md): those that
            torchrun has started, else others that are started here. Under torchrun only rank 0 returns.
        device_map: Distribute the layers over several devices: ``auto``, ``balanced``, ``sequential``, a map or a
            JSON file of one. The model runs through transformers then, whatever its family.

    Raises:
        ModelLoadError: It cannot be found or read, is damaged, or lacks a weight.
        UnsupportedModelError: It can be read but not run losslessly.
        ConfigError: An argument is out of range.
    """
    where = _device(device)
    kind = _dtype(dtype, where)
    if activations not in get_args(Activations):
        raise ConfigError(
            f"{activations!r} is not supported", field="activations", remedy=f"use {', '.join(get_args(Activations))}"
        )
    if max_context is not None and max_context < 1:
        raise ConfigError(f"must be at least 1 (got {max_context})", field="max_context")
    if tensor_parallel < 1 or (tensor_parallel > 1 and make_linear is not None):
        problem = "takes no products of your own" if tensor_parallel > 1 else "must be at least 1"
        raise ConfigError(f"{problem} (got {tensor_parallel})", field="tensor_parallel")
    parts = _open(locate(spec))
    if device_map is not None or isinstance(parts.shape, UnsupportedModelError):
        why = "layers on several devices" if device_map is not None else str(parts.shape)
        given = {"layers": layers is not None, "activations": activations != "float32"}
        given |= {"tensor_parallel": tensor_parallel > 1, "device": device_map is not None and device != "auto"}
        return _adapted(parts, kind, where, max_context, cache_bytes, trust_remote_code, device_map, given, why)
    shape = parts.shape if layers is None else parts.shape.truncated(layers)
    linear = make_linear or _best_linear(kind, where, activations, only_drafts)
    if tensor_parallel > 1:
        options = {"dtype": dtype, "device": str(where), "max_context": max_context, "layers": layers}
        options |= {"spec": str(parts.path), "activations": activations, "only_drafts": only_drafts}
        target: Decoder = _share(parts, shape, linear, kind, tensor_parallel, cache_bytes, options)
    else:
        with _one_thread():
            target = build_decoder(parts.source(), shape, kind, where, cache_bytes, max_context, linear)
            if make_linear is None and linear is not dense_linear:
                target = _fused(target)
    with _one_thread():
        tokenizer = parts.tokenizer()
    if tokenizer is not None and tokenizer.vocab_size > target.vocab_size:
        raise ModelLoadError(
            f"its tokenizer has {tokenizer.vocab_size} tokens, its logits only {target.vocab_size}",
            field=str(parts.path),
            remedy="check that tokenizer and weights belong to one model",
        )
    info = ModelInfo(
        name=parts.name,
        path=parts.path,
        architecture=shape.architecture,
        layers=shape.layers,
        hidden_size=shape.hidden_size,
        vocab_size=shape.vocab_size,
        parameters=shape.parameters,
        dtype=_name(kind),
        file_bytes=parts.bytes,
        licence=parts.licence,
    )
    return LoadedModel(target, tokenizer, info)


def _share(
    parts: _Parts,
    shape: DecoderShape,
    linear: LinearFactory,
    dtype: torch.dtype,
    size: int,
    cache_bytes: int | None,
    options: dict[str, Any],
) -> Decoder:
    """This process's share of a decoder; ``options`` are for the other processes."""
    from foredraft.models.parallel import ParallelBuilder, ParallelDecoder, check_processes
    from foredraft.models.parallel_group import Group
    from foredraft.models.parallel_launch import load_share

    check_processes(shape, size)

    def build(group: Group) -> ParallelDecoder:
        with _one_thread():
            builder = ParallelBuilder(parts.source(), shape, dtype, group.device, linear, group)
            return ParallelDecoder.build(builder, group, cache_bytes, options["max_context"])

    return load_share(size, options, build)


def _adapted(
    parts: _Parts,
    dtype: torch.dtype,
    device: torch.device,
    max_context: int | None,
    cache_bytes: int | None,
    trust_remote_code: bool,
    device_map: DeviceMap | None,
    given: dict[str, bool],
    why: str,
) -> LoadedModel:
    """The model through transformers; ``given`` says which options are asked for that it cannot honour."""
    from foredraft.models.hf import load_hf

    for field, asked in given.items():
        if asked:
            raise _NOT_ADAPTED[field](why)
    budget = {} if cache_bytes is None else {"cache_bytes": cache_bytes}
    other = load_hf(
        str(parts.path), dtype, str(device), max_context, trust_remote_code, device_map=device_map, **budget
    )
    return LoadedModel(other, parts.tokenizer(), _adapter_info(parts, other))


_NOT_ADAPTED: dict[str, Callable[[str], ForedraftError]] = {
    "layers": lambda why: UnsupportedModelError(
        f"cannot drop layers of this model ({why})", field="layers", remedy="use a Llama-family model"
    ),
    "activations": lambda why: ConfigError(
        f"only float32 is possible for this model ({why})", field="activations", remedy="use float32"
    ),
    "tensor_parallel": lambda why: ConfigError(
        f"this model cannot be split ({why})", field="tensor_parallel", remedy="give device_map alone"
    ),
    "device": lambda why: ConfigError("device_map says where layers lie", field="device", remedy="leave it out"),
}


@dataclass(frozen=True, slots=True)
class _Parts:
    """A file or folder, opened: its shape (or why the decoder cannot run it), weights and tokenizer when asked for."""

    path: Path
    name: str
    architecture: str
    shape: DecoderShape | UnsupportedModelError
    source: Callable[[], TensorSource]
    tokenizer: Callable[[], Tokenizer | None]
    bytes: int
    licence: str | None


def _open(path: Path) -> _Parts:
    if path.suffix == ".gguf":
        file = GGUFFile(path)
        return _Parts(
            path,
            name=str(file.metadata.get("general.name") or path.stem),
            architecture=str(file.metadata.get("general.architecture")),
            shape=_try(lambda: shape_from_gguf(file)),
            source=lambda: file,
            tokenizer=lambda: tokenizer_from_gguf(file.metadata, str(path)),
            bytes=path.stat().st_size,
            licence=licence(file.metadata),
        )
    config = read_json(path / "config.json")
    shape = _try(lambda: shape_from_config(config))
    sandwich = isinstance(shape, DecoderShape) and shape.sandwich_norms
    return _Parts(
        path,
        name=path.name,
        architecture=str(config.get("model_type")),
        shape=shape,
        source=lambda: SafetensorsFolder(path, sandwich),
        tokenizer=lambda: tokenizer_from_folder(path),
        bytes=sum(file.stat().st_size for file in path.glob("*.safetensors")),
        licence=None,
    )


def _try(read: Callable[[], DecoderShape]) -> DecoderShape | UnsupportedModelError:
    try:
        return read()
    except UnsupportedModelError as reason:
        return reason


def _adapter_info(parts: _Parts, target: HfTarget) -> ModelInfo:
    return ModelInfo(
        name=parts.name,
        path=parts.path,
        architecture=parts.architecture,
        layers=target.config.num_hidden_layers,
        hidden_size=target.config.hidden_size,
        vocab_size=target.vocab_size,
        parameters=sum(tensor.numel() for tensor in target.model.parameters()),
        dtype=_name(target.dtype),
        file_bytes=parts.bytes,
        licence=parts.licence,
    )


@contextmanager
def _one_thread() -> Iterator[None]:
    """Reading weights is bound by memory; torch's threads only get in each other's way, badly on a busy machine."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _fused(decoder: Decoder) -> Decoder:
    try:
        return FusedDecoder(decoder)
    except UnsupportedModelError:  # mixtures of experts, odd heads: layer by layer
        return decoder


def _best_linear(
    dtype: torch.dtype, device: torch.device, activations: Activations, only_drafts: bool
) -> LinearFactory:
    packable = device.type == "cpu" and dtype in (torch.float32, torch.bfloat16) and kernels.available()
    if packable:
        return packed_linear("int8" if only_drafts else activations)
    if activations != "float32":
        raise ConfigError(
            f"{activations} needs a CPU, float32 or bfloat16, and the compiled kernels",
            field="activations",
            remedy="use float32, or see foredraft doctor for the kernels",
        )
    return dense_linear


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
