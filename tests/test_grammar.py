"""Masks of grammars, against sets of strings that are written out, and the law of the output under them."""

from __future__ import annotations

import itertools
import json
import math
import re
import time
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from llguidance import LLParserLimits

from foredraft.config import SamplingParams
from foredraft.engine.forced import fit_to_grammar, own_verdict
from foredraft.errors import ConfigError, NumericalError
from foredraft.grammar import Grammar, GrammarVocabulary, structure_of
from foredraft.sampling import TokenLaw
from foredraft.testing.law import exact_law, law_of_drafts, plain_law
from foredraft.types import Draft, Verdict

TOKENS = [b"a", b"b", b"ab", b"</s>"]
V, EOS = len(TOKENS), 3
VOCABULARY = GrammarVocabulary(TOKENS, special=[EOS])
REGEX = "(ab|b)(a|bb)?"
TEXTS = {"ab", "b", "aba", "abbb", "ba", "bbb"}


def grammar(
    vocabulary: GrammarVocabulary = VOCABULARY, width: int = V, ends: tuple[int, ...] = (EOS,), **fields: object
):
    structure = structure_of(SamplingParams(**fields), vocabulary.names)
    assert structure is not None
    return Grammar(structure, vocabulary, width, frozenset(ends))


def reference(path: tuple[int, ...]) -> list[bool] | None:
    """Which tokens may follow ``path``, from the written-out set of texts."""
    if EOS in path:
        return None
    text = "".join(TOKENS[token].decode() for token in path)
    if not any(whole.startswith(text) for whole in TEXTS):
        return None
    ok = [any(whole.startswith(text + TOKENS[t].decode()) for whole in TEXTS) for t in range(EOS)]
    return [*ok, text in TEXTS]


PATHS = [path for n in range(5) for path in itertools.product(range(V), repeat=n)]


def test_masks_are_those_of_the_set_of_texts() -> None:
    asked = grammar(regex=REGEX)
    for path in PATHS:
        banned, wanted = asked.banned(path), reference(path)
        assert (banned is None) == (wanted is None), path
        if banned is not None and wanted is not None:
            assert list(~banned) == wanted, path


@settings(deadline=None, max_examples=60)
@given(st.lists(st.sampled_from(PATHS), min_size=1, max_size=12), st.integers(0, 3))
def test_masks_do_not_depend_on_what_was_asked_before(paths: list[tuple[int, ...]], commits: int) -> None:
    """Any order of paths, as of a tree's branches, with commits between: nothing is left of what was looked at."""
    asked, text = grammar(regex=REGEX), ()
    for i, path in enumerate(paths):
        banned, wanted = asked.banned(path), reference(text + path)
        assert (None if banned is None else list(~banned)) == wanted
        if i < commits and wanted is not None and EOS not in path:
            asked.commit(path)
            text += path
    assert asked.ended() == ((reference(text) or [True])[:EOS] == [False] * EOS)


P = torch.tensor([0.3, 0.2, 0.4, 0.1], dtype=torch.float64)


def law(row: torch.Tensor, **controls: object):
    """Prefix -> law of the next token: the engine's own function of logits that depend on the prefix."""
    params = SamplingParams(temperature=1.0, regex=REGEX, **controls)
    token_law = TokenLaw(params, [0], V, eos_ids=frozenset({EOS}), grammar=grammar(regex=REGEX))

    @cache
    def of(prefix: tuple[int, ...]) -> torch.Tensor:
        if reference(prefix) is None or not any(reference(prefix)):  # the text is over
            return torch.nn.functional.one_hot(torch.tensor(EOS), V).double()
        return token_law.probs(row.roll(sum(prefix) % 3).log()[None], [prefix])[0]

    return of


def by_hand(prefix: tuple[int, ...]) -> torch.Tensor:
    """The same law, from the set of texts."""
    allowed = reference(prefix)
    if allowed is None or not any(allowed):
        return torch.nn.functional.one_hot(torch.tensor(EOS), V).double()
    row = P.roll(sum(prefix) % 3) * torch.tensor(allowed)
    return row / row.sum()


@pytest.mark.parametrize("rule", ["rejection", "block", "coupled"])
def test_the_law_is_the_targets_under_the_grammar(rule: str) -> None:
    p, q = law(P), law(P.flip(0))
    wanted = plain_law(by_hand, 3)
    assert torch.allclose(plain_law(p, 3), wanted, rtol=0, atol=1e-12)
    for k in (1, 2, 3):
        assert torch.allclose(exact_law(rule, p, q, k, 3), wanted, rtol=0, atol=1e-12)


def test_an_unmasked_draft_position_would_show() -> None:
    """Negative control: were the rows after the first not masked, the law would be another."""
    p, q = law(P), law(P.flip(0))
    wrong = lambda prefix: p(prefix) if not prefix else P.roll(sum(prefix) % 3)  # noqa: E731
    error = (exact_law("block", wrong, q, 2, 3) - plain_law(by_hand, 3)).abs().max()
    assert error > 0.01


