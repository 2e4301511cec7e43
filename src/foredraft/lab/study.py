"""What every study does around its measurements: look before the work, time its parts, write its files."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

from foredraft.config import Schema
from foredraft.errors import ConfigError
from foredraft.files import replace_text
from foredraft.lab.plots import Picture, png
from foredraft.machine import provenance

Found = TypeVar("Found", bound=Schema)


@dataclass(frozen=True, slots=True)
class StudyReport(Generic[Found]):
    """What a study found and where it is written.

    Attributes:
        result: The saved result, field by field what the JSON file holds.
        summary: A few lines of plain text for the terminal.
    """

    result: Found
    json_path: Path
    html_path: Path
    summary: str


def must_be_writable(folder: Path) -> None:
    """Finds out before minutes of work, not after them.

    Raises:
        ConfigError: The folder cannot be made or written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe = folder / ".probe"
        replace_text(probe, "")
        probe.unlink()
    except OSError as error:
        raise ConfigError(f"cannot write to {folder} ({error.strerror})", field="out", remedy="name another") from None


@contextmanager
def timed(name: str, seconds: dict[str, float]) -> Iterator[None]:
    """Notes how long the block took."""
    start = time.perf_counter()
    yield
    seconds[name] = round(time.perf_counter() - start, 2)


def load_now() -> float | None:
    """Processes that wanted a processor in the last minute; None where the system does not tell."""
    return round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else None


def origin_of(quick: bool) -> dict[str, Any]:
    """Where figures come from, as JSON has it; a quick run does not measure the memory's speed."""
    facts: dict[str, Any] = json.loads(json.dumps(provenance(measure=not quick)))
    return facts


def write_study(
    out_dir: Path, name: str, result: Found, html: str, summary: str, pictures: Sequence[Picture]
) -> StudyReport[Found]:
    """Writes ``NAME.json``, ``NAME.html`` and the pictures as PNG."""
    report = StudyReport(result, out_dir / f"{name}.json", out_dir / f"{name}.html", summary)
    replace_text(report.json_path, result.model_dump_json(indent=1))
    replace_text(report.html_path, html)
    for picture in pictures:
        png(picture, result, out_dir / f"{picture.name}.png")
    return report
