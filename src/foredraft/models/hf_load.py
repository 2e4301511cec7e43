"""Reads a causal language model through transformers, from a folder, a GGUF file or the hub, with clear errors."""

from __future__ import annotations

import io
import socket
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlsplit
from urllib.request import getproxies

import huggingface_hub
import torch
import transformers

from foredraft.errors import ConfigError, ModelLoadError, UnsupportedModelError
from foredraft.models.hf_devices import DeviceMap, map_options

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16, "float64": torch.float64}

Kind = Literal["causal language model", "sequence-to-sequence model"]


@contextmanager
def quiet_log() -> Iterator[None]:
    """Keeps transformers from logging advice; its own setting comes back afterwards."""
    logging = transformers.utils.logging
    level = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(level)


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """Keeps transformers from writing advice and progress bars while a model is read; its settings come back.

    Some of its bars obey no setting, so what is written to stderr meanwhile is dropped; errors are raised, not written.
    """
    logging = transformers.utils.logging
    bars = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        with quiet_log(), redirect_stderr(io.StringIO()):
            yield
    finally:
        if bars:
            logging.enable_progress_bar()


def load_model(
    path: str,
    dtype: str | torch.dtype,
    device: str,
    trust_remote_code: bool,
    kind: Kind = "causal language model",
    device_map: DeviceMap | None = None,
) -> Any:
    """The model, on its device or devices (arguments as :func:`foredraft.models.hf.load_hf`)."""
    where, options = _source(path)
    if isinstance(dtype, str) and dtype != "auto" and dtype not in DTYPES:
        raise ConfigError(f"must be auto or one of {', '.join(DTYPES)} (got {dtype!r:.40})", field="dtype")
    options |= {
        "dtype": DTYPES.get(dtype, dtype) if isinstance(dtype, str) else dtype,
        "trust_remote_code": trust_remote_code,
        "output_loading_info": True,
    }
    if device_map is not None:
        options |= map_options(device_map)
    with quiet_transformers():
        try:
            model, report = _read(where, options, kind)
        except Exception as error:
            raise _explain(path, error, kind) from error
        missing = sorted(report["missing_keys"]) + sorted(str(key) for key in report["mismatched_keys"])
        if missing:
            raise ModelLoadError(
                f"{len(missing)} weights are missing or have another shape, {missing[0]:.80} among them",
                field=path,
                remedy=f"use a complete checkpoint of a {kind}",
            )
        return model if device_map is not None else model.to(device)


def _read(where: str, options: dict[str, Any], kind: Kind) -> Any:
    """From this machine if it is here; only then from the hub, if there is one to be reached."""
    causal = kind == "causal language model"
    read = (transformers.AutoModelForCausalLM if causal else transformers.AutoModelForSeq2SeqLM).from_pretrained
    try:
        return read(where, local_files_only=True, **options)
    except OSError:
        if Path(where).is_dir():
            raise
        _require_hub()
        return read(where, **options)


def _require_hub() -> None:
    """A quick look, because the hub's own client tries for half a minute. Behind a proxy it decides alone."""
    endpoint = urlsplit(huggingface_hub.constants.ENDPOINT)
    if getproxies() or not endpoint.hostname:
        return
    port = endpoint.port or (80 if endpoint.scheme == "http" else 443)
    socket.create_connection((endpoint.hostname, port), timeout=5).close()


def _source(path: str) -> tuple[str, dict[str, Any]]:
    """What to hand to transformers: a folder or hub id, and the options that go with it."""
    place = Path(path).expanduser()
    if place.suffix == ".gguf":
        if not place.is_file():
            raise ModelLoadError("no such file", field=path, remedy="check the path")
        from transformers import GgufConfig

        return str(place.parent), {"gguf_file": place.name, "quantization_config": GgufConfig(dequantize=True)}
    # Pickled weights can run code when they are read: safetensors only.
    options: dict[str, Any] = {"use_safetensors": True}
    if place.is_dir():
        if not (place / "config.json").is_file():
            raise ModelLoadError("the folder has no config.json", field=path, remedy="name the folder of a checkpoint")
        return str(place), options
    if place.exists():
        raise ModelLoadError("is neither a folder nor a .gguf file", field=path, remedy="name one of these")
    if path.startswith(("/", "~", ".")) or path.count("/") > 1:
        raise ModelLoadError("no such folder or file", field=path, remedy="check the path")
    return path, options


def _explain(path: str, error: Exception, kind: Kind) -> ModelLoadError:
    """One sentence for what transformers reports in many."""
    text = " ".join(str(error).split())
    if "trust_remote_code" in text:
        return ModelLoadError(
            "it needs code of its own that comes with the checkpoint",
            field=path,
            remedy="set trust_remote_code if you trust its source",
        )
    if "Unrecognized configuration class" in text or "Unrecognized model" in text or "does not recognize" in text:
        return UnsupportedModelError(
            f"transformers {transformers.__version__} knows no {kind} of this kind",
            field=path,
            remedy="update transformers, or use another model",
        )
    if "No file named" in text or "safetensors found" in text or "pytorch_model.bin" in text:
        return ModelLoadError(
            "there are no safetensors weights", field=path, remedy="convert the checkpoint to safetensors"
        )
    unreachable = ("connect", "offline", "couldn't find them in the cached files")
    if isinstance(error, (socket.gaierror, TimeoutError)) or any(sign in text.lower() for sign in unreachable):
        return ModelLoadError(
            "it is not on this machine and the model hub cannot be reached",
            field=path,
            remedy="check name and network, or give a local folder, a .gguf file or a name of 'foredraft models'",
        )
    if "is not a local folder and is not a valid model identifier" in text:
        return ModelLoadError(
            "neither a local folder nor a model of the hub has that name",
            field=path,
            remedy="check its spelling, or run 'hf auth login' if it is private",
        )
    return ModelLoadError(
        f"transformers cannot read it ({type(error).__name__}: {text[:200]})",
        field=path,
        remedy="check that config.json is complete and that the weights are whole, or download the checkpoint again",
    )
