"""What breaks stays where it broke: models and drafters that fail, clients that vanish or do not read, bugs."""

from __future__ import annotations

import json
import logging
import socket
import threading
import time
from collections.abc import Sequence
from typing import Any

import pytest
from cli_support import SENTENCE, byte_tokenizer, reciter
from openai import APIError, InternalServerError
from server_support import Running, eventually, reciting_engine, running

from foredraft.drafters import Drafter, DraftRequest
from foredraft.models.base import ForwardOutput, Segment
from foredraft.server import main as server_main
from foredraft.testing import TableModel
from foredraft.types import Draft

TEXT = (SENTENCE * 30).encode()
GOOD = {"prompt": "hello", "max_tokens": 60, "temperature": 0}


class Moody(TableModel):
    """Breaks in the given way on texts that hold a bang, once they are 30 tokens long; slow if asked to be."""

    def __init__(self, how: str = "", seconds: float = 0.0) -> None:
        inner = reciter(byte_tokenizer())
        super().__init__(inner.logits_fn, inner.vocab_size, inner.max_context)
        self.how, self.seconds = how, seconds
        [self.bang] = byte_tokenizer().encode("!")

    def forward(self, segments: Sequence[Segment], taps: Sequence[int] = ()) -> ForwardOutput:
        time.sleep(self.seconds)
        bad = [
            i
            for i, segment in enumerate(segments)
            if self.bang in [*self.cache.tokens(segment.slot)[:8], *segment.tokens[:8]]
            and self.cache.length(segment.slot) + len(segment.tokens) > 30
        ]
        if bad and self.how == "raise":
            raise RuntimeError("the device is gone")
        output = super().forward(segments, taps)
        for i in bad if self.how == "nan" else ():
            output.logits[i].fill_(float("nan"))
        return output


class Crashing(Drafter):
    """Raises where a text is 30 tokens long."""

    name = "crashing"

    def propose(self, request: DraftRequest, k: int) -> Draft:
        if len(request.ids) > 30:
            raise RuntimeError("no more")
        return Draft((0,))


@pytest.mark.parametrize("how", ["raise", "nan"])
def test_a_request_that_fails_fails_alone(how: str) -> None:
    with running(reciting_engine(target=Moody(how))) as server:
        client, answers = server.openai(), []
        neighbour = threading.Thread(target=lambda: answers.append(server.post("/v1/completions", GOOD)))
        neighbour.start()
        with pytest.raises(InternalServerError) as caught:
            client.completions.create(model="reciter", prompt="hello!", max_tokens=60, temperature=0)
        assert caught.value.request_id
        assert "device" not in str(caught.value)
        texts: list[str] = []
        with pytest.raises(APIError, match=r"request|logits"):
            read(
                client.completions.create(model="reciter", prompt="hello!", max_tokens=60, temperature=0, stream=True),
                texts,
            )
        assert "".join(texts) == SENTENCE[: len("".join(texts))] != ""
        neighbour.join()
        assert answers[0].json()["choices"][0]["text"].encode() == TEXT[:60]
        server.settled()


def read(stream: Any, texts: list[str]) -> None:
    for chunk in stream:
        texts.append(chunk.choices[0].text)


def test_a_drafter_that_crashes_costs_no_token() -> None:
    with running(reciting_engine(Crashing(), k=1)) as server:
        answer = server.post("/v1/completions", GOOD)
        assert answer.json()["choices"][0]["text"].encode() == TEXT[:60]
        server.settled()


def test_a_bug_in_a_step_ends_what_runs_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    with running(reciting_engine()) as server:
        honest, calls = server.engine.step, []

        def buggy() -> Any:
            calls.append(1)
            if len(calls) == 3:
                raise ZeroDivisionError
            return honest()

        monkeypatch.setattr(server.engine, "step", buggy)
        answer = server.post("/v1/completions", GOOD)
        assert (answer.status_code, answer.json()["error"]["code"]) == (500, "request_failed")
        assert server.post("/v1/completions", GOOD).json()["choices"][0]["text"].encode() == TEXT[:60]
        with server.http() as http:
            assert http.get("/health").status_code == 200
            assert "engine_error" in http.get("/stats").text
        server.settled()


