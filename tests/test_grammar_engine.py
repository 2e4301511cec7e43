"""Structured requests through the engine: the text of plain decoding, whatever drafts, and failures that stay alone."""

from __future__ import annotations

import functools
import json
import re

import pytest
from grammar_support import EOS, PROMPT, TOKENIZER, V, writer
from rig import chain

from foredraft import Engine, SamplingParams, SpeculationConfig
from foredraft.drafters.lookup import LookupDrafter
from foredraft.drafters.model import ModelDrafter
from foredraft.engine.controller import Acceptance
from foredraft.errors import ConfigError, NumericalError, RequestFailedError
from foredraft.models.catalog import resolve
from foredraft.testing import ScriptedDrafter, TableModel

SCHEMA = {
    "type": "object",
    "properties": {
        "ab": {"type": "integer", "maximum": 9999},
        "list": {"type": "array", "items": {"enum": [True, "ab", "bad"]}, "minItems": 2, "maxItems": 5},
    },
    "required": ["ab", "list"],
    "additionalProperties": False,
}
STRUCTURES = {
    "schema": {"json_schema": SCHEMA},
    "regex": {"regex": "(ab|tru(e|th)|[0-9]{2,6} )+;|x{3,}"},
    "grammar": {"grammar": 'start: pair+\npair: "<" /[a-f]+/ ("=" /[0-9]/)? ">"'},
    "after": {"json_schema": SCHEMA, "structured_after": "{"},
    "again": {"regex": "[0-9]{1,4}", "structured_after": "<", "structured_until": "/"},
}
DRAFTERS = {
    "lookup": lambda: LookupDrafter(3, 1),
    "model": lambda: ModelDrafter(TableModel(chain(7, V), V)),
    "same": lambda: ModelDrafter(TableModel(chain(0, V), V)),
    "wild": lambda: ScriptedDrafter(lambda prefix, k: [(7 * len(prefix) + 5 * i) % V for i in range(k)]),
    "fond": lambda: ScriptedDrafter(lambda prefix, k: TOKENIZER.encode('"list":["ab","ab"]}')[:k]),
}


def run(drafter: str | None, k: int, params: SamplingParams):
    engine = Engine(target=writer(0), drafter=DRAFTERS[drafter]() if drafter else None, k=k)
    [result] = engine.generate([PROMPT], params)
    return result


@functools.cache
def plain(structure: str, **controls: object):
    return run(None, 0, SamplingParams(max_tokens=40, **STRUCTURES[structure], **controls))


def keeps(structure: str, text: str, finished: bool) -> bool:
    """Whether a finished text has the structure, by other code than the library's."""
    if not finished:
        return True
    if structure == "again":
        return all(re.match("[0-9]{1,4}/", part) for part in text.split("<")[1:])
    if structure == "after":
        text = text[text.index("{") + 1 :]
    if structure in ("schema", "after"):
        value = json.loads(text)
        return set(value) == {"ab", "list"} and value["ab"] <= 9999 and set(value["list"]) <= {True, "ab", "bad"}
    pattern = STRUCTURES["regex"]["regex"] if structure == "regex" else "(<[a-f]+(=[0-9])?>)+"
    return re.fullmatch(pattern, text) is not None


@pytest.mark.parametrize("structure", STRUCTURES)
@pytest.mark.parametrize("drafter", DRAFTERS)
def test_greedy_text_is_plain_decodings(structure: str, drafter: str) -> None:
    wanted = plain(structure)
    assert keeps(structure, wanted.text, wanted.finish_reason == "stop")
    for k in range(9):
        got = run(drafter, k, SamplingParams(max_tokens=40, **STRUCTURES[structure]))
        assert (got.token_ids, got.text, got.finish_reason) == (wanted.token_ids, wanted.text, wanted.finish_reason)
        assert (got.stats.num_draft_tokens > 0) == (k > 0)


@pytest.mark.parametrize("structure", STRUCTURES)
@pytest.mark.parametrize("drafter", ["lookup", "model", "wild"])
def test_seeded_text_is_plain_decodings(structure: str, drafter: str) -> None:
    for seed in range(2):
        controls = {"temperature": 1.0, "top_p": 0.95, "seed": seed}
        wanted = plain(structure, **controls)
        assert keeps(structure, wanted.text, wanted.finish_reason == "stop")
        for k in (1, 4):
            got = run(drafter, k, SamplingParams(max_tokens=40, **STRUCTURES[structure], **controls))
            assert got.token_ids == wanted.token_ids


@pytest.mark.parametrize("verify", ["block", "rejection"])
@pytest.mark.parametrize("drafter", ["model", "wild", "fond"])
def test_every_text_has_the_structure_at_any_temperature(verify: str, drafter: str) -> None:
    engine = Engine(target=writer(0), drafter=DRAFTERS[drafter](), k=4, verify=verify)
    for structure in STRUCTURES:
        params = [SamplingParams(max_tokens=25, temperature=1.3, seed=n, **STRUCTURES[structure]) for n in range(2)]
        for result in engine.generate([PROMPT] * 2, params):
            assert keeps(structure, result.text, result.finish_reason == "stop"), result.text


def test_the_text_ends_with_the_structure() -> None:
    """No end token is written, or needed, where nothing may follow."""
    result = plain("schema")
    assert result.finish_reason == "stop"
    assert EOS not in result.token_ids
    assert result.text.endswith("}")
    deaf = run("same", 4, SamplingParams(max_tokens=40, ignore_eos=True, **STRUCTURES["schema"]))
    assert deaf.token_ids == result.token_ids


