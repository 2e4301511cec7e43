"""Tools from the request to the answer: prompt, grammar, visible markers, OpenAI's shapes."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest
from grammar_support import TOKENIZER, V, writer
from rig import chain
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers

from foredraft import Engine, SamplingParams
from foredraft.drafters.model import ModelDrafter
from foredraft.engine.result import StreamToken
from foredraft.engine.structures import Structures
from foredraft.errors import ConfigError
from foredraft.models.catalog import resolve
from foredraft.models.tokenizer import Tokenizer
from foredraft.server.tool_parser import ToolCall, ToolParser
from foredraft.server.tools import Tools, call_deltas, call_object, family_of, structured_fields
from foredraft.testing import TableModel


def tool(name: str, strict: bool = False, **properties: Any) -> dict[str, Any]:
    parameters = {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }
    return {"type": "function", "function": {"name": name, "parameters": parameters, "strict": strict}}


WEATHER = tool("fetch", city={"enum": ["paris", "rom"]}, days={"type": "integer", "maximum": 99})
CLOCK = tool("time")
FAMILIES = ("tagged", "mistral", "bare")


def tools(choice: Any = "auto", *entries: dict[str, Any], parallel: bool = True, family: str = "tagged") -> Tools:
    made = Tools.of(entries or (WEATHER, CLOCK), choice, parallel, TOKENIZER)
    return dataclasses.replace(made, family=family)  # type: ignore[arg-type]


def admits(asked: Tools, text: str) -> bool:
    """Whether the grammar admits the whole text and lets it end."""
    characters = byte_tokenizer()
    grammar = Structures(characters, 256).grammar(asked.constrain(SamplingParams()), frozenset())
    assert grammar is not None
    ids = characters.encode(text, special=False)
    if grammar.admitted(ids) < len(ids):
        return False
    grammar.commit(ids)
    return grammar.ended() or grammar._matcher.is_accepting()


def byte_tokenizer() -> Tokenizer:
    names = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Backend(models.BPE(vocab={name: i for i, name in enumerate(names)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    return Tokenizer(backend)


CALL = {
    "tagged": '<tool_call>\n{"name": "fetch", "arguments": {"city": "rom", "days": 3}}\n</tool_call>',
    "mistral": '[TOOL_CALLS][{"name": "fetch", "arguments": {"city": "rom", "days": 3}}]',
    "bare": '{"name": "fetch", "parameters": {"city": "rom", "days": 3}}',
}
TIME = {
    "tagged": '<tool_call>\n{"name": "time", "arguments": {}}\n</tool_call>',
    "mistral": '[TOOL_CALLS][{"name": "time", "arguments": {}}]',
    "bare": '{"name": "time", "parameters": {}}',
}
TWO = {
    "tagged": f"{CALL['tagged']}\n{TIME['tagged']}",
    "mistral": f"{CALL['mistral'][:-1]}, {TIME['mistral'][13:]}",
    "bare": f"{CALL['bare']}; {TIME['bare']}",
}


@pytest.mark.parametrize("family", FAMILIES)
def test_a_required_call_is_all_that_can_be_written(family: str) -> None:
    asked = tools("required", family=family)
    for text in (CALL[family], TIME[family], TWO[family]):
        assert admits(asked, text), text
        calls = parse_with(asked, text)
        assert all(isinstance(call, ToolCall) for call in calls)
        assert len(calls) == (2 if text == TWO[family] else 1)
    for wrong in ("no", CALL[family].replace("rom", "bonn"), CALL[family].replace("fetch", "time"), CALL[family] + "x"):
        assert not admits(asked, wrong), wrong
    assert not admits(tools("required", parallel=False, family=family), TWO[family])


def parse_with(asked: Tools, text: str) -> list[Any]:
    parser = asked.parser()
    assert isinstance(parser, ToolParser)
    return parser.push(text) + parser.finish()


@pytest.mark.parametrize("family", FAMILIES)
def test_a_named_tool_is_the_only_one(family: str) -> None:
    asked = tools({"type": "function", "function": {"name": "time"}}, family=family)
    assert admits(asked, TIME[family])
    assert not admits(asked, CALL[family])
    assert not admits(asked, TWO[family])


def test_auto_leaves_the_text_alone_unless_a_tool_is_strict() -> None:
    params = SamplingParams(max_tokens=3)
    assert tools().constrain(params) is params
    strict = tools("auto", tool("fetch", strict=True, city={"enum": ["rom"]}))
    good = '<tool_call>{"name": "fetch", "arguments": {"city": "rom"}}</tool_call>'
    assert admits(strict, f"Well. {good} and {good} so")
    assert admits(strict, "No call.")
    assert not admits(strict, good.replace("rom", "bonn"))
    mistral = dataclasses.replace(strict, family="mistral")
    assert admits(mistral, 'Well. [TOOL_CALLS][{"name": "fetch", "arguments": {"city": "rom"}}]')
    assert not admits(mistral, 'Well. [TOOL_CALLS][{"name": "fetch", "arguments": {"city": "bonn"}}]')


def test_references_inside_a_tools_schema_still_lead_somewhere() -> None:
    entry = tool("fetch", place={"$ref": "#/$defs/Place"})
    entry["function"]["parameters"]["$defs"] = {"Place": {"enum": ["home", "sea"]}}
    asked = tools("required", entry, CLOCK)
    assert admits(asked, '<tool_call>\n{"name": "fetch", "arguments": {"place": "sea"}}\n</tool_call>')
    assert not admits(asked, '<tool_call>\n{"name": "fetch", "arguments": {"place": "pub"}}\n</tool_call>')


def test_none_offers_nothing() -> None:
    asked = tools("none")
    assert asked.parser() is None
    assert asked.constrain(SamplingParams(regex="a")).regex == "a"
    assert asked.prompt([{"role": "user", "content": "hi"}]) == ([{"role": "user", "content": "hi"}], {})


def test_the_engine_writes_required_calls_with_the_text_of_plain_decoding() -> None:
    params = tools("required", parallel=False).constrain(SamplingParams(max_tokens=150))
    [plain] = Engine(target=writer(0)).generate([[3, 1]], params)
    drafter = ModelDrafter(TableModel(chain(5, V), V))
    [drafted] = Engine(target=writer(0), drafter=drafter, k=4).generate([[3, 1]], params)
    assert drafted.token_ids == plain.token_ids
    [call] = parse_with(tools(), plain.text)
    assert isinstance(call, ToolCall)


def with_template(source: str) -> Tokenizer:
    return Tokenizer(TOKENIZER.backend, chat_template=source)


def test_families_are_told_by_the_template() -> None:
    assert family_of(with_template("{{ tools }} <tool_call>")) == "tagged"
    assert family_of(with_template("[AVAILABLE_TOOLS] {{ tools }} [TOOL_CALLS]")) == "mistral"
    assert family_of(with_template("{{ tools }} <|python_tag|>")) == "bare"
    assert family_of(with_template("{{ messages }}")) == "tagged"


HISTORY = [
    {"role": "user", "content": "Time?"},
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"id": "c", "type": "function", "function": {"name": "time", "arguments": '{"tz": "utc"}'}}],
    },
    {"role": "tool", "tool_call_id": "c", "content": "noon"},
]


def test_templates_that_know_tools_are_given_them() -> None:
    asked = Tools.of(
        [CLOCK], "auto", True, with_template("{% for tool in tools %}{{ tool.function.name }}{% endfor %}")
    )
    messages, variables = asked.prompt(HISTORY)
    assert variables == {"tools": [CLOCK]}
    assert messages[1]["tool_calls"][0]["function"]["arguments"] == {"tz": "utc"}
    assert HISTORY[1]["tool_calls"][0]["function"]["arguments"] == '{"tz": "utc"}'
    assert messages[2] == HISTORY[2]


def test_other_models_are_told_in_words() -> None:
    asked = Tools.of([CLOCK], "auto", True, with_template("{{ messages }}"))
    messages, variables = asked.prompt(HISTORY)
    assert variables == {}
    assert [message["role"] for message in messages] == ["system", "user", "assistant", "user"]
    assert json.dumps(CLOCK) in messages[0]["content"]
    assert messages[2]["content"] == '<tool_call>\n{"name": "time", "arguments": {"tz": "utc"}}\n</tool_call>'
    assert "noon" in messages[3]["content"]
    kept, _ = asked.prompt([{"role": "system", "content": "Be brief."}, *HISTORY])
    assert kept[0]["content"].startswith("Be brief.\n\n")
    assert len(kept) == 4


def test_markers_that_are_special_tokens_become_visible() -> None:
    asked = dataclasses.replace(tools(), special={7: "[TOOL_CALLS]"})
    pieces = [StreamToken(1, "plain", "So"), StreamToken(7, "accepted", ""), StreamToken(2, "bonus", "[")]
    assert asked.visible("So[{", pieces) == "So[TOOL_CALLS][{"
    assert asked.visible("So", pieces[:1]) == "So"


def test_openai_shapes() -> None:
    call = ToolCall("fetch", '{"city": "rom"}')
    function = {"name": "fetch", "arguments": '{"city": "rom"}'}
    assert call_object(call, "r7", 1) == {"id": "call_r7_1", "type": "function", "function": function}
    first, second = call_deltas(call, "r7", 1)
    opening = {"name": "fetch", "arguments": ""}
    assert first == {"index": 1, "id": "call_r7_1", "type": "function", "function": opening}
    assert second == {"index": 1, "function": {"arguments": '{"city": "rom"}'}}


def test_response_format() -> None:
    schema = {"type": "object"}
    assert structured_fields(None) == structured_fields({"type": "text"}) == {}
    assert structured_fields({"type": "json_object"}) == {"json_object": True}
    named = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema, "strict": True}}
    assert structured_fields(named) == {"json_schema": schema}
    for wrong in ({"type": "xml"}, {"type": "json_schema"}, {"type": "json_object", "schema": {}}):
        with pytest.raises(ConfigError, match="response_format"):
            structured_fields(wrong)


@pytest.mark.parametrize(
    ("entries", "choice", "field"),
    [
        ([{"type": "retrieval"}], "auto", "tools.0"),
        ([CLOCK, {"type": "function", "function": {"name": "a b"}}], "auto", "tools.1.function.name"),
        ([{"type": "function", "function": {"name": "a", "code": 1}}], "auto", "tools.0.function.code"),
        ([{"type": "function", "function": {"name": "a", "parameters": 3}}], "auto", "tools.0.function.parameters"),
        ([CLOCK, CLOCK], "auto", "tools"),
        ([], "required", "tool_choice"),
        ([CLOCK], "sometimes", "tool_choice"),
        ([CLOCK], {"type": "function", "function": {"name": "fetch"}}, "tool_choice"),
    ],
)
def test_what_makes_no_sense_is_refused_by_name(entries: list[Any], choice: Any, field: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Tools.of(entries, choice, None, TOKENIZER)
    assert caught.value.field == field


def test_two_structures_are_refused() -> None:
    with pytest.raises(ConfigError) as caught:
        tools("required").constrain(SamplingParams(json_object=True))
    assert caught.value.field == "tools"


@pytest.mark.real_model
@pytest.mark.skipif(resolve("smollm2-135m") is None, reason="run: foredraft models fetch smollm2-135m")
def test_the_real_model_calls_a_tool() -> None:
    engine = Engine("smollm2-135m", drafter="lookup", k=4)
    assert engine.tokenizer is not None
    asked = Tools.of([WEATHER, CLOCK], "required", False, engine.tokenizer)
    messages, variables = asked.prompt([{"role": "user", "content": "Weather in Rome for two days?"}])
    prompt = engine.tokenizer.chat(messages, **variables)
    [result] = engine.generate([prompt], asked.constrain(SamplingParams(max_tokens=60)))
    [call] = parse_with(asked, result.text)
    assert isinstance(call, ToolCall)
    assert call.name in ("fetch", "time")
    assert set(json.loads(call.arguments)) in ({"city", "days"}, set())
