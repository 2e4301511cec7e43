"""A pool of past outputs on disk: plain arrays in an .npz file, never a pickle."""

from __future__ import annotations

import hashlib
import json
import os
import zipfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from foredraft.drafters.suffix_pool import SuffixPool
from foredraft.errors import ConfigError

if TYPE_CHECKING:
    from foredraft.drafters.base import DrafterContext

FORMAT = "foredraft suffix pool 1"


def vocabulary(context: DrafterContext) -> str:
    """A name for the meaning of the target's token ids: pools of another vocabulary are refused by it."""
    if context.tokenizer is None:
        return f"{context.target.vocab_size} ids"
    digest = hashlib.sha256()
    for token in range(context.tokenizer.vocab_size):
        digest.update(f"{context.tokenizer.backend.id_to_token(token)}\0".encode())
    return digest.hexdigest()


def save(pool: SuffixPool, path: Path, meaning: str) -> None:
    """Writes the outputs of all tenants, readable by their owner only. Replaces the file at once or not at all."""
    tenants = pool.tenants()
    outputs = [
        (owner, output)
        for owner, tenant in enumerate(tenants)
        for generation in pool.generations(tenant)
        for output in generation.outputs()
    ]
    header = json.dumps({"format": FORMAT, "vocabulary": meaning, "tenants": tenants}).encode()
    part = path.with_name(path.name + ".part")
    with os.fdopen(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
        np.savez(
            file,
            header=np.frombuffer(header, np.uint8),
            owners=np.array([owner for owner, _ in outputs], np.int32),
            ends=np.cumsum([len(output) for _, output in outputs], dtype=np.int64),
            tokens=np.concatenate([np.zeros(0, np.int32), *(np.asarray(output, np.int32) for _, output in outputs)]),
        )
    os.replace(part, path)


def load(pool: SuffixPool, path: Path, meaning: str, vocab_size: int) -> None:
    """Adds what a file holds.

    Raises:
        ConfigError: The file is of another tokenizer, too large for the pool, or no such file at all.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            size = sum(member.file_size for member in archive.infolist())
        if size > max(pool.max_bytes, 1 << 20):
            raise _refused(path, f"it holds {size} bytes", "give the pool more memory, or remove the file")
        with np.load(path, allow_pickle=False) as arrays:
            header = json.loads(np.asarray(arrays["header"]).tobytes())
            owners, ends, tokens = (np.asarray(arrays[name]) for name in ("owners", "ends", "tokens"))
    except (OSError, ValueError, KeyError, zipfile.BadZipFile, EOFError) as error:
        raise _refused(path, f"it cannot be read ({error})", "remove it") from None
    if not isinstance(header, dict) or header.get("format") != FORMAT:
        raise _refused(path, "it is no pool of this version", "remove it")
    if header.get("vocabulary") != meaning:
        raise _refused(path, "it was written with another tokenizer", "use one file a tokenizer")
    tenants: Any = header.get("tenants")
    starts = np.concatenate([np.zeros(1, np.int64), ends[:-1]]) if ends.ndim == 1 and len(ends) else ends
    sound = (
        isinstance(tenants, list)
        and all(isinstance(tenant, str) for tenant in tenants)
        and all(array.ndim == 1 and array.dtype.kind == "i" for array in (owners, ends, tokens))
        and len(owners) == len(ends)
        and (not len(ends) or (bool((ends >= starts).all()) and starts[0] == 0 and ends[-1] == len(tokens)))
        and bool(((owners >= 0) & (owners < len(tenants))).all())
        and bool(((tokens >= 0) & (tokens < vocab_size)).all())
    )
    if not sound:
        raise _refused(path, "it is damaged", "remove it")
    for owner, start, end in zip(owners.tolist(), starts.tolist(), ends.tolist(), strict=True):
        pool.add(tenants[owner], tokens[start:end].tolist())


def _refused(path: Path, problem: str, remedy: str) -> ConfigError:
    return ConfigError(f"the pool {path} is refused: {problem}", field="drafter suffix", remedy=remedy)
