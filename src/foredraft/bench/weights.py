"""The same weights for engines that do not read GGUF: dequantised once into a folder of safetensors."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from foredraft.bench.environments import UnavailableError, home
from foredraft.errors import ConfigError
from foredraft.export.dense import write_dense
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


def label(target: str) -> str:
    """What files of a target's bench are called: its catalogue name, or its file's name."""
    return Path(target).name.removesuffix(".gguf")


def dense_folder(target: str, say: Callable[[str], None]) -> Path:
    """A transformers folder with the target's weights dequantised and rounded to bfloat16."""
    source = gguf_path(target)
    folder = home() / "weights" / f"{source.stem}-bf16"
    if (folder / "config.json").exists():
        return folder
    say(f"dequantising {source.name} for engines that do not read it")
    try:
        write_dense(source, folder)
    except ConfigError as error:
        raise UnavailableError(str(error)) from None
    return folder
