"""A tokenizer from a Hugging Face folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as Backend

from foredraft.errors import ModelLoadError
from foredraft.models.tokenizer import Tokenizer

_ROLES = ("bos_token", "eos_token", "unk_token", "pad_token")


def tokenizer_from_folder(path: Path) -> Tokenizer | None:
    """Reads ``tokenizer.json`` with its configuration and chat template; None if the folder has no tokenizer.

    A folder with only the files of a slow tokenizer is converted by transformers.

    Raises:
        ModelLoadError: A file is damaged.
    """
    settings = read_json(path / "tokenizer_config.json")
    file = path / "tokenizer.json"
    if file.exists():
        try:
            backend = Backend.from_file(str(file))
        except Exception as error:  # the library raises bare Exception
            raise ModelLoadError(f"cannot be read ({error})", field=str(file), remedy="download it again") from None
    elif any((path / name).exists() for name in ("tokenizer.model", "vocab.json", "spiece.model")):
        backend = _by_transformers(path)
    else:
        return None
    backend.no_padding()
    backend.no_truncation()
    tokens = {role: text for role in _ROLES if (text := _text(settings.get(role)))}
    ends = [backend.token_to_id(tokens["eos_token"])] if "eos_token" in tokens else []
    for name in ("config.json", "generation_config.json"):
        value = read_json(path / name).get("eos_token_id")
        ends += value if isinstance(value, list) else [value]
    bos = backend.token_to_id(tokens["bos_token"]) if "bos_token" in tokens else None
    return Tokenizer(
        backend,
        bos_id=bos,
        eos_ids=[token for token in ends if isinstance(token, int)],
        chat_template=_chat_template(path, settings.get("chat_template")),
        tokens=tokens,
    )


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object; empty if the file does not exist."""
    if not path.exists():
        return {}
    try:
        value = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise ModelLoadError(f"is not valid JSON ({error})", field=str(path), remedy="download it again") from None
    if not isinstance(value, dict):
        raise ModelLoadError("is not a JSON object", field=str(path), remedy="download it again")
    return value


def _text(token: Any) -> str | None:
    value = token.get("content") if isinstance(token, dict) else token
    return value if isinstance(value, str) else None


def _chat_template(path: Path, inline: Any) -> str | None:
    """The template file of newer folders, else the one in the configuration (of several, the default one)."""
    if (path / "chat_template.jinja").exists():
        return (path / "chat_template.jinja").read_text("utf-8")
    if (path / "chat_template.json").exists():
        inline = read_json(path / "chat_template.json").get("chat_template", inline)
    if isinstance(inline, list):
        named = {entry.get("name"): entry.get("template") for entry in inline if isinstance(entry, dict)}
        inline = named.get("default")
    return inline if isinstance(inline, str) else None


def _by_transformers(path: Path) -> Backend:
    from transformers import AutoTokenizer  # slow to import, hence only here

    try:
        backend: Backend = AutoTokenizer.from_pretrained(path, local_files_only=True).backend_tokenizer
    except Exception as error:
        raise ModelLoadError(
            f"its tokenizer cannot be read ({error})", field=str(path), remedy="add the model's tokenizer.json"
        ) from None
    return backend
