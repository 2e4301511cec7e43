"""A GGUF file as a folder of safetensors, for servers that do not read GGUF."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Literal

from foredraft.errors import ConfigError

DenseType = Literal["bfloat16", "float32"]


def write_dense(source: Path, folder: Path, dtype: DenseType = "bfloat16") -> None:
    """Dequantises a model into the layout of transformers, with its tokenizer; written whole or not at all.

    Args:
        source: A ``.gguf`` file of an architecture that transformers reads.
        folder: Must not be there yet, or be empty.
        dtype: Of the weights; bfloat16 rounds them once more.

    Raises:
        ConfigError: ``folder`` holds something, or transformers cannot read the file.
    """
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ConfigError(f"{folder} is not empty", field="out", remedy="name a new folder")
    part = folder.with_name(folder.name + ".part")
    shutil.rmtree(part, ignore_errors=True)  # of an earlier attempt that was interrupted
    _convert(source, part, dtype)
    if folder.exists():
        folder.rmdir()
    os.replace(part, folder)


def _convert(source: Path, folder: Path, dtype: DenseType) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    from foredraft.models.hf_load import quiet_transformers

    where = {"pretrained_model_name_or_path": str(source.parent), "gguf_file": source.name}
    try:
        with quiet_transformers():
            model = AutoModelForCausalLM.from_pretrained(
                **where, quantization_config=GgufConfig(dequantize=True), dtype=getattr(torch, dtype)
            )
            tokenizer = AutoTokenizer.from_pretrained(**where)
    except (ValueError, KeyError, ImportError) as error:
        reason = str(error).strip().splitlines()[0][:200] if str(error).strip() else type(error).__name__
        raise ConfigError(
            f"transformers cannot read {source.name} ({reason})", field="source", remedy="use the publisher's folder"
        ) from None
    with quiet_transformers():
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
