"""From the fields of a request to a grammar's source text."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from llguidance import regex_to_lark
from llguidance.gbnf_to_lark import any_to_lark

from foredraft.config import SamplingParams
from foredraft.errors import ConfigError

_SPACE = r"[ \n\r\t]{0,32}"
"""Blank space between the parts of JSON. Bounded, because small models that see no end write blanks for ever."""
JSON_OPTIONS = {"whitespace_pattern": _SPACE, "json_allow_general_unicode_escapes": True}
"""For ``x-guidance`` at the root of a schema."""


MOST_PROPERTIES = 2000
"""Of one object in a schema. The library's time to read an object grows with the square of their number: about a second
for so many, minutes for ten thousand."""


@dataclass(frozen=True, slots=True)
class Structure:
    """One request's grammar as text.

    Attributes:
        field: The field that asked for it, for messages.
        source: The grammar in the library's own format.
    """

    field: str
    source: str


def structure_of(params: SamplingParams, special: Mapping[str, int] | None = None) -> Structure | None:
    """The grammar that a request asks for; None if it asks for none.

    Args:
        params: The request's controls.
        special: The model's special tokens by name, which may serve as markers.

    Raises:
        ConfigError: The grammar cannot be read; the field is named.
    """
    if params.structured_field is None:
        return None
    field = params.structured_field
    main = _frame(params, special or {}, blanks=field in ("json_schema", "json_object"))
    grammars = [{"name": "main", "lark_grammar": main}, {"name": "body", **_body(params, field)}]
    return Structure(field, json.dumps({"grammars": grammars}))


def _body(params: SamplingParams, field: str) -> dict[str, Any]:
    if field == "json_object":
        return {"json_schema": {"type": "object", "x-guidance": JSON_OPTIONS}}
    if field == "json_schema":
        assert params.json_schema is not None
        return {"json_schema": _with_options(json.loads(params.json_schema))}
    if field == "regex":
        assert params.regex is not None
        return {"lark_grammar": f"start: /{regex_to_lark(params.regex)}/"}
    assert params.grammar is not None
    try:
        return {"lark_grammar": any_to_lark(params.grammar)}
    except Exception as error:  # the library's reader of GBNF raises bare Exceptions, too
        raise ConfigError(f"cannot be read ({error})", field="grammar") from None


def _with_options(schema: Any) -> dict[str, Any]:
    if schema is True:
        schema = {}
    if not isinstance(schema, dict):
        raise ConfigError("no JSON satisfies it", field="json_schema")
    if "x-guidance" in schema:
        raise ConfigError("'x-guidance' is not a keyword of JSON Schema", field="json_schema")
    _check_size(schema)
    return {**schema, "x-guidance": JSON_OPTIONS}


def _check_size(schema: Any) -> None:
    """Refuses what would take long to read: the sum of squares over all objects is held under one such object's."""
    squares, most, found = 0, 0, [schema]
    while found:
        part = found.pop()
        if isinstance(part, dict):
            found += part.values()
            properties = part.get("properties")
            n = len(properties) if isinstance(properties, dict) else 0
            squares, most = squares + n * n, max(most, n)
        elif isinstance(part, list):
            found += part
    if squares > MOST_PROPERTIES**2:
        raise ConfigError(
            f"its objects have too many properties (the largest {most})",
            field="json_schema",
            remedy=f"at most {MOST_PROPERTIES} in one object, fewer where there are several such objects",
        )


def _frame(params: SamplingParams, special: Mapping[str, int], blanks: bool) -> str:
    """The text around the structure: free up to ``structured_after``, and free again from ``structured_until`` on."""
    after, until = params.structured_after, params.structured_until
    blank = "BLANK" if blanks and (after or until) else ""
    body = f"{blank if after else ''} @body {f'{blank} {_literal(until, special)}' if until else ''}"
    # Without no_forcing the library would admit, of several tokens that can spell what must come, only the one that it
    # prefers itself: another law than the target's under the grammar.
    lines = ['%llguidance {"no_forcing": true}', "TEXT: /(.|\\n)*/"]
    if blank:
        lines.append(f"BLANK: /{_SPACE}/")
    if after is None:
        lines.append(f"start: {body} {'TEXT' if until else ''}")
    else:
        if after in special:
            lines.append(f"part: TEXT {_literal(after, special)} {body}")
        else:
            lines += [f"head[lazy]: TEXT {_literal(after, special)}", f"part: head {body}"]
        lines.append("start: part* TEXT" if until else "start: part")
    return "\n".join(lines)


def _literal(marker: str, special: Mapping[str, int]) -> str:
    return f"<[{special[marker]}]>" if marker in special else json.dumps(marker, ensure_ascii=False)
