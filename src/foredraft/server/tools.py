"""Tools of a chat: into the prompt, into a grammar, and out of the answer.

For the chat route::

    tools = Tools.of(body_tools, body_tool_choice, parallel, tokenizer)   # ConfigError names the field
    messages, variables = tools.prompt(messages)                          # then tokenizer.chat(messages, **variables)
    params = tools.constrain(params)
    parser = tools.parser()                                               # None where no call can come
    events = parser.push(tools.visible(piece.text, piece.tokens)); …; parser.finish()

``finish_reason`` is ``tool_calls`` where at least one call came and the reason was ``stop``.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from foredraft.config import SamplingParams
from foredraft.engine.result import StreamToken
from foredraft.errors import ConfigError
from foredraft.models.tokenizer import Tokenizer
from foredraft.server.tool_grammar import calls_grammar, free_calls
from foredraft.server.tool_parser import MARKERS, Family, ToolCall, ToolParser

_NAME = re.compile(r"[a-zA-Z0-9_.-]{1,64}")

INSTRUCTIONS = """\
You may call functions to help with the user's request. These are available, as JSON Schema:
<tools>
{tools}
</tools>
To call one, write a JSON object with its name and arguments between tags, and nothing else:
<tool_call>
{{"name": "function name", "arguments": {{"argument": "value"}}}}
</tool_call>"""
"""Said to models whose chat template does not know tools."""


def family_of(tokenizer: Tokenizer) -> Family:
    """How a model writes its calls, told from its chat template; ``tagged`` where nothing is known."""
    template = tokenizer.chat_template
    if "[TOOL_CALLS]" in template:
        return "mistral"
    if "<tool_call>" not in template and ("<|python_tag|>" in template or '"parameters":' in template):
        return "bare"
    return "tagged"


@dataclass(frozen=True, slots=True)
class Tool:
    """One function that the client offers; ``parameters`` is the JSON Schema of its arguments."""

    name: str
    parameters: dict[str, Any]
    strict: bool
    spec: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Tools:
    """What a chat may call.

    Attributes:
        tools: The offered functions; those that may not be called (``tool_choice`` names another) are left out.
        must_call: The answer has to be a call.
        parallel: It may be several.
        family: How the model writes calls.
        in_template: Whether the model's template shows tools itself.
        special: The model's special tokens among the markers of calls, by id.
    """

    tools: tuple[Tool, ...]
    must_call: bool
    parallel: bool
    family: Family
    in_template: bool
    special: Mapping[int, str]

    @classmethod
    def of(
        cls,
        tools: Sequence[Mapping[str, Any]] | None,
        choice: str | Mapping[str, Any] | None,
        parallel: bool | None,
        tokenizer: Tokenizer,
    ) -> Tools:
        """Reads OpenAI's fields ``tools``, ``tool_choice`` and ``parallel_tool_calls``.

        Raises:
            ConfigError: Named after the field that makes no sense.
        """
        offered = [_tool(entry, i) for i, entry in enumerate(tools or ())]
        names = [tool.name for tool in offered]
        if len(set(names)) < len(names):
            raise ConfigError(f"two functions are called {max(names, key=names.count)!r}", field="tools")
        wanted = _choice(choice, names)
        if wanted == "none":
            offered = []
        elif wanted not in ("auto", "required"):
            offered = [tool for tool in offered if f"={tool.name}" == wanted]
        vocabulary = {marker: tokenizer.backend.token_to_id(marker) for marker in MARKERS}
        special = {id: marker for marker, id in vocabulary.items() if id is not None and tokenizer.is_special(id)}
        return cls(
            tuple(offered),
            bool(offered) and wanted != "auto",
            parallel is not False and not wanted.startswith("="),
            family_of(tokenizer),
            "tools" in tokenizer.chat_variables,
            special,
        )

    def prompt(self, messages: Sequence[Mapping[str, Any]]) -> tuple[list[dict[str, Any]], dict[str, Any]]:
        """Messages and variables for the chat template.

        Calls and results of earlier turns (``tool_calls`` of an assistant, messages of role ``tool``) become what the
        template reads, or text where it knows no tools.

        Returns:
            The messages, and the template's further variables.
        """
        if self.in_template:
            variables = {"tools": [tool.spec for tool in self.tools]} if self.tools else {}
            return [_with_parsed_arguments(message) for message in messages], variables
        plain = [_as_text(message) for message in messages]
        if self.tools:
            listed = "\n".join(json.dumps(tool.spec, ensure_ascii=False) for tool in self.tools)
            said = INSTRUCTIONS.format(tools=listed)
            if plain and plain[0]["role"] == "system":
                plain[0] = {**plain[0], "content": f"{plain[0]['content']}\n\n{said}"}
            else:
                plain.insert(0, {"role": "system", "content": said})
        return plain, {}

    def constrain(self, params: SamplingParams) -> SamplingParams:
        """Adds the grammar of calls, where the answer must be one or a tool is ``strict``.

        Raises:
            ConfigError: The request asks for another structure as well.
        """
        if self.must_call:
            fields: dict[str, Any] = {"grammar": calls_grammar(self)}
        elif any(tool.strict for tool in self.tools) and self.family != "bare":
            fields = free_calls(self)
        else:
            return params
        if params.structured_field is not None:
            raise ConfigError(f"cannot be joined with {params.structured_field}", field="tools")
        return params.model_copy(update=fields)

    def parser(self) -> ToolParser | None:
        """A fresh parser for one answer; None where no tool is offered."""
        return ToolParser(self.family, [tool.name for tool in self.tools]) if self.tools else None

    def visible(self, text: str, tokens: Sequence[StreamToken]) -> str:
        """A piece's text with the markers that are special tokens, which its text leaves out."""
        if not any(token.id in self.special for token in tokens):
            return text
        spelled = "".join(self.special.get(token.id, "") + token.text for token in tokens)
        return spelled + text[sum(len(token.text) for token in tokens) :]


