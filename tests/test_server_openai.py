"""The API through clients that people have: the official one, and an independent reader of event streams."""

from __future__ import annotations

import json
from collections.abc import Iterator

import httpx
import httpx_sse
import pytest
from cli_support import SENTENCE
from openai import NotFoundError
from server_support import Running, reciting_engine, running

from foredraft import SamplingParams

PROMPT = "hello. "


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    with running(reciting_engine()) as found:
        yield found


def test_a_completion_is_what_the_engine_writes(server: Running) -> None:
    answer = server.openai().completions.create(
        model="reciter", prompt=PROMPT, max_tokens=80, temperature=0, extra_body={"speculation": {"k": 3}}
    )
    [choice] = answer.choices
    assert choice.text == (SENTENCE * 3).encode()[:80].decode()
    assert choice.finish_reason == "length"
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (len(PROMPT), 80)
    assert answer.usage.completion_tokens_details is not None
    assert answer.usage.completion_tokens_details.accepted_prediction_tokens
    assert answer.object == "text_completion"
    assert answer._request_id


def test_a_chat_is_streamed_with_usage(server: Running) -> None:
    chunks = list(
        server.openai().chat.completions.create(
            model="reciter",
            messages=[{"role": "user", "content": "go"}],
            max_completion_tokens=50,
            temperature=0,
            stream=True,
            stream_options={"include_usage": True},
        )
    )
    assert chunks[0].choices[0].delta.role == "assistant"
    pieces = [choice.delta.content or "" for chunk in chunks for choice in chunk.choices]
    assert "".join(pieces) == (SENTENCE * 2).encode()[:50].decode("utf-8", "replace")
    assert not any("\ufffd" in piece for piece in pieces)
    assert chunks[-1].choices == []
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 50
    assert [chunk.usage for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)
    assert len({chunk.id for chunk in chunks}) == 1
    reasons = [choice.finish_reason for chunk in chunks for choice in chunk.choices]
    assert reasons[-1] == "length"
    assert not any(reasons[:-1])


def test_token_ids_come_in_order_and_say_what_they_were(server: Running) -> None:
    body = {"prompt": PROMPT, "max_tokens": 90, "temperature": 0, "stream": True, "return_token_ids": True}
    body["speculation"] = {"k": 4, "stats": "detailed"}
    with httpx.Client(base_url=server.url, timeout=60) as http, http.stream("POST", "/v1/completions", json=body) as r:
        assert r.headers["content-type"].startswith("text/event-stream")
        events = list(httpx_sse.EventSource(r).iter_sse())
    assert events[-1].data == "[DONE]"
    chunks = [json.loads(event.data) for event in events[:-1]]
    choices = [chunk["choices"][0] for chunk in chunks if chunk["choices"]]
    ids = [token for choice in choices for token in choice["token_ids"]]
    expected = server.engine.tokenizer.encode(SENTENCE * 3)[:90]  # type: ignore[union-attr]
    assert ids == expected
    kinds = [token["kind"] for choice in choices for token in choice["tokens"]]
    assert {"accepted", "bonus"} <= set(kinds)
    spec = chunks[-1]["metrics"]["speculative_decoding"]
    assert spec["num_accepted_draft_tokens"] == kinds.count("accepted")
    assert sum(spec["per_step_drafted"]) == spec["num_draft_tokens"]
    assert max(spec["per_step_drafted"]) == 4


def test_speculation_can_be_switched_off(server: Running) -> None:
    body = {"prompt": PROMPT, "max_tokens": 60, "temperature": 0}
    drafted = server.post("/v1/completions", body | {"speculation": {"k": 3, "stats": "summary"}}).json()
    plain = server.post("/v1/completions", body | {"speculation": {"off": True, "stats": "summary"}}).json()
    assert drafted["choices"][0]["text"] == plain["choices"][0]["text"]
    assert drafted["metrics"]["speculative_decoding"]["num_draft_tokens"] > 0
    assert plain["metrics"]["speculative_decoding"]["num_draft_tokens"] == 0
    assert plain["metrics"]["speculative_decoding"]["draft_acceptance_rate"] is None
    assert "metrics" not in server.post("/v1/completions", body).json()


