"""From what a user names to a file or folder on this machine."""

from __future__ import annotations

import os
import re
from pathlib import Path

from foredraft.errors import ModelLoadError

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
_PATTERNS = ["*.json", "*.safetensors", "tokenizer.model", "*.jinja", "merges.txt", "vocab.txt", "*.py"]
"""What is fetched from the hub. Code is fetched, never run without ``trust_remote_code``."""
_PICKLES = {".bin", ".pt", ".pth", ".pkl", ".ckpt"}


def locate(spec: str | Path) -> Path:
    """Finds a local folder, a ``.gguf`` file, a catalog name or a hub id (downloaded, or from the hub's cache).

    Raises:
        ModelLoadError: Nothing has that name, or the hub cannot be reached; the message says what to do.
    """
    path = Path(spec).expanduser()
    if path.suffix in _PICKLES:
        raise ModelLoadError(
            "is a pickle, which can run code when read and is refused",
            field=str(spec),
            remedy="give a .gguf file or a folder with safetensors",
        )
    if path.is_dir():
        if not (path / "config.json").exists():
            raise ModelLoadError("folder has no config.json", field=str(spec), remedy="give the model's own folder")
        return path
    if path.is_file():
        if path.suffix != ".gguf":
            raise ModelLoadError("is not a .gguf file", field=str(spec), remedy="give a .gguf file or a model's folder")
        return path
    from foredraft.models.catalog import CATALOG, find, resolve

    found = resolve(str(spec))
    if found is not None:
        return found
    if find(str(spec)) is not None:
        raise ModelLoadError(
            "is not on this machine yet", field=str(spec), remedy=f"run: foredraft models fetch {spec}"
        )
    if isinstance(spec, str) and _HUB_ID.fullmatch(spec) and path.suffix != ".gguf":
        return _from_hub(spec)
    names = ", ".join(entry.name for entry in CATALOG)
    raise ModelLoadError(
        "there is no such file, folder or catalog name",
        field=str(spec),
        remedy=f"give a path, a hub id (owner/name) or one of: {names}",
    )


def _from_hub(name: str) -> Path:
    from huggingface_hub import snapshot_download  # slow to import, hence only here
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError, RepositoryNotFoundError

    try:
        return Path(snapshot_download(name, allow_patterns=_PATTERNS, local_files_only=True))
    except (LocalEntryNotFoundError, HFValidationError, OSError):
        pass  # not downloaded before
    if os.environ.get("HF_HUB_OFFLINE", "").upper() in {"1", "TRUE", "YES", "ON"}:
        raise ModelLoadError(
            "is not in the hub's cache and HF_HUB_OFFLINE is set",
            field=name,
            remedy="unset HF_HUB_OFFLINE to download it, or give a local path",
        )
    try:
        return Path(snapshot_download(name, allow_patterns=_PATTERNS, etag_timeout=5))
    except RepositoryNotFoundError:
        raise ModelLoadError(
            "the hub has no such public model", field=name, remedy="check its name, or log in with the hub's own client"
        ) from None
    except Exception as error:  # the client lets many kinds through: DNS, proxies, TLS, time-outs
        reason = str(error).strip().splitlines()[0][:200] if str(error).strip() else type(error).__name__
        raise ModelLoadError(
            f"cannot be downloaded ({reason})", field=name, remedy="check the network, or give a local path"
        ) from None