def test_an_end_token_only_where_the_text_is_complete() -> None:
    eager = lambda prefix: [9.0 if token == EOS else float(-token % 7) for token in range(V)]  # noqa: E731
    [result] = Engine(target=writer(logits=eager)).generate([PROMPT], SamplingParams(max_tokens=9, regex="ab[0-9]*"))
    assert (result.text, result.token_ids[-1], result.finish_reason) == ("ab", EOS, "stop")


def test_forced_tokens_save_passes_and_are_not_the_drafters_merit() -> None:
    silent = ScriptedDrafter(lambda prefix, k: [])
    params = SamplingParams(max_tokens=40, regex="[ab]<truth-is-abcdefgh>[ab]")
    [wanted] = Engine(target=writer(0)).generate([PROMPT], params)
    engine = Engine(target=writer(0), drafter=silent, k=8)
    request = engine.submit(PROMPT, params)
    while not request.finished:
        engine.step()
    got = request.result(0)
    assert got.token_ids == wanted.token_ids
    assert got.stats.num_steps < wanted.stats.num_steps - 6
    assert request.acceptance == Acceptance()  # as if nothing had been drafted
    off = Engine(target=writer(0), drafter=silent).generate([PROMPT], params, speculation=SpeculationConfig(k=0))
    assert off[0].stats.num_draft_tokens == 0


def test_what_the_grammar_forbids_is_not_verified() -> None:
    """The rows of a pass: nothing is drafted from the first forbidden token on."""
    wild = Engine(target=writer(0), drafter=ScriptedDrafter(lambda prefix, k: [TOKENIZER.encode("x")[0]] * k), k=6)
    [result] = wild.generate([PROMPT], SamplingParams(max_tokens=40, regex="[ab]{30}"))
    assert len(result.text) == 30
    assert result.stats.num_draft_tokens == 0


def test_requests_with_different_grammars_share_a_batch() -> None:
    names = [*STRUCTURES, *STRUCTURES, None]
    fields = [STRUCTURES[name] if name else {} for name in names]
    engine = Engine(target=writer(0), drafter=DRAFTERS["model"](), k=3, max_batch=16)
    params = [SamplingParams(max_tokens=40, **field) for field in fields]
    results = engine.generate([PROMPT] * len(names), params)
    for name, result in zip(names[:-1], results, strict=False):
        assert result.token_ids == plain(name).token_ids
    [free] = Engine(target=writer(0)).generate([PROMPT], SamplingParams(max_tokens=40))
    assert results[-1].token_ids == free.token_ids


@pytest.mark.parametrize("drafter", [None, *DRAFTERS])
def test_a_dead_end_is_the_requests_own(drafter: str | None) -> None:
    """Allowed tokens and grammar leave nothing after two letters; the text before is delivered, others go on."""
    letters = tuple(TOKENIZER.encode("ba"))
    dead = SamplingParams(max_tokens=20, regex="[ab]{2}[0-9]+", allowed_token_ids=letters)
    engine = Engine(target=writer(0), drafter=DRAFTERS[drafter]() if drafter else None, k=4)
    with pytest.raises(RequestFailedError) as caught:
        engine.generate([PROMPT] * 2, [dead, SamplingParams(max_tokens=40, **STRUCTURES["schema"])])
    failed, fine = caught.value.results
    assert isinstance(failed.error, NumericalError)
    assert "allowed_token_ids or regex" in str(failed.error)
    assert len(failed.text) == 2
    assert fine.token_ids == plain("schema").token_ids


def test_refusals_name_the_field() -> None:
    with pytest.raises(ConfigError, match="no tokenizer") as caught:
        Engine(target=TableModel(chain(0), 8)).generate([[1]], SamplingParams(regex="a", max_tokens=2))
    assert caught.value.field == "regex"
    with pytest.raises(ConfigError) as caught:
        run(None, 0, SamplingParams(json_schema={"type": "nothing"}, max_tokens=2))
    assert caught.value.field == "json_schema"


REAL = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 20},
        "age": {"type": "integer", "minimum": 0, "maximum": 130},
        "likes": {"enum": ["tea", "chess", "rain"]},
    },
    "required": ["name", "age", "likes"],
    "additionalProperties": False,
}


@pytest.mark.real_model
@pytest.mark.skipif(resolve("smollm2-135m") is None, reason="run: foredraft models fetch smollm2-135m")
def test_the_real_model_writes_json_as_without_drafts() -> None:
    prompts = ["A person as JSON:\n", "Ada Lovelace as JSON:\n", "My number is "]
    params = [
        SamplingParams(max_tokens=40, json_schema=REAL),
        SamplingParams(max_tokens=40, json_schema=REAL, temperature=0.8, seed=3),
        SamplingParams(max_tokens=20, regex="[0-9]{3}-[0-9]{4}"),
    ]
    wanted = Engine("smollm2-135m").generate(prompts, params)
    got = Engine("smollm2-135m", drafter="lookup", k=4).generate(prompts, params)
    assert [result.token_ids for result in got] == [result.token_ids for result in wanted]
    for result in got[:2]:
        value = json.loads(result.text)
        assert result.finish_reason == "stop"
        assert list(value) == ["name", "age", "likes"]
        assert 0 <= value["age"] <= 130
    assert re.fullmatch("[0-9]{3}-[0-9]{4}", got[2].text)
    assert sum(result.stats.num_accepted_draft_tokens for result in got) > 5
