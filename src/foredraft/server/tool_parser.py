"""Tool calls out of a growing text, whatever pieces it comes in.

Models of a family write their calls in one of three ways:

- ``tagged``: ``<tool_call>{"name": …, "arguments": {…}}</tool_call>`` (Hermes, Qwen), also with a list of calls between
  the tags (SmolLM2);
- ``mistral``: ``[TOOL_CALLS]`` before a list of calls, or before ``name{…}`` for each call;
- ``bare``: the whole answer is ``{"name": …, "parameters": {…}}``, perhaps after ``<|python_tag|>``, further calls
  after a semicolon (Llama 3).

A call counts when its JSON is whole, names a tool that was offered, and has an object of arguments. Anything else is
text and is delivered as it stands. What is delivered, put together, is a function of the whole text alone.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, Literal

Family = Literal["tagged", "mistral", "bare"]

OPENING: dict[Family, str] = {"tagged": "<tool_call>", "mistral": "[TOOL_CALLS]", "bare": "<|python_tag|>"}
CLOSING = "</tool_call>"
MARKERS = frozenset({*OPENING.values(), CLOSING, "[ARGS]", "[CALL_ID]"})
"""Texts that may be special tokens, which a reader of the text must see all the same."""

_NAMED = re.compile(r"([\w.-]{1,64})(?:\[CALL_ID\][\w-]{1,64})?(?:\[ARGS\])?\s{0,16}(?=\{)")
_LONGEST_NAME = 256
"""Longer than anything that the pattern matches."""


@dataclass(frozen=True, slots=True)
class ToolCall:
    """One call: the tool's name, and its arguments as JSON text."""

    name: str
    arguments: str


Event = str | ToolCall
"""A piece of ordinary text, or a call."""


class JsonEnd:
    """Finds where the JSON value that begins a growing text ends, reading every character once."""

    def __init__(self) -> None:
        self._at = self._depth = 0
        self._quoted = self._escaped = False

    def find(self, text: str) -> int | None:
        """Index behind the object or list that ``text`` begins with; None while it is not whole."""
        while self._at < len(text):
            char = text[self._at]
            self._at += 1
            if self._quoted:
                if self._escaped:
                    self._escaped = False
                elif char == "\\":
                    self._escaped = True
                elif char == '"':
                    self._quoted = False
            elif char == '"':
                self._quoted = True
            elif char in "{[":
                self._depth += 1
            elif char in "}]":
                self._depth -= 1
                if self._depth <= 0:
                    return self._at
        return None


