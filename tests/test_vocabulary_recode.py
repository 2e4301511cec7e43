"""Ids of one tokenizer into another's, piece by piece: the same text, at a cost that does not grow."""

from __future__ import annotations

import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from vocabulary_support import SPECIAL, TEXT, tokenizer

from foredraft.drafters.vocabulary_map import map_vocabularies
from foredraft.drafters.vocabulary_recode import Recoder
from foredraft.drafters.vocabulary_text import encode_plain, tokens_after
from foredraft.models.tokenizer import Tokenizer

KINDS = ["bytes", "digits", "nfc", "pieces"]


def recoder(source: Tokenizer, goal: Tokenizer) -> Recoder:
    return Recoder(source, goal, map_vocabularies(source, goal))


def text_of(words: Tokenizer, ids: list[int]) -> str:
    data = b"".join(words.token_bytes(token) for token in ids if not words.is_special(token))
    text = data.decode("utf-8", "replace")
    return text.removeprefix(" ") if words.decode(words.encode("a")) != text_of_bytes(words, "a") else text


def text_of_bytes(words: Tokenizer, text: str) -> str:
    return b"".join(words.token_bytes(token) for token in words.encode(text, special=False)).decode()


@pytest.mark.parametrize("source", KINDS)
@pytest.mark.parametrize("goal", KINDS)
def test_token_by_token_gives_the_encoding_of_the_whole(source: str, goal: str) -> None:
    here, there = tokenizer(source, 500), tokenizer(goal, 400)
    ids = here.encode(TEXT * 4)
    right = there.encode(here.decode(ids), special=False)
    step = recoder(here, there)
    before: list[int] = []
    for n in range(1, len(ids) + 1):
        unchanged = step.extend(ids[:n])
        assert step.ids[:unchanged] == before[:unchanged]
        assert unchanged >= min(len(before), len(step.ids)) - 60
        before = list(step.ids)
    assert step.ids == right
    assert recoder(here, there).extend(ids) == 0


PARTS = st.sampled_from(
    [*TEXT.split(" "), " ", "  ", "\n", "\n\n    ", "e\u0301", "<|im_end|>", "\U0001f98a", "狗", "Z"]
)


@settings(max_examples=30, deadline=None)
@given(st.lists(PARTS, max_size=40), st.sampled_from(KINDS), st.sampled_from(KINDS), st.integers(1, 7))
def test_any_text_in_any_steps_keeps_its_text(parts: list[str], source: str, goal: str, stride: int) -> None:
    here, there = tokenizer(source, 340), tokenizer(goal, 460)
    text = "".join(parts).replace("<|im_end|>", "<|im_ end|>" if len(parts) % 2 else "<|im_end|>")
    pieces = [piece.token for piece in encode_plain(here, text)]
    step = recoder(here, there)
    for n in range(stride, len(pieces) + stride, stride):
        step.extend(pieces[:n])
    written = here.decode(pieces)
    expected = there.decode([piece.token for piece in encode_plain(there, written)])
    assert there.decode(step.ids, skip_special=False) == expected
    assert not any(there.is_special(token) for token in step.ids)


def test_special_tokens_are_matched_by_name_or_left_out_and_one_bos() -> None:
    here = tokenizer("bytes", 330, bos=True, special=[*SPECIAL, "<|other|>"])
    there = tokenizer("digits", 300, bos=True, special=["<|im_end|>", "<|im_start|>"])
    ids = here.encode("<|im_start|>the dog<|im_end|><|other|> sleeps")
    assert ids[0] == here.bos_id
    step = recoder(here, there)
    step.extend(ids)
    assert step.ids == [there.bos_id, *there.encode("<|im_start|>the dog<|im_end|> sleeps", special=False)]
    without = recoder(here, tokenizer("digits", 300, special=[]))
    without.extend(ids)
    assert without.ids == tokenizer("digits", 300, special=[]).encode("the dog sleeps")
    plain = recoder(tokenizer("bytes", 330), there)  # the target adds none, the drafter wants one
    plain.extend(tokenizer("bytes", 330).encode("the dog"))
    assert plain.ids == there.encode("the dog")


def test_half_a_character_is_read_as_bytes_and_taken_back() -> None:
    here, there = tokenizer("bytes", 300), tokenizer("digits", 420)
    ids = here.encode("on \U0001f98a on")
    fox = [n for n in range(len(ids)) if len(here.token_bytes(ids[n])) == 1 and here.token_bytes(ids[n])[0] >= 0x80]
    step = recoder(here, there)
    step.extend(ids[: fox[1]])
    assert b"".join(map(there.token_bytes, step.ids)) == b"".join(map(here.token_bytes, ids[: fox[1]]))
    assert step.whole
    step.extend(ids)
    assert step.ids == there.encode("on \U0001f98a on")


def test_the_cost_of_a_step_does_not_grow_with_the_text() -> None:
    here, there = tokenizer("bytes", 400), tokenizer("digits", 460)
    costs = []
    for copies in (4, 64):
        ids = here.encode(TEXT * copies)
        step = recoder(here, there)
        step.extend(ids[:-40])
        best = float("inf")
        for n in range(len(ids) - 39, len(ids) + 1):
            known = ids[:n]
            start = time.perf_counter()
            step.extend(known)
            best = min(best, time.perf_counter() - start)
        assert len(step._run) < 600
        costs.append(best)
    assert costs[1] < 4 * costs[0]


@pytest.mark.parametrize("kind", KINDS)
def test_a_draft_begins_at_the_very_byte_where_the_text_ends(kind: str) -> None:
    words = tokenizer(kind, 420)

    def said(before: str, text: bytes) -> bytes:
        return b"".join(map(words.token_bytes, tokens_after(words, before.encode(), text)))

    for before, text in [("The quick", " brown fox"), ("The qui", "ck brown"), ("", "The"), ("on.\n", "\n    Then")]:
        got = said(before, text.encode())
        assert got == text.encode() or (kind == "pieces" and got == b"")
    assert said("The quick", b" brown\xf0\x9f") == b" brown"  # half a fox is left out
    assert tokens_after(words, b"The", b"\x9f fox") == []
    assert not any(words.is_special(token) for token in tokens_after(words, b"The", b" <|im_end|>"))
    assert said("The quick", b" <|im_end|> fox") == (b"" if kind == "pieces" else b" <|im_end|> fox")


def test_coverage_counts_what_both_can_write() -> None:
    here = tokenizer("bytes", 400)
    same = map_vocabularies(here, here)
    assert same.coverage == pytest.approx(1.0)
    assert same.to_target == {token: token for token in same.to_target}
    assert len(same.to_target) == here.vocab_size - len(SPECIAL)
    other = map_vocabularies(here, tokenizer("pieces", 420))
    assert 0.1 < other.coverage < 1.0
    for drafter_id, target_id in other.to_target.items():
        assert tokenizer("pieces", 420).token_bytes(drafter_id) == here.token_bytes(target_id)
        assert not here.is_special(target_id)
