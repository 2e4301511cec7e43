"""Grammars that admit nothing but well-formed calls of the offered tools."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from foredraft.grammar.source import JSON_OPTIONS
from foredraft.server.tool_parser import CLOSING, OPENING

if TYPE_CHECKING:
    from foredraft.server.tools import Tools


def call_schema(tools: Tools) -> dict[str, Any]:
    """JSON Schema of one call: an offered name with arguments that satisfy that tool's schema."""
    key = "parameters" if tools.family == "bare" else "arguments"
    kinds = [
        {
            "type": "object",
            "properties": {"name": {"const": tool.name}, key: _anchored(tool.parameters, f"#/$defs/{i}")},
            "required": ["name", key],
            "additionalProperties": False,
        }
        for i, tool in enumerate(tools.tools)
    ]
    defs = {str(i): _anchored(tool.parameters, f"#/$defs/{i}") for i, tool in enumerate(tools.tools)}
    return {"anyOf": kinds, "$defs": defs}


def _anchored(schema: Any, root: str) -> Any:
    """A schema inside another: its references to itself lead to where it now stands."""
    if isinstance(schema, list):
        return [_anchored(part, root) for part in schema]
    if not isinstance(schema, dict):
        return schema
    return {
        key: root + value[1:]
        if key == "$ref" and isinstance(value, str) and value.startswith("#")
        else _anchored(value, root)
        for key, value in schema.items()
    }


def _listed(call: dict[str, Any], most: int | None) -> dict[str, Any]:
    """Schema of a list of calls."""
    schema = {"type": "array", "items": {"anyOf": call["anyOf"]}, "minItems": 1, "$defs": call["$defs"]}
    return schema if most is None else {**schema, "maxItems": most}


def calls_grammar(tools: Tools) -> str:
    """Lark: one call, or several where they may be parallel, as the model's family writes them."""
    opening = _literal(OPENING[tools.family], tools)
    if tools.family == "mistral":
        schema = _listed(call_schema(tools), None if tools.parallel else 1)
        start = f"{opening} call"
    elif tools.family == "bare":
        schema = call_schema(tools)
        start = 'call ("; " call)*' if tools.parallel else "call"
    else:
        schema = call_schema(tools)
        item = f'{opening} "\\n" call "\\n" {_literal(CLOSING, tools)}'
        start = f'{item} ("\\n" {item})*' if tools.parallel else item
    return f"start: {start}\n{_rule(schema)}"


def free_calls(tools: Tools) -> dict[str, Any]:
    """Fields that leave the text free, but hold every call that it makes to the tools' schemas."""
    if tools.family == "mistral":  # nothing closes its calls, so they end the text
        marker = OPENING["mistral"]
        special = marker in tools.special.values()
        head = f"head: TEXT {_literal(marker, tools)}" if special else f"head[lazy]: TEXT {json.dumps(marker)}"
        rule = _rule(_listed(call_schema(tools), None))
        return {"grammar": f"start: TEXT | head call\n{head}\nTEXT: /(.|\\n)*/\n{rule}"}
    schema = json.dumps(call_schema(tools))
    return {"json_schema": schema, "structured_after": OPENING["tagged"], "structured_until": CLOSING}


def _rule(schema: dict[str, Any]) -> str:
    return f"call: %json {json.dumps({**schema, 'x-guidance': JSON_OPTIONS})}\n"


def _literal(marker: str, tools: Tools) -> str:
    ids = [id for id, name in tools.special.items() if name == marker]
    return f"<[{ids[0]}]>" if ids else json.dumps(marker)