class ToolParser:
    """Tells calls from text.

    Args:
        family: How the model writes its calls, see :func:`~foredraft.server.tools.family_of`.
        names: Tools that were offered.
    """

    def __init__(self, family: Family, names: Collection[str]) -> None:
        self._family = family
        self._open = OPENING[family]
        self._names = frozenset(names)
        self._rest = ""  # not yet decided
        self._state: Literal["text", "call", "close", "plain"] = "call" if family == "bare" else "text"
        self._opened = ""  # the marker as it stood, to be delivered if no call follows
        self._end = JsonEnd()
        self._blank = ""  # blank space that a call may swallow
        self._after_call = False

    def push(self, text: str) -> list[Event]:
        """What is certain after more text."""
        self._rest += text
        return self._run(final=False)

    def finish(self) -> list[Event]:
        """What is left at the end of the text."""
        events = self._run(final=True)
        rest, self._rest = self._opened + self._rest, ""
        events += self._text(rest)
        if self._blank and not self._after_call:
            events.append(self._blank)
        self._blank = ""
        return _joined(events)

    def _run(self, final: bool) -> list[Event]:
        events: list[Event] = []
        while True:
            before = self._state, self._rest
            events += getattr(self, f"_in_{self._state}")(final)
            if (self._state, self._rest) == before:
                return _joined(events)

    def _in_plain(self, final: bool) -> list[Event]:
        text, self._rest = self._rest, ""
        return self._text(text)

    def _in_text(self, final: bool) -> list[Event]:
        at = self._rest.find(self._open)
        if at < 0:
            held = 0 if final else _overlap(self._rest, self._open)
            text, self._rest = self._rest[: len(self._rest) - held], self._rest[len(self._rest) - held :]
            return self._text(text)
        text, self._rest = self._rest[:at], self._rest[at + len(self._open) :]
        self._begin(self._open)
        return self._text(text)

    def _begin(self, opened: str) -> None:
        self._state, self._opened, self._end = "call", opened, JsonEnd()

    def _in_call(self, final: bool) -> list[Event]:
        """Behind the marker: blank space, then a call or a list of calls."""
        body = self._rest.lstrip()
        if self._family == "bare" and not self._opened and self._open.startswith(body[: len(self._open)]):
            if len(body) < len(self._open):
                return []
            self._opened, self._rest = self._rest[: -len(body)] + self._open, body[len(self._open) :]
            return []
        if not body:
            return []
        blank, self._rest = self._rest[: len(self._rest) - len(body)], body
        self._opened += blank
        if self._family == "mistral" and body[0] not in "[{":
            return self._named()
        if body[0] not in "{[":
            return self._no_call()
        end = self._end.find(body)
        if end is None:
            return []
        calls = self._calls(body[:end])
        if not calls:
            return self._no_call()
        return self._accept(calls, end)

    def _named(self) -> list[Event]:
        """``name{…}``: the end of the arguments is looked for behind the name."""
        found = _NAMED.match(self._rest)
        if found is None:
            undecided = "{" not in self._rest and len(self._rest) < _LONGEST_NAME and self._open not in self._rest
            return [] if undecided else self._no_call()
        end = JsonEnd().find(self._rest[found.end() :])
        if end is None:
            return []
        arguments = _parsed(self._rest[found.end() : found.end() + end])
        if found[1] not in self._names or not isinstance(arguments, dict):
            return self._no_call()
        return self._accept([ToolCall(found[1], _text_of(arguments))], found.end() + end)

    def _accept(self, calls: list[ToolCall], end: int) -> list[Event]:
        self._rest, self._opened, self._blank, self._after_call = self._rest[end:], "", "", True
        self._state = "text" if self._family == "mistral" else "close"
        return list(calls)

    def _no_call(self) -> list[Event]:
        """The marker was none: it and what follows are text."""
        opened, self._opened = self._opened, ""
        self._state = "plain" if self._family == "bare" else "text"
        return self._text(opened)

    def _in_close(self, final: bool) -> list[Event]:
        """Behind a call: the closing tag, or what parts it from the next."""
        body = self._rest.lstrip()
        if self._family == "bare":
            if not body:
                return []
            if body[0] in ";,":
                self._rest = body[1:]
                self._begin(body[0])
            else:
                self._state = "plain"
            return []
        if body.startswith(CLOSING):
            self._rest, self._state = body[len(CLOSING) :], "text"
        elif final or not CLOSING.startswith(body):
            self._state = "text"  # a model that forgets the tag has called all the same
        return []

    def _calls(self, text: str) -> list[ToolCall]:
        """The calls that a JSON text holds; none if anything in it is no call."""
        value = _parsed(text)
        entries = value if isinstance(value, list) else [value]
        calls = []
        for entry in entries:
            if not isinstance(entry, dict) or entry.get("name") not in self._names:
                return []
            arguments = entry.get("arguments", entry.get("parameters", {}))
            if isinstance(arguments, str):
                arguments = _parsed(arguments)
            if not isinstance(arguments, dict):
                return []
            calls.append(ToolCall(entry["name"], _text_of(arguments)))
        return calls

    def _text(self, text: str) -> list[Event]:
        """Text on its way out: blank space beside a call belongs to the call."""
        if self._after_call:
            text = text.lstrip()
            self._after_call = not text
        text = self._blank + text
        kept = text.rstrip()
        self._blank = text[len(kept) :]
        return [kept] if kept else []


def _parsed(text: str) -> Any:
    try:
        return json.loads(text, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return None


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is not JSON")


def _text_of(arguments: dict[str, Any]) -> str:
    return json.dumps(arguments, ensure_ascii=False)


def _overlap(text: str, marker: str) -> int:
    """Length of the longest end of ``text`` that begins ``marker``."""
    return next((n for n in range(min(len(text), len(marker) - 1), 0, -1) if text.endswith(marker[:n])), 0)


def _joined(events: list[Event]) -> list[Event]:
    """Neighbouring texts as one."""
    joined: list[Event] = []
    for event in events:
        if isinstance(event, str) and joined and isinstance(joined[-1], str):
            joined[-1] += event
        else:
            joined.append(event)
    return joined
