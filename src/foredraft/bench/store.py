"""Finished cells, one JSON object a line, written at once: an interrupted bench goes on where it was."""

from __future__ import annotations

import json
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from foredraft.files import replace_text

Cell = dict[str, Any]
"""A finished task: its fields, ``key``, ``date``, ``commit``, and what the worker answered."""


class Store:
    """Cells and facts of one bench.

    Args:
        path: The file; it and its folder are made if need be.
        fresh: Forget what is there.
    """

    def __init__(self, path: Path, fresh: bool = False) -> None:
        self.path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        if fresh:
            path.unlink(missing_ok=True)
        self.entries: list[Cell] = []
        if path.exists():
            self.entries = [json.loads(line) for line in path.read_text("utf-8").splitlines() if _whole(line)]
        self._done = {entry["key"] for entry in self.cells}

    @property
    def cells(self) -> list[Cell]:
        return [entry for entry in self.entries if entry["kind"] == "cell"]

    def of_kind(self, kind: str) -> list[Cell]:
        """Other entries: ``row``, ``run``."""
        return [entry for entry in self.entries if entry["kind"] == kind]

    def has(self, key: str) -> bool:
        return key in self._done

    def add(self, kind: str, entry: Cell) -> None:
        """Keeps an entry, on disk too."""
        entry = {"kind": kind} | entry
        self.entries.append(entry)
        if kind == "cell":
            self._done.add(entry["key"])
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(entry) + "\n")

    def forget(self, pattern: str) -> int:
        """Drops the cells of rows whose name matches; answers how many."""
        kept = [entry for entry in self.entries if entry["kind"] != "cell" or not fnmatch(entry["row"], pattern)]
        dropped = len(self.entries) - len(kept)
        self.entries = kept
        self._done = {entry["key"] for entry in self.cells}
        replace_text(self.path, "".join(json.dumps(entry) + "\n" for entry in kept))
        return dropped


def _whole(line: str) -> bool:
    """Whether a line was written to its end: the last one may be cut."""
    try:
        return isinstance(json.loads(line), dict)
    except ValueError:
        return False