@pytest.mark.parametrize("rule", ["rejection", "block", "coupled"])
@pytest.mark.parametrize("tokens", [(), (0,), (1, 2, 0), (2, 2), (0, 1, 1)])
def test_forced_and_cut_drafts_keep_the_law(rule: str, tokens: tuple[int, ...]) -> None:
    """Drafts that were not sampled are cut and continued; the sum over every outcome is still the target's law."""
    p = law(P)

    def drafts(prefix: tuple[int, ...]) -> list[tuple[Draft, float]]:
        if reference(prefix) is None:
            return [(Draft(), 1.0)]
        asked = grammar(forcing(), regex=REGEX)
        asked.commit(prefix)
        return [(fit_to_grammar(Draft(tokens), asked, 3)[0], 1.0)]

    assert torch.allclose(law_of_drafts(rule, p, drafts, 3), plain_law(by_hand, 3), rtol=0, atol=1e-12)


@cache
def forcing() -> GrammarVocabulary:
    """A vocabulary that can spell what is forced."""

    def encode(text: str) -> list[int]:
        return [TOKENS.index(piece.encode()) for piece in re.findall("ab|a|b", text)]

    return GrammarVocabulary(TOKENS, special=[EOS], encode=encode)


def test_forced_tokens_follow_the_draft() -> None:
    asked = grammar(forcing(), regex="a(a|b)abab")
    assert asked.forced((), 9) == []  # an a must come, but the model may rather write ab
    assert asked.forced((0, 1), 9) == [2, 2]
    assert fit_to_grammar(Draft((0, 1)), asked, 9) == (Draft((0, 1, 2, 2)), 2)
    assert fit_to_grammar(Draft((0, 1)), asked, 3) == (Draft((0, 1, 2)), 2)
    assert fit_to_grammar(Draft((0, 1, 1, 0)), asked, 9) == (Draft((0, 1, 2, 2)), 2)  # cut, then forced
    assert fit_to_grammar(Draft((2,)), asked, 9) == (Draft((2, 2, 2)), 1)
    q = torch.full((2, V), 0.25)
    fitted, own = fit_to_grammar(Draft((0, 1), q), asked, 4)
    assert (fitted.tokens, own) == ((0, 1, 2, 2), 2)
    assert fitted.q is not None
    assert fitted.q[:2].equal(q)
    assert fitted.q[2:].tolist() == [[0, 0, 1, 0], [0, 0, 1, 0]]
    tree = Draft((0, 1, 0), parents=(-1, 0, 0))
    assert fit_to_grammar(tree, asked, 9) == (tree, 3)


def test_the_drafter_hears_of_its_own_tokens_only() -> None:
    draft = Draft((5, 6, 7, 8))
    assert own_verdict(Verdict.chain(1, 9, 4), draft, 2) == Verdict.chain(1, 9, 4)
    assert own_verdict(Verdict.chain(4, 9, 4), draft, 2) == Verdict.chain(2, 7, 2)
    assert own_verdict(Verdict.chain(3, 9, 4), draft, 0) == Verdict.chain(0, 5, 0)


def test_a_text_is_over_where_nothing_may_follow() -> None:
    asked = grammar(regex="ab+|b")
    assert asked.ended((1,))
    assert not asked.ended((2,))  # another b may follow
    assert asked.admitted((1, 3)) == 1  # nothing is drafted behind the end
    assert asked.admitted((2, 3, 1)) == 2  # an end token ends the draft
    fixed = TokenLaw(
        SamplingParams(regex="b", min_tokens=2), [0], V, eos_ids=frozenset({EOS}), grammar=grammar(regex="b")
    )
    assert not fixed.ended((1,))  # the request wants two tokens: it fails rather than end too early
    with pytest.raises(NumericalError, match="min_tokens or regex"):
        fixed.argmax(torch.zeros(1, V), [(1,)])


def test_end_tokens_are_the_requests_own() -> None:
    """Without an end token the text goes on; an ordinary stop token is text, so the grammar decides on it."""
    assert list(~grammar(regex="b*", ends=()).banned(())) == [False, True, False, False]
    assert list(~grammar(regex="b*", ends=(EOS, 1)).banned(())) == [False, True, False, True]
    assert list(~grammar(regex="a*", ends=(EOS, 1)).banned(())) == [True, False, False, True]


def test_ids_without_text_are_never_written() -> None:
    vocabulary = GrammarVocabulary([b"a", b"", b"b"])
    assert list(~grammar(vocabulary, 5, (), regex="[ab]+").banned(())) == [True, False, True, False, False]
    assert list(~grammar(vocabulary, 2, (), regex="[ab]+").banned(())) == [True, False]


