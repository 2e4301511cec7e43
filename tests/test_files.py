"""Files are whole or not at all; results that are kept can be read again and compared line by line."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from foredraft.files import json_by_lines, replace_text


@pytest.mark.parametrize(
    "entries", [[], {}, [{"a": [1, 2]}, {"b": "é\n"}], {"x/1": {"p": [[1, 2], [3, 4]]}, "y": None}]
)
@pytest.mark.parametrize("rest", [{}, {"summary": {"k": 1.5}, "date": "today"}])
def test_what_is_written_is_read_again(entries: Any, rest: dict[str, Any]) -> None:
    data = {"parts": entries, **rest}
    text = json_by_lines(data, "parts")
    assert json.loads(text) == data
    assert sum(line.startswith("  ") and not line.startswith("   ") for line in text.splitlines()) == len(
        entries
    ) + len(rest.get("summary", {}))


def test_a_write_that_fails_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "folder" / "kept.json"
    replace_text(path, "old é")

    def full(*_: object) -> None:
        raise OSError("no space left")

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(OSError, match="no space"):
        replace_text(path, "new")
    assert path.read_text("utf-8") == "old é"
