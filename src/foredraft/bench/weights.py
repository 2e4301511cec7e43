"""The same weights for engines that do not read GGUF: dequantised once into a folder of safetensors."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from foredraft.bench.environments import UnavailableError, home
from foredraft.models.catalog import find, resolve


def gguf_path(target: str) -> Path:
    """The target's GGUF file.

    Raises:
        UnavailableError: There is none on this machine.
    """
    path = resolve(target) if find(target) is not None else Path(target).expanduser()
    if path is None or path.suffix != ".gguf" or not path.exists():
        how = f"run 'foredraft models fetch {target}'" if find(target) else "give a .gguf file or a catalogue name"
        raise UnavailableError(f"there is no GGUF of {target} here; {how}")
    return path


def dense_folder(target: str, say: Callable[[str], None]) -> Path:
    """A transformers folder with the target's weights dequantised and rounded to bfloat16."""
    source = gguf_path(target)
    folder = home() / "weights" / f"{source.stem}-bf16"
    if (folder / "config.json").exists():
        return folder
    say(f"dequantising {source.name} for engines that do not read it")
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    where = {"pretrained_model_name_or_path": str(source.parent), "gguf_file": source.name}
    model = AutoModelForCausalLM.from_pretrained(
        **where, quantization_config=GgufConfig(dequantize=True), dtype=torch.bfloat16
    )
    part = folder.with_suffix(".part")
    model.save_pretrained(part)
    AutoTokenizer.from_pretrained(**where).save_pretrained(part)
    os.replace(part, folder)
    return folder