CHARS = [bytes([byte]) for byte in range(128)]
ASCII = GrammarVocabulary(CHARS)


def spells(text: str, **fields: object) -> tuple[int, bool, bool]:
    """How many characters are admitted; whether the text may end then; whether it must."""
    asked = grammar(ASCII, 129, (), **fields)
    ids = list(text.encode())
    n = asked.admitted(ids)
    asked.commit(ids[:n])
    return n, asked.ended() or asked._matcher.is_accepting(), asked.ended()


def accepts(text: str, **fields: object) -> bool:
    n, complete, _ = spells(text, **fields)
    return n == len(text) and complete


SCHEMA = {
    "type": "object",
    "properties": {"n": {"type": "integer", "minimum": 3}, "tags": {"type": "array", "items": {"enum": ["x", "y"]}}},
    "required": ["n"],
    "additionalProperties": False,
}


@pytest.mark.parametrize("schema", [SCHEMA, json.dumps(SCHEMA)], ids=["data", "text"])
def test_json_schema(schema: object) -> None:
    assert accepts('{"n": 12, "tags": ["x", "y"]}', json_schema=schema)
    assert accepts('{\n    "n": 3\n}', json_schema=schema)
    for wrong in ('{"n": 1}', '{"m": 3}', '{"n": 12, "tags": ["z"]}', "[]", '{"n": "a"}', " {}"):
        assert not accepts(wrong, json_schema=schema), wrong
    assert spells('{"n": 12}', json_schema=schema) == (9, True, True)
    assert spells("{" + " " * 50, json_schema=schema)[0] == 33  # blank space has an end
    assert accepts('"\\u00e9"', json_schema={"type": "string"})
    assert accepts("[1, {}]", json_schema=True)


def test_json_object() -> None:
    assert accepts('{"any": [1, null, {"x": "y"}]}', json_object=True)
    assert not accepts("[1]", json_object=True)


def test_grammars_in_both_notations() -> None:
    lark = 'start: sum\nsum: NUM ("+" NUM)*\nNUM: /[0-9]{1,3}/'
    gbnf = 'root ::= num ("+" num)*\nnum ::= [0-9] [0-9]? [0-9]?'
    for text in (lark, gbnf):
        assert accepts("12+345+6", grammar=text)
        assert not accepts("12+", grammar=text)
        assert not accepts("+", grammar=text)


def test_structure_after_a_marker() -> None:
    fields = {"json_schema": SCHEMA, "structured_after": "</think>"}
    assert accepts('I {"see" <think> it.</think>{"n": 4}', **fields)
    assert accepts('</think>\n\n{"n": 4}', **fields)
    assert not accepts("no marker", **fields)
    assert not accepts('</think>\n{"n": 4} more', **fields)
    assert spells("</think>x", **fields)[0] == len("</think>")
    assert spells('a</think>{"n": 4}', **fields)[2]


def test_structure_between_markers_again_and_again() -> None:
    fields = {"regex": "[0-9]+", "structured_after": "<n>", "structured_until": "</n>"}
    assert accepts("no number at all", **fields)
    assert accepts("one <n>12</n> and <n>3</n>, done </n> [x]", **fields)
    assert not accepts("one <n>x</n>", **fields)
    assert not accepts("one <n>12", **fields)
    assert not accepts("one <n>12</n> and <n></n>", **fields)
    first = {"regex": "[0-9]+", "structured_until": ";"}
    assert accepts("12; and so on", **first)
    assert not accepts("12", **first)


def test_a_special_token_as_marker() -> None:
    vocabulary = GrammarVocabulary([b"a", b"1", b"<|call|>", b"</s>"], special=[2, 3])
    asked = grammar(vocabulary, 4, (3,), regex="1+", structured_after="<|call|>")
    assert list(~asked.banned(())) == [True, True, True, False]
    assert list(~asked.banned((0, 2))) == [False, True, False, False]
    assert list(~asked.banned((0, 2, 1))) == [False, True, False, True]


REFUSED = [
    ("regex", "(", "regex"),
    ("regex", "a(?=b)", "look-around"),
    ("json_schema", {"type": "objekt"}, "objekt"),
    ("json_schema", {"uniqueItems": True, "type": "array"}, "uniqueItems"),
    ("json_schema", {"allOf": [{"type": "string"}, {"type": "integer"}]}, "Unsatisfiable"),
    ("json_schema", {"$ref": "http://example.com/x.json"}, "example.com"),
    ("json_schema", False, "no JSON satisfies it"),
    ("json_schema", {"x-guidance": {"lenient": True}}, "not a keyword"),
    ("grammar", 'start: "a" missing', "missing"),
    ("grammar", 'root ::= "a" (', "cannot be read"),
    ("grammar", "nothing at all", "grammar"),
    ("grammar", "root ::= other", "'other' not found"),
]


