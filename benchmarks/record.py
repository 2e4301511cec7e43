"""Results that survive an interruption: one JSON file a measurement, rewritten whole after every finished part."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from foredraft.files import json_by_lines, replace_text
from foredraft.machine import provenance

RESULTS = Path(__file__).parent / "results"


class Record:
    """A results file with provenance and named parts; finished parts are not measured again.

    Args:
        name: File name under ``benchmarks/results`` without ``.json``.
        fresh: Forget what is there.
    """

    def __init__(self, name: str, fresh: bool = False) -> None:
        self.path = RESULTS / f"{name}.json"
        self.data: dict[str, Any] = {}
        if self.path.exists() and not fresh:
            self.data = json.loads(self.path.read_text())
        self.data["provenance"] = provenance()
        self.data.setdefault("parts", {})

    def has(self, part: str) -> bool:
        return part in self.data["parts"]

    def put(self, part: str, value: Any) -> None:
        """Adds one part and saves."""
        self.data["parts"][part] = value
        self.save()

    def save(self) -> None:
        replace_text(self.path, json_by_lines(self.data, "parts"))
