"""Chunks of a stream say nothing about acceptance: the same for a drafter that is always right and one always wrong."""

from __future__ import annotations

import re

import pytest
from cli_support import SENTENCE, byte_tokenizer
from hypothesis import given
from hypothesis import strategies as st
from server_support import reciting_engine, running

from foredraft import SamplingParams
from foredraft.engine.result import StreamToken
from foredraft.engine.smoothing import Chunks, smooth
from foredraft.errors import ConfigError
from foredraft.server.pieces import Piece
from foredraft.server.smoothing import PieceSmoother, pad
from foredraft.testing import ScriptedDrafter

IDS = byte_tokenizer().encode(SENTENCE * 9, special=False)
PERIOD = len(IDS) // 9


def drafter(right: bool) -> ScriptedDrafter:
    def propose(prefix: tuple[int, ...], k: int) -> list[int]:
        at = next(n for n in range(PERIOD - 1, -1, -1) if prefix[-n:] == tuple(IDS[:n]) or not n)
        return IDS[at : at + k] if right else [(token + 1) % 256 for token in IDS[at : at + k]]

    return ScriptedDrafter(propose)


def raw(right: bool, smoothing: int, padding: int = 0, **fields: object) -> tuple[list[bytes], float]:
    """The events of one stream as they came off the wire, ids and times apart; and the acceptance rate."""
    engine = reciting_engine(drafter(right), k=5)
    body = {
        "messages": [{"role": "user", "content": "?"}],
        "max_tokens": 61,
        "temperature": 0,
        "stream": True,
        **fields,
    }
    with running(engine, stream_smoothing=smoothing, stream_padding=padding) as server, server.http() as http:
        data = http.post("/v1/chat/completions", json=body).content
    rate = engine.stats.draft_acceptance_rate
    assert rate is not None
    own = re.sub(rb'"id":"[^"]*"|"created":[0-9]+', b"", data)
    return (own if not padding else data).split(b"\n\n"), rate


@pytest.mark.parametrize("smoothing", [1, 4, 7])
def test_raw_chunks_do_not_depend_on_acceptance(smoothing: int) -> None:
    (good, all_right), (bad, none_right) = raw(True, smoothing), raw(False, smoothing)
    assert all_right > 0.9
    assert none_right == 0
    assert good == bad
    assert len(good) >= 61 // smoothing


def test_without_smoothing_they_do() -> None:
    """Negative control: this is what an observer of the wire would see."""
    assert [len(event) for event in raw(True, 0)[0]] != [len(event) for event in raw(False, 0)[0]]


def test_padding_makes_events_alike_even_where_they_hold_figures() -> None:
    usage = {"stream_options": {"include_usage": True}}
    (good, _), (bad, _) = raw(True, 4, 1024, **usage), raw(False, 4, 1024, **usage)
    assert [len(event) for event in good] == [len(event) for event in bad]
    assert {len(event) + 2 for event in good[:-1]} == {1024}


@given(st.binary(max_size=70), st.integers(0, 64))
def test_padding_is_a_comment(payload: bytes, multiple: int) -> None:
    event = b"data: " + payload.replace(b"\n", b"").replace(b"\r", b"") + b"\n\n"
    padded = pad(event, multiple)
    assert not multiple or len(padded) % multiple == 0
    lines = padded.split(b"\n")
    assert padded.endswith(b"\n\n")
    assert [line for line in lines if not line.startswith(b":")] == event.split(b"\n")


STEPS = st.lists(st.integers(0, 6), max_size=12)


@given(STEPS, st.integers(1, 5))
def test_pieces_are_the_same_however_steps_cut_them(steps: list[int], size: int) -> None:
    tokens = [StreamToken(i, "plain", "ab"[i % 2] * (i % 3)) for i in range(sum(steps))]
    smoother, pieces, at = PieceSmoother(size), [], 0
    for i, n in enumerate([*steps, 0]):
        part, at = tokens[at : at + n], at + n
        last = i == len(steps)
        text = "".join(token.text for token in part) + ("held" if last else "")
        result = object() if last else None
        pieces += smoother.push(Piece(text, part, [token.id for token in part], result))  # type: ignore[arg-type,list-item]
    assert [token for piece in pieces for token in piece.tokens] == tokens
    assert [entry for piece in pieces for entry in piece.logprobs] == [token.id for token in tokens]
    assert "".join(piece.text for piece in pieces) == "".join(token.text for token in tokens) + "held"
    assert all(len(piece.tokens) == len(piece.logprobs) for piece in pieces)
    assert all(len(piece.tokens) == size for piece in pieces[:-1])
    assert len(pieces[-1].tokens) <= size
    assert [piece.result is not None for piece in pieces] == [False] * (len(pieces) - 1) + [True]


def test_the_librarys_streams() -> None:
    params = SamplingParams(max_tokens=61, stop=("nine. the caf",))
    sizes = []
    for right in (True, False):
        deltas = list(smooth(reciting_engine(drafter(right), k=5).stream("?", params), 8))
        assert deltas[-1].result is not None
        assert "".join(delta.text for delta in deltas) == deltas[-1].result.text
        sizes.append([(len(delta.tokens), delta.text) for delta in deltas])
    assert sizes[0] == sizes[1]
    assert {n for n, _ in sizes[0][:-1]} == {8}


def test_no_size_is_no_chunk() -> None:
    with pytest.raises(ConfigError, match="at least 1"):
        Chunks(0)