@pytest.mark.parametrize(("field", "value", "why"), REFUSED)
def test_what_cannot_be_honoured_is_refused_by_name(field: str, value: object, why: str) -> None:
    with pytest.raises(ConfigError, match=why) as caught:
        grammar(ASCII, 128, (), **{field: value})
    assert caught.value.field == field


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"regex": "a", "json_object": True}, "regex"),
        ({"regex": "a", "grammar": "start: /a/"}, "grammar"),
        ({"structured_after": "x"}, "structured_after"),
        ({"structured_until": "x"}, "structured_until"),
        ({"regex": ""}, "regex"),
        ({"json_schema": "{"}, "json_schema"),
        ({"json_schema": 3}, "json_schema"),
        ({"json_schema": {"const": object()}}, "json_schema"),
    ],
)
def test_fields_that_make_no_sense_together_are_refused(fields: dict[str, object], field: str) -> None:
    with pytest.raises(ConfigError) as caught:
        SamplingParams(**fields)
    assert caught.value.field == field


def test_a_parser_at_its_limits_recovers_where_only_a_draft_led_there() -> None:
    """The error is raised for that path, and other paths are judged as if it had not been asked."""
    asked = grammar(regex=REGEX)
    asked.commit((0,))

    class Exhausted:
        def __getattr__(self, name: str):
            return {"is_error": lambda: True, "get_error": lambda: "too many items"}.get(name, lambda *_: False)

    fine, asked._matcher = asked._matcher, Exhausted()  # type: ignore[assignment]
    with pytest.raises(ConfigError, match="too many items") as caught:
        asked.banned(())
    assert caught.value.field == "regex"
    assert asked._matcher is not fine
    assert list(~asked.banned(())) == reference((0,))


def test_long_forced_texts_are_not_spelled_out_in_every_step() -> None:
    short, long = (grammar(forcing(), regex=f"(ab){{{n}}}") for n in (20, 2000))
    assert short.forced((), 3)
    assert long.forced((), 3) == []
    assert long._forcing._matcher is None  # nor asked for again


@pytest.mark.parametrize("regex", ["(ab){300000}", "(b|(ab){200000})"])
def test_endless_forced_texts_hold_nobody_up(regex: str) -> None:
    """The library spells out a forced run whole, which took seconds; its own parser's limits end the search."""
    asked = grammar(forcing(), regex=regex)
    asked.commit((0, 1))
    began = time.process_time()
    assert asked.forced((), 3) == []
    assert asked.forced((), 3) == []
    assert time.process_time() - began < 0.25  # about 0.05 s, where the whole run takes half a second at best
    assert list(~asked.banned(())) == [True, False, True, False]  # the text itself goes on as before
    asked.commit((2, 0))
    assert list(~asked.banned(())) == [False, True, False, False]


def test_large_schemas_are_read_or_refused_at_once() -> None:
    """What is valid and large must work; what would take minutes to read is refused by its field."""

    def optional(n: int) -> dict[str, Any]:
        properties = {f"{'ab' * (i % 7)}{i}": {"type": "integer"} for i in range(n)}
        return {"type": "object", "properties": properties, "additionalProperties": False}

    vocabulary = GrammarVocabulary([bytes([i]) for i in range(256)])
    structure = structure_of(SamplingParams(json_schema=optional(1000)))
    assert structure is not None
    asked = Grammar(structure, vocabulary, 256)  # four times as many items in a row as the library's limit
    asked.commit(tuple(b'{"ab'))
    assert not asked.banned(())[ord("a")]
    for schema in (optional(2001), {"anyOf": [optional(1500), optional(1501)]}, {"$defs": {"a": optional(9999)}}):
        with pytest.raises(ConfigError, match="too many properties") as caught:
            structure_of(SamplingParams(json_schema=schema))
        assert caught.value.field == "json_schema"


def test_a_parser_past_its_limits_says_so_and_nothing_of_the_text(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("foredraft.grammar.grammar.LIMITS", LLParserLimits(max_items_in_row=2000))
    count = 2100  # more rules at one place than the parser holds
    rules = "\n".join(f'r{i}: "b" "a"*' for i in range(count))
    asked = grammar(grammar=f'start: "a" ({" | ".join(f"r{i}" for i in range(count))})\n{rules}')
    with pytest.raises(ConfigError, match=r"grammar: cannot go on: .*max is \d+") as caught:
        asked.commit((0,))
    assert "Tokens" not in str(caught.value)


def test_scores_are_changed_in_place_and_only_where_banned() -> None:
    scores = np.arange(2.0 * V).reshape(2, V)
    grammar(regex=REGEX).apply(scores, [(), (0, 0)])
    assert scores.tolist() == [[0, 1, 2, -math.inf], [4, 5, 6, 7]]  # the second path is impossible: left as it is