def test_many_prompts_and_answers_keep_their_order(server: Running) -> None:
    prompts = ["the ca", "the café on the h", "opens at n"]
    answer = server.openai().completions.create(
        model="reciter", prompt=prompts, n=2, max_tokens=8, temperature=0.8, seed=5, best_of=2
    )
    assert [choice.index for choice in answer.choices] == list(range(6))
    engine = reciting_engine()
    for i, choice in enumerate(answer.choices):
        params = SamplingParams(max_tokens=8, temperature=0.8, seed=5 + i % 2)
        assert choice.text == engine.generate(prompts[i // 2], params)[0].text


def test_stops_echo_and_bias(server: Running) -> None:
    client = server.openai()
    stopped = client.completions.create(
        model="reciter", prompt=PROMPT, max_tokens=80, temperature=0, stop=["hill", "9"]
    )
    assert stopped.choices[0].text == SENTENCE[: SENTENCE.index("hill")]
    assert stopped.choices[0].finish_reason == "stop"
    echoed = client.completions.create(model="reciter", prompt=PROMPT, max_tokens=3, temperature=0, echo=True)
    assert echoed.choices[0].text == PROMPT + SENTENCE[:3]
    [t] = server.engine.tokenizer.encode("t")  # type: ignore[union-attr]
    biased = client.completions.create(
        model="reciter", prompt=PROMPT, max_tokens=1, temperature=0, logit_bias={str(t): -100}
    )
    assert biased.choices[0].text != "t"


def test_logprobs_in_both_shapes(server: Running) -> None:
    client = server.openai()
    answer = client.completions.create(model="reciter", prompt=PROMPT, max_tokens=6, temperature=0, logprobs=2)
    found = answer.choices[0].logprobs
    assert found is not None
    assert found.tokens == list(SENTENCE[:6])
    assert found.text_offset == list(range(6))
    assert found.top_logprobs is not None
    assert found.token_logprobs is not None
    for token, logprob, top in zip(found.tokens, found.token_logprobs, found.top_logprobs, strict=True):
        assert top[token] == logprob == max(top.values())
    chat = client.chat.completions.create(
        model="reciter",
        messages=[{"role": "user", "content": "go"}],
        max_tokens=9,
        temperature=0,
        logprobs=True,
        top_logprobs=3,
    )
    content = chat.choices[0].logprobs.content  # type: ignore[union-attr]
    assert content is not None
    assert bytes(byte for entry in content for byte in entry.bytes or []) == SENTENCE.encode()[:9]
    assert [len(entry.top_logprobs) for entry in content] == [3] * 9
    assert content[0].logprob == content[0].top_logprobs[0].logprob


def test_streamed_logprobs_are_the_same(server: Running) -> None:
    body = {"prompt": PROMPT, "max_tokens": 40, "temperature": 0, "logprobs": 1}
    whole = server.post("/v1/completions", body).json()["choices"][0]["logprobs"]
    stream = server.openai().completions.create(
        model="reciter", prompt=PROMPT, max_tokens=40, temperature=0, logprobs=1, stream=True
    )
    parts = [chunk.choices[0].logprobs for chunk in stream]
    assert [token for part in parts for token in part.tokens or []] == whole["tokens"]  # type: ignore[union-attr]
    assert [x for part in parts for x in part.token_logprobs or []] == pytest.approx(whole["token_logprobs"])  # type: ignore[union-attr]


def test_models_and_names(server: Running) -> None:
    client = server.openai()
    assert [model.id for model in client.models.list()] == ["reciter"]
    assert client.models.retrieve("reciter").id == "reciter"
    for name in ("gpt-4", "../../etc/passwd", "{{ 7*7 }}", "/dev/zero"):
        with pytest.raises(NotFoundError, match="not served here"):
            client.completions.create(model=name, prompt="x")


def test_tokens_there_and_back(server: Running) -> None:
    text = "the café 👩‍👩‍👧"
    found = server.post("/tokenize", {"prompt": text, "return_token_strs": True}).json()
    assert found["count"] == len(found["tokens"]) == len(text.encode())
    assert server.post("/detokenize", {"tokens": found["tokens"]}).json() == {"prompt": text}
    talk = [{"role": "user", "content": "go"}]
    chat = server.post("/tokenize", {"messages": talk}).json()["tokens"]
    assert server.post("/detokenize", {"tokens": chat}).json()["prompt"] == "u:go\na:"


def test_health_and_the_document(server: Running) -> None:
    with server.http() as http:
        assert http.get("/health").json() == {"status": "ok"}
        assert http.get("/ready").status_code == 200
        document = http.get("/openapi.json").json()
    assert "/v1/chat/completions" in document["paths"]
    fields = document["components"]["schemas"]["ChatBody"]["properties"]
    assert {"min_p", "top_k", "repetition_penalty", "speculation", "priority"} <= set(fields)
    assert "processors" not in fields
