"""Tool calls out of text: the same whatever pieces the text comes in, and nothing lost or made up."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from foredraft.server.tool_parser import Event, Family, ToolCall, ToolParser, _joined

NAMES = ["f", "g.h", "get_weather"]
F = ToolCall("f", '{"x": 1}')
G = ToolCall("g.h", "{}")

CASES: list[tuple[Family, str, list[Event]]] = [
    ("tagged", "no call at all\n", ["no call at all\n"]),
    ("tagged", '<tool_call>\n{"name": "f", "arguments": {"x": 1}}\n</tool_call>', [F]),
    ("tagged", 'Sure.\n\n<tool_call>{"name":"f","arguments":{"x":1}}</tool_call>\n', ["Sure.", F]),
    (
        "tagged",
        '<tool_call>{"name":"f","arguments":{"x":1}}</tool_call>\n<tool_call>{"name":"g.h"}</tool_call>',
        [F, G],
    ),
    ("tagged", '<tool_call>[{"name":"f","arguments":{"x":1}}, {"name":"g.h"}]</tool_call> Done.', [F, G, "Done."]),
    ("tagged", '<tool_call>{"name":"f","arguments":"{\\"x\\": 1}"}</tool_call>', [F]),
    (
        "tagged",
        '<tool_call>{"name":"f","arguments":{"x":"</tool_call>}\\"<tool_call>"}}</tool_call>',
        [ToolCall("f", '{"x": "</tool_call>}\\"<tool_call>"}')],
    ),
    ("tagged", '<tool_call>{"name":"f","arguments":{"x":1}} and on', [F, "and on"]),
    ("tagged", '<tool_call>{"name":"f","arguments":{"x":1}}</tool_c', [F, "</tool_c"]),
    ("tagged", '<tool_call>{"name":"f","arguments":{"x":', ['<tool_call>{"name":"f","arguments":{"x":']),
    ("tagged", 'a <tool_call> {"name": "nobody"}</tool_call>', ['a <tool_call> {"name": "nobody"}</tool_call>']),
    ("tagged", "a <tool_call> b </tool_call> <tool", ["a <tool_call> b </tool_call> <tool"]),
    ("tagged", '<tool_call>{"name":"f","arguments":{"x":NaN}}</tool_call>', None),  # type: ignore[list-item]
    ("tagged", '<tool_call><tool_call>{"name":"f","arguments":{"x":1}}</tool_call>', ["<tool_call>", F]),
    ("mistral", '[TOOL_CALLS][{"name":"f","arguments":{"x":1}}, {"name":"g.h"}]', [F, G]),
    ("mistral", 'So: [TOOL_CALLS] f{"x": 1}', ["So:", F]),
    ("mistral", '[TOOL_CALLS]f[CALL_ID]ab12[ARGS]{"x":1}[TOOL_CALLS]g.h[ARGS]{}', [F, G]),
    ("mistral", '[TOOL_CALLS]nobody{"x":1} [TOOL', ['[TOOL_CALLS]nobody{"x":1} [TOOL']),
    ("mistral", "[TOOL_CALLS]f" + " " * 300 + "{}", ["[TOOL_CALLS]f" + " " * 300 + "{}"]),
    ("bare", '\n{"name": "f", "parameters": {"x": 1}}', [F]),
    ("bare", '<|python_tag|>{"name": "f", "parameters": {"x": 1}}; {"name": "g.h", "parameters": {}}', [F, G]),
    ("bare", '{"name": "f", "parameters": {"x": 1}}; no more', [F, "; no more"]),
    ("bare", ' {"answer": [3, "}"]} \n', [' {"answer": [3, "}"]} \n']),
    ("bare", 'Text {"name": "f", "parameters": {}}', ['Text {"name": "f", "parameters": {}}']),
    ("bare", " <|python", [" <|python"]),
    ("bare", "", []),
]


def parse(family: Family, pieces: list[str]) -> list[Event]:
    parser = ToolParser(family, NAMES)
    events = [event for piece in pieces for event in parser.push(piece)]
    return _joined(events + parser.finish())


@pytest.mark.parametrize(("family", "text", "wanted"), CASES)
def test_what_is_parsed(family: Family, text: str, wanted: list[Event] | None) -> None:
    assert parse(family, [text]) == ([text] if wanted is None else wanted)


@pytest.mark.parametrize(("family", "text", "wanted"), CASES)
def test_every_cut_gives_the_same(family: Family, text: str, wanted: list[Event] | None) -> None:
    whole = parse(family, [text])
    assert parse(family, list(text)) == whole
    for cut in range(len(text) + 1):
        assert parse(family, [text[:cut], text[cut:]]) == whole, cut


PARTS = st.sampled_from(
    ["<tool_call>", "</tool_call>", "[TOOL_CALLS]", "[ARGS]", "<|python_tag|>", '{"name": "f", "arguments": {"x": 1}}',
     '{"name":"g.h","parameters":{"s":"}\\\\"}}', "[", "]", "{", "}", '"', "\\", "f", "g.h", " ", "\n", ";",
     "é", "text"]
)  # fmt: skip


@settings(deadline=None, max_examples=200)
@given(st.sampled_from(["tagged", "mistral", "bare"]), st.lists(PARTS, max_size=14), st.data())
def test_any_text_in_any_pieces(family: Family, parts: list[str], data: st.DataObject) -> None:
    text = "".join(parts)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=20)))
    pieces = [text[start:end] for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    whole = parse(family, [text])
    assert parse(family, pieces) == whole
    calls = [event for event in whole if isinstance(event, ToolCall)]
    if not calls:
        assert "".join(map(str, whole)) == text  # nothing is lost
    for call in calls:
        assert call.name in NAMES
        assert isinstance(json.loads(call.arguments), dict)


def test_text_is_not_held_back_longer_than_it_must() -> None:
    parser = ToolParser("tagged", NAMES)
    assert parser.push("Let me see") == ["Let me see"]
    assert parser.push(" it <to") == [" it"]
    assert parser.push("ols>") == [" <tools>"]
    assert ToolParser("bare", NAMES).push("It is") == ["It is"]