def test_a_bug_in_a_route_is_a_500_with_an_id(monkeypatch: pytest.MonkeyPatch) -> None:
    with running(reciting_engine()) as server:
        monkeypatch.setattr("foredraft.server.routes.plan", lambda *_: 1 / 0)
        answer = server.post("/v1/completions", GOOD)
        assert answer.status_code == 500
        assert answer.json()["error"]["request_id"] == answer.headers["x-request-id"]
        assert "ZeroDivision" not in answer.text


def raw(server: Running, body: dict[str, Any], receive: int | None = None) -> socket.socket:
    """Sends a request over a bare socket."""
    host, port = server.url.removeprefix("http://").split(":")
    found = socket.socket()
    if receive is not None:
        found.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive)
    found.connect((host, int(port)))
    text = json.dumps(body).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(text)}"
    found.sendall(head.encode() + b"\r\n\r\n" + text)
    return found


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_vanishes_frees_its_slot(stream: bool) -> None:
    with running(reciting_engine(target=Moody(seconds=0.01), max_batch=2)) as server:
        scheduler = server.engine.scheduler
        body = GOOD | {"max_tokens": 3000, "stream": stream}
        sockets = [raw(server, body) for _ in range(5)]  # two run, three wait
        eventually(lambda: len(scheduler.active) == 2 and len(scheduler.waiting) == 3)
        if stream:
            seen = b""
            while b"data: {" not in seen:
                seen += sockets[0].recv(4096)
        for found in sockets:
            found.close()
        eventually(lambda: not scheduler.busy)
        server.settled()
        assert server.post("/v1/completions", GOOD).json()["choices"][0]["text"].encode() == TEXT[:60]
        if stream:
            with server.http() as http:
                assert 'finished_reason="cancelled"' in http.get("/metrics").text


@pytest.mark.parametrize("limit", ["stream_buffer", "stall_timeout"])
def test_a_reader_that_does_not_read_holds_nobody_up(monkeypatch: pytest.MonkeyPatch, limit: str) -> None:
    honest = server_main.listen

    def small_buffers(config: Any) -> socket.socket:
        found = honest(config)
        found.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        return found

    monkeypatch.setattr("foredraft.server.main.listen", small_buffers)
    options = {"stream_buffer": 50} if limit == "stream_buffer" else {"stall_timeout": 0.3}
    with running(reciting_engine(), **options) as server:
        body = GOOD | {"max_tokens": 3500, "stream": True, "logprobs": 20, "return_token_ids": True}
        deaf = raw(server, body, receive=4096)
        service = server.application.service
        eventually(lambda: service.in_flight == 1)
        assert server.post("/v1/completions", GOOD).json()["choices"][0]["text"].encode() == TEXT[:60]
        if limit == "stream_buffer":  # the engine gave it up while the connection still stands
            eventually(lambda: not server.engine.scheduler.busy)
            assert service.in_flight == 1
        else:
            eventually(lambda: service.in_flight == 0)
        deaf.close()
        server.settled()


def test_a_refused_request_is_logged_with_its_route_and_no_other_path(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FOREDRAFT_API_KEYS", "bob=0123456789abcdef")
    with caplog.at_level(logging.INFO, "foredraft"), running(reciting_engine()) as server, server.http() as http:
        for path in ("/v1/completions", "/metrics", "/my-password-is-hunter2"):
            assert http.get(path).status_code == 401
        assert http.get("/ready").status_code == 200
        eventually(lambda: len([r for r in caplog.records if r.name == "foredraft.access"]) == 3)
    paths = [record.__dict__["facts"]["path"] for record in caplog.records if record.name == "foredraft.access"]
    assert paths == ["/v1/completions", "/metrics", "other"]


def test_logs_hold_no_text_unless_asked(caplog: pytest.LogCaptureFixture) -> None:
    secret = "my password is hunter2"
    for log_prompts in (False, True):
        caplog.clear()
        with caplog.at_level(logging.INFO, "foredraft"), running(reciting_engine(), log_prompts=log_prompts) as server:
            server.post("/v1/completions", GOOD | {"prompt": secret})
            server.post("/v1/completions", GOOD | {"prompt": secret, "temperature": -1})
            server.post("/v1/chat/completions", {"messages": [{"role": "user", "content": secret}], "max_tokens": 5})
            eventually(lambda: len([r for r in caplog.records if r.name == "foredraft.access"]) == 3)
        facts = [str(record.__dict__.get("facts", "")) + record.getMessage() for record in caplog.records]
        assert (secret in "".join(facts)) == log_prompts
        assert (SENTENCE in "".join(facts)) == log_prompts
        assert "'status': 200" in "".join(facts)
