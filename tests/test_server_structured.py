"""Structured output and tools over HTTP, with drafts as without, whole as streamed."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from server_support import Running, reciting_engine, running

TALK: list[Any] = [{"role": "user", "content": "go"}]
UNIT = {"type": "object", "properties": {"unit": {"enum": ["c"]}}, "required": ["unit"], "additionalProperties": False}
TOOLS: list[Any] = [
    {"type": "function", "function": {"name": "weather", "parameters": UNIT}},
    {"type": "function", "function": {"name": "clock", "parameters": UNIT}},
]


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    with running(reciting_engine(k=3)) as found:
        yield found


@pytest.mark.parametrize("off", [False, True])
def test_a_schema_holds(server: Running, off: bool) -> None:
    answer = server.openai().chat.completions.create(
        model="reciter",
        messages=TALK,
        max_tokens=60,
        temperature=0,
        response_format={"type": "json_schema", "json_schema": {"name": "x", "schema": UNIT}},
        extra_body={"speculation": {"off": off}},
    )
    assert json.loads(answer.choices[0].message.content or "") == {"unit": "c"}
    assert answer.choices[0].finish_reason == "stop"


@pytest.mark.parametrize(
    ("fields", "text"),
    [({"regex": "n(ine|o)\\."}, "nine."), ({"json_schema": {"const": 3}}, "3"), ({"grammar": 'start: "a" "b"'}, "ab")],
)
def test_other_structures(server: Running, fields: dict[str, Any], text: str) -> None:
    body = {"prompt": "hello", "max_tokens": 20, "temperature": 0} | fields
    found = server.post("/v1/completions", body).json()["choices"][0]
    assert found["text"] in (text, "no.")
    assert found["finish_reason"] == "stop"


def test_a_call_is_the_same_whole_and_streamed(server: Running) -> None:
    client, asked = (
        server.openai(),
        {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "clock"}}},
    )
    whole = client.chat.completions.create(model="reciter", messages=TALK, max_tokens=200, temperature=0, **asked)
    message = whole.choices[0].message
    assert whole.choices[0].finish_reason == "tool_calls"
    assert message.tool_calls is not None
    [call] = message.tool_calls
    assert (call.function.name, json.loads(call.function.arguments)) == ("clock", {"unit": "c"})  # type: ignore[union-attr]
    assert message.content is None
    chunks = list(
        client.chat.completions.create(
            model="reciter", messages=TALK, max_tokens=200, temperature=0, stream=True, **asked
        )
    )
    deltas = [choice.delta for chunk in chunks for choice in chunk.choices]
    calls = [part for delta in deltas for part in delta.tool_calls or []]
    assert {part.index for part in calls} == {0}
    assert "".join(part.function.name or "" for part in calls if part.function) == "clock"
    assert json.loads("".join(part.function.arguments or "" for part in calls if part.function)) == {"unit": "c"}
    assert "".join(delta.content or "" for delta in deltas) == ""
    assert chunks[-1].choices[0].finish_reason == "tool_calls"
    assert calls[0].id


def test_a_conversation_with_calls_goes_on(server: Running) -> None:
    earlier = {"id": "c1", "type": "function", "function": {"name": "clock", "arguments": '{"unit": "c"}'}}
    talk = [
        *TALK,
        {"role": "assistant", "content": None, "tool_calls": [earlier]},
        {"role": "tool", "tool_call_id": "c1", "content": "nine"},
    ]
    answer = server.openai().chat.completions.create(
        model="reciter", messages=talk, tools=TOOLS, max_tokens=10, temperature=0
    )
    assert answer.choices[0].message.content
    assert answer.choices[0].message.tool_calls is None


WRONG: list[tuple[str, dict[str, Any]]] = [
    ("tools.0", {"tools": [{"type": "code"}]}),
    ("tools.0.function.name", {"tools": [{"type": "function", "function": {"name": "a b"}}]}),
    ("tool_choice", {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "other"}}}),
    ("tool_choice", {"tool_choice": "required"}),
    ("tools", {"tools": TOOLS, "tool_choice": "required", "regex": "x"}),
    ("response_format", {"response_format": {"type": "yaml"}}),
    ("response_format", {"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "wizard"}}}}),
    ("regex", {"response_format": {"type": "json_object"}, "regex": "x"}),
    ("regex", {"regex": "("}),
    ("grammar", {"grammar": "start: nothing"}),
    ("messages.0.tool_call_id", {"messages": [{"role": "user", "content": "x", "tool_call_id": "c"}]}),
]


@pytest.mark.parametrize(("field", "extra"), WRONG, ids=lambda value: value if isinstance(value, str) else "")
def test_what_makes_no_sense_is_named(server: Running, field: str, extra: dict[str, Any]) -> None:
    answer = server.post("/v1/chat/completions", {"messages": TALK, "max_tokens": 4} | extra)
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"].startswith(field)
