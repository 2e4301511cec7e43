"""API keys: kept as SHA-256, compared in constant time; a key's name is the tenant of its requests."""

from __future__ import annotations

import hashlib
import hmac
import os
import re
import secrets
import tomllib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from foredraft.config import Schema
from foredraft.errors import ConfigError
from foredraft.server.config import ServerConfig

ENVIRONMENT = "FOREDRAFT_API_KEYS"
_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")
_SHORTEST = 16


class KeyEntry(Schema):
    """One table of the key file."""

    sha256: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
    """SHA-256 of the key, in hexadecimal digits."""
    tenant_class: Annotated[str, Field(pattern=r"^[a-z0-9_-]{1,32}$")] = "default"
    """Label of the key's requests in the metrics."""
    max_requests: Annotated[int, Field(ge=1)] | None = None
    """Most requests at once."""
    tokens_per_minute: Annotated[int, Field(ge=1)] | None = None
    """Tokens a minute, prompt and output together."""
    priority: int = 0
    """Priority of its requests; they may ask for a higher number (later), not for a lower."""
    admin: bool = False
    """Whether it may read /metrics and /stats."""


@dataclass(frozen=True, slots=True)
class Client:
    """Who sent a request."""

    name: str
    tenant_class: str = "default"
    max_requests: int | None = None
    tokens_per_minute: int | None = None
    priority: int = 0
    admin: bool = False


class KeyRing:
    """The keys that are accepted.

    Args:
        entries: Digest and client of each key; none at all lets everybody in as one client.
        anonymous: Who everybody is where there are no keys.
    """

    def __init__(self, entries: Iterable[tuple[bytes, Client]], anonymous: Client) -> None:
        self._entries = list(entries)
        self._anonymous = anonymous

    @property
    def open(self) -> bool:
        """Whether no key is needed."""
        return not self._entries

    def find(self, authorization: str | None) -> Client | None:
        """The client of an ``Authorization`` header; None if its key is not accepted."""
        if self.open:
            return self._anonymous
        scheme, _, key = (authorization or "").partition(" ")
        digest = _digest(key.strip()) if scheme.lower() == "bearer" else b"\0" * 32
        found = None
        for known, client in self._entries:  # all of them, always: time must not tell which came close
            if hmac.compare_digest(known, digest):
                found = client
        return found


def load_keys(config: ServerConfig) -> KeyRing:
    """Reads the key file and the environment.

    Raises:
        ConfigError: The file cannot be read, an entry is wrong, or a key is too short to be safe.
    """
    defaults = {"max_requests": config.key_requests, "tokens_per_minute": config.key_tokens_per_minute}
    entries: dict[str, tuple[bytes, Client]] = {}
    for name, table in _read_file(config.api_keys).items():
        if not isinstance(table, dict) or not _NAME.fullmatch(name):
            raise ConfigError(
                f"entry {name!r} is not a table [NAME] with a field sha256",
                field="api_keys",
                remedy="make one with 'foredraft new-key NAME'",
            )
        try:
            entry = KeyEntry(**table)
        except ConfigError as error:
            raise ConfigError(
                f"entry {name!r}: {error}", field="api_keys", remedy="make one with 'foredraft new-key NAME'"
            ) from None
        fields = {field: value for field, value in dict(entry).items() if value is not None and field != "sha256"}
        entries[name] = (bytes.fromhex(entry.sha256), Client(name, **(defaults | fields)))
    for number, text in enumerate(filter(None, os.environ.get(ENVIRONMENT, "").split(","))):
        name, mark, key = text.strip().partition("=")
        name, key = (name, key) if mark else (f"key{number}", name)
        if not _NAME.fullmatch(name) or len(key) < _SHORTEST or name in entries:
            raise ConfigError(
                f"entry {number} is not NAME=KEY with a new name and a key of at least {_SHORTEST} characters",
                field=ENVIRONMENT,
            )
        entries[name] = (_digest(key), Client(name, **defaults))  # type: ignore[arg-type]
    return KeyRing(entries.values(), Client("anonymous", **defaults))  # type: ignore[arg-type]


def new_key(name: str) -> tuple[str, str]:
    """A fresh key and its entry for the key file.

    Raises:
        ConfigError: The name cannot be used.
    """
    if not _NAME.fullmatch(name):
        raise ConfigError(f"{name!r} is not 1 to 64 letters, digits, dots, dashes or underscores", field="name")
    key = f"fd-{secrets.token_urlsafe(32)}"
    return key, f'[{name}]\nsha256 = "{_digest(key).hex()}"\n'


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()


def _read_file(path: str | None) -> dict[str, Any]:
    if path is None:
        return {}
    try:
        return tomllib.loads(Path(path).read_text("utf-8"))
    except OSError as problem:
        raise ConfigError(f"cannot read {path} ({problem.strerror})", field="api_keys") from None
    except (tomllib.TOMLDecodeError, UnicodeError) as problem:
        raise ConfigError(f"{path} is not TOML ({problem})", field="api_keys") from None
