"""Echoed prompts with their scores, and prompts that several answers share: told, counted and read once."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
from cli_support import SENTENCE, TEMPLATE, byte_tokenizer, reciter
from server_support import Running, reciting_engine, running

from foredraft import Engine, SamplingParams
from foredraft.models.base import ForwardOutput, Segment
from foredraft.testing import TableModel
from foredraft.testing.table import TableCache

PROMPT = "xx " + SENTENCE[:20]
BODY = {"prompt": PROMPT, "max_tokens": 12, "temperature": 0, "echo": True, "logprobs": 2}


class Read(TableModel):
    """The reciter; counts the tokens that it reads and the rows that it is asked for."""

    def __init__(self) -> None:
        inner = reciter(byte_tokenizer(TEMPLATE))
        super().__init__(inner.logits_fn, inner.vocab_size, 4096)
        self.tokens, self.rows = 0, 0

    def forward(self, segments: Sequence[Segment], taps: Sequence[int] = ()) -> ForwardOutput:
        self.tokens += sum(len(segment.tokens) for segment in segments)
        self.rows = max(self.rows, sum(len(s.tokens) - s.logits_from for s in segments))
        return super().forward(segments, taps)


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    with running(reciting_engine()) as found:
        yield found


def wanted(ids: list[int]) -> list[float]:
    """Log-probability of each token but the first, from a pass of the library over the text itself."""
    scored = Engine(target=Read()).generate([ids], SamplingParams(max_tokens=0, prompt_logprobs=0))[0]
    assert scored.prompt_logprobs is not None
    return [entry.logprob for entry in scored.prompt_logprobs[1:] if entry is not None]


def test_echo_with_logprobs_has_openais_shape(server: Running) -> None:
    answer = server.openai().completions.create(model="reciter", **BODY)
    [choice] = answer.choices
    assert choice.text == PROMPT + SENTENCE[20:32]
    found = choice.logprobs
    assert found is not None
    assert found.tokens is not None
    assert found.token_logprobs is not None
    assert found.top_logprobs is not None
    assert found.text_offset is not None
    assert "".join(found.tokens[:10]) == PROMPT[:10]
    assert len(found.tokens) == len(PROMPT.encode()) + 12
    assert found.token_logprobs[0] is found.top_logprobs[0] is None
    ids = server.engine.tokenizer.encode(choice.text, special=False)  # type: ignore[union-attr]
    scores = wanted(ids[: len(PROMPT.encode()) + 12])
    assert found.token_logprobs[1:] == pytest.approx(scores)
    assert found.token_logprobs[2] == pytest.approx(
        -math.log(math.exp(8) + 256), rel=0.01
    )  # "x" was not to be expected
    for token, logprob, top in list(zip(found.tokens, found.token_logprobs, found.top_logprobs, strict=True))[1:]:
        assert top[token] == logprob
        assert 2 <= len(top) <= 3
    assert found.text_offset == sorted(found.text_offset)
    for token, offset in zip(found.tokens, found.text_offset, strict=True):
        if token.isascii():
            assert choice.text[offset] == token


def test_a_text_is_only_scored(server: Running) -> None:
    whole = server.post("/v1/completions", BODY).json()["choices"][0]["logprobs"]
    answer = server.post("/v1/completions", BODY | {"max_tokens": 0}).json()
    [choice] = answer["choices"]
    assert (choice["text"], choice["finish_reason"]) == (PROMPT, "length")
    n = len(PROMPT.encode())
    for name, values in choice["logprobs"].items():
        assert values == whole[name][:n]
    assert answer["usage"]["completion_tokens"] == 0
    assert answer["usage"]["prompt_tokens"] == answer["usage"]["total_tokens"] == n
    ids = server.engine.tokenizer.encode(PROMPT)  # type: ignore[union-attr]
    by_ids = server.post("/v1/completions", BODY | {"max_tokens": 0, "prompt": ids}).json()["choices"][0]
    assert by_ids["logprobs"] == choice["logprobs"]
    silent = server.post("/v1/completions", BODY | {"max_tokens": 0, "echo": False}).json()["choices"][0]
    assert (silent["text"], silent["logprobs"]["tokens"]) == ("", [])


@pytest.mark.parametrize("smoothing", [0, 5])
@pytest.mark.parametrize("tokens", [0, 12])
@pytest.mark.parametrize("n", [1, 3])
def test_streams_say_the_same(smoothing: int, tokens: int, n: int) -> None:
    body = BODY | {"max_tokens": tokens, "n": n, "temperature": 1.5, "seed": 4}
    with running(reciting_engine(), stream_smoothing=smoothing) as server:
        whole = server.post("/v1/completions", body).json()["choices"]
        with server.http() as http, http.stream("POST", "/v1/completions", json=body | {"stream": True}) as answer:
            lines = [line[6:] for line in answer.iter_lines() if line.startswith("data: {")]
        told = [choice for line in lines for choice in json.loads(line)["choices"]]
        for number, expected in enumerate(whole):
            parts = [choice for choice in told if choice["index"] == number]
            assert "".join(part["text"] for part in parts) == expected["text"]
            for name, values in expected["logprobs"].items():
                assert [value for part in parts for value in part["logprobs"][name]] == values
            assert expected["text"].startswith(PROMPT)
            assert expected["logprobs"]["tokens"][: len(PROMPT)] == whole[0]["logprobs"]["tokens"][: len(PROMPT)]


# --- several answers to one prompt


def usage(answer: Any) -> tuple[int, int, int]:
    found = answer.json()["usage"]
    return found["prompt_tokens"], found["completion_tokens"], found["prompt_tokens_details"]["cached_tokens"]


@pytest.mark.parametrize("copies", [True, False])
def test_a_prompt_is_read_and_counted_once(copies: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not copies:
        monkeypatch.delattr(TableCache, "copy")
    target = Read()
    prompt = "y" * 200
    body = {"prompt": prompt, "max_tokens": 6, "temperature": 1.0, "seed": 3, "n": 4, "best_of": 4}
    with running(reciting_engine(None, target)) as server:
        answer = server.post("/v1/completions", body)
        assert usage(answer) == (200, 24, 0)
        texts = [choice["text"] for choice in answer.json()["choices"]]
        for number, text in enumerate(texts):
            alone = body | {"n": 1, "best_of": 1, "seed": 3 + number}
            assert server.post("/v1/completions", alone).json()["choices"][0]["text"] == text
        server.settled()
        before = target.tokens
        assert usage(server.post("/v1/completions", body | {"prompt": ["z" * 200, "w" * 100]})) == (300, 48, 0)
        read = target.tokens - before
        assert (read < 300 + 8 * 6 + 8) == copies
        server.settled()
        chunks = server.openai().completions.create(
            model="reciter", stream=True, stream_options={"include_usage": True}, **body
        )
        assert next(chunk.usage.prompt_tokens for chunk in chunks if chunk.usage) == 200
        server.settled()


def test_shared_prompts_are_charged_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FOREDRAFT_API_KEYS", "alice=alice-0123456789")
    body = {"prompt": "y" * 100, "max_tokens": 10, "temperature": 0, "n": 4}
    with running(reciting_engine(None), key_tokens_per_minute=150) as server:
        answer = server.post("/v1/completions", body, "alice-0123456789")  # 100 + 4 · 10
        assert answer.status_code == 200
        assert server.post("/v1/completions", body | {"n": 1}, "alice-0123456789").status_code == 429
        quota = server.application.service._quotas["alice"]
        assert quota._tokens == pytest.approx(10, abs=5)


def test_waiting_answers_end_with_the_one_that_they_wait_for() -> None:
    """The first answer is still reading, or has no slot, when the client goes away; nobody may be left waiting."""
    with running(reciting_engine(None, max_batch=1, max_step_tokens=1)) as server:
        body = {"prompt": "y" * 900, "max_tokens": 5, "n": 3, "stream": True}
        with server.http() as http:
            for _ in range(3):
                with http.stream("POST", "/v1/completions", json=body) as answer:
                    assert answer.status_code == 200
        server.settled()
        assert not server.application.service.runner._held
        late = server.post("/v1/completions", body | {"stream": False, "timeout": 0.02})
        assert late.status_code == 504
        server.settled()
        assert not server.application.service.runner._held