def call_object(call: ToolCall, request_id: str, index: int) -> dict[str, Any]:
    """A call as ``message.tool_calls`` holds it."""
    function = {"name": call.name, "arguments": call.arguments}
    return {"id": f"call_{request_id}_{index}", "type": "function", "function": function}


def call_deltas(call: ToolCall, request_id: str, index: int) -> list[dict[str, Any]]:
    """A call as a stream's ``delta.tool_calls`` holds it: first its name, then its arguments."""
    whole = call_object(call, request_id, index)
    opening = {**whole, "index": index, "function": {"name": call.name, "arguments": ""}}
    return [opening, {"index": index, "function": {"arguments": call.arguments}}]


def structured_fields(response_format: Mapping[str, Any] | None) -> dict[str, Any]:
    """OpenAI's ``response_format`` as fields of :class:`~foredraft.config.SamplingParams`.

    Raises:
        ConfigError: It is not one of ``text``, ``json_object`` and ``json_schema``.
    """
    if response_format is None or response_format.get("type") == "text":
        return {}
    kind, keys = response_format.get("type"), set(response_format)
    if kind == "json_object" and keys == {"type"}:
        return {"json_object": True}
    wrapped = response_format.get("json_schema")
    if kind == "json_schema" and keys == {"type", "json_schema"} and isinstance(wrapped, Mapping):
        if unknown := sorted(set(wrapped) - {"name", "description", "schema", "strict"}):
            raise ConfigError("unknown field", field=f"response_format.json_schema.{unknown[0]}")
        if not isinstance(wrapped.get("schema", {}), Mapping):
            raise ConfigError("is no object", field="response_format.json_schema.schema")
        return {"json_schema": dict(wrapped["schema"])} if "schema" in wrapped else {"json_object": True}
    raise ConfigError(
        f"{kind!r:.80} is not understood",
        field="response_format",
        remedy='its type is text, json_object, or json_schema with {"schema": …} under json_schema',
    )


def _tool(entry: Mapping[str, Any], i: int) -> Tool:
    field = f"tools.{i}"
    function = entry.get("function")
    if entry.get("type") != "function" or set(entry) != {"type", "function"} or not isinstance(function, Mapping):
        raise ConfigError('must be {"type": "function", "function": {…}}', field=field)
    if unknown := sorted(set(function) - {"name", "description", "parameters", "strict"}):
        raise ConfigError("unknown field", field=f"{field}.function.{unknown[0]}")
    name, parameters = function.get("name"), function.get("parameters") or {"type": "object"}
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise ConfigError(
            "must be 1 to 64 letters, digits, dots, dashes or underscores", field=f"{field}.function.name"
        )
    if not isinstance(parameters, Mapping):
        raise ConfigError("must be a JSON Schema", field=f"{field}.function.parameters")
    return Tool(name, dict(parameters), bool(function.get("strict")), dict(entry))


def _choice(choice: str | Mapping[str, Any] | None, names: Sequence[str]) -> str:
    """``auto``, ``none``, ``required``, or ``=NAME``."""
    if choice is None or choice in ("auto", "none"):
        return choice if isinstance(choice, str) else "auto"
    if not names:
        raise ConfigError("no tools are offered", field="tool_choice")
    if choice == "required":
        return "required"
    function = choice.get("function") if isinstance(choice, Mapping) and choice.get("type") == "function" else None
    if not isinstance(function, Mapping) or function.get("name") not in names:
        raise ConfigError(
            f"is none of auto, none, required and the offered functions (got {choice!r:.80})", field="tool_choice"
        )
    return f"={function['name']}"


def _with_parsed_arguments(message: Mapping[str, Any]) -> dict[str, Any]:
    """Templates write arguments as objects; clients send them as text."""
    calls = message.get("tool_calls")
    if not calls:
        return dict(message)
    parsed = [{**call, "function": {**call["function"], "arguments": _arguments(call)}} for call in calls]
    return {**message, "content": message.get("content") or "", "tool_calls": parsed}


def _arguments(call: Mapping[str, Any]) -> Any:
    arguments = call["function"]["arguments"]
    try:
        return json.loads(arguments) if isinstance(arguments, str) else arguments
    except ValueError:
        raise ConfigError("the arguments of an earlier call are not JSON", field="messages") from None


def _as_text(message: Mapping[str, Any]) -> dict[str, Any]:
    content = message.get("content") or ""
    if message.get("role") == "tool":
        return {"role": "user", "content": f"<tool_response>\n{content}\n</tool_response>"}
    parts = [content] if content else []
    for call in message.get("tool_calls") or ():
        body = {"name": call["function"]["name"], "arguments": _arguments(call)}
        parts.append(f"<tool_call>\n{json.dumps(body, ensure_ascii=False)}\n</tool_call>")
    return {"role": message["role"], "content": "\n".join(parts)}
