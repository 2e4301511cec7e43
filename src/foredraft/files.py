"""Files that are there whole or not at all, and results that can be compared line by line."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any


def replace_text(path: Path, text: str) -> None:
    """Writes UTF-8 text in one move: after a crash the old file is there, or the new one. Makes the folder."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(path.name + ".part")
    part.write_text(text, "utf-8")
    os.replace(part, path)


def json_by_lines(data: dict[str, Any], key: str) -> str:
    """``data`` as indented JSON, but with one line an entry of the list or mapping ``data[key]``, which comes last."""
    head = json.dumps({name: value for name, value in data.items() if name != key}, ensure_ascii=False, indent=1)
    entries = data[key]
    if isinstance(entries, dict):
        lines = [f"{json.dumps(name, ensure_ascii=False)}: {_line(value)}" for name, value in entries.items()]
        opened, closed = "{}"
    else:
        lines = [_line(value) for value in entries]
        opened, closed = "[]"
    body = ",\n".join("  " + line for line in lines)
    comma = "," if len(data) > 1 else ""
    return f'{head.removesuffix("}").rstrip()}{comma}\n "{key}": {opened}\n{body}\n {closed}\n}}\n'


def _line(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)
