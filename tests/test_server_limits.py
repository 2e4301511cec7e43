"""How much may be in here at once, whose turn it is, and what runs out of time."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest
from cli_support import byte_tokenizer, reciter
from rig import model
from server_support import Running, eventually, reciting_engine, running

from foredraft import Engine, SamplingParams
from foredraft.models.base import ForwardOutput
from foredraft.server.errors import ApiError
from foredraft.server.keys import Client
from foredraft.server.limits import Quota
from foredraft.testing import TableModel

BODY = {"prompt": "hello", "max_tokens": 4, "temperature": 0}


class Held(TableModel):
    """A model whose passes wait while ``gate`` is closed."""

    def __init__(self, inner: TableModel) -> None:
        super().__init__(inner.logits_fn, inner.vocab_size, inner.max_context)
        self.gate = threading.Event()
        self.order: list[str] = []

    def forward(self, segments: Any, taps: Any = ()) -> ForwardOutput:
        assert self.gate.wait(20)
        return super().forward(segments, taps)


@contextmanager
def held(max_batch: int = 1, **options: Any) -> Iterator[tuple[Running, Held, Callable[..., Any]]]:
    """A server that stands still until the gate is opened, and a way to send requests meanwhile."""
    target = Held(reciter(byte_tokenizer()))
    engine = reciting_engine(target=target, max_batch=max_batch)
    with running(engine, **options) as server, ThreadPoolExecutor(16) as pool:

        def send(extra: dict[str, Any] | None = None, key: str | None = None) -> Any:
            before = server.application.service.in_flight
            future = pool.submit(server.post, "/v1/completions", BODY | (extra or {}), key)
            eventually(lambda: server.application.service.in_flight > before or future.done())
            return future

        try:
            yield server, target, send
        finally:
            target.gate.set()


def test_a_full_queue_answers_429_and_says_when_to_come_back() -> None:
    with held(max_queue=2) as (server, target, send):
        inside = [send() for _ in range(3)]
        refused = send().result()
        assert refused.status_code == 429
        assert refused.json()["error"]["code"] == "queue_full"
        assert refused.json()["error"]["type"] == "rate_limit_error"
        assert int(refused.headers["retry-after"]) >= 1
        with server.http() as http:
            assert http.get("/ready").status_code == 503
            assert http.get("/health").status_code == 200
        target.gate.set()
        assert [future.result().status_code for future in inside] == [200] * 3
        server.settled()
        with server.http() as http:
            assert http.get("/ready").status_code == 200
            assert [e["kind"] for e in http.get("/stats").json()["events"]] == ["queue_full"]


def test_the_urgent_first_then_tenants_in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FOREDRAFT_API_KEYS", "ann=0123456789abcdef,bob=fedcba9876543210")
    ann, bob = "0123456789abcdef", "fedcba9876543210"
    with held() as (server, target, send):
        order: list[str] = []
        admitted = server.engine.scheduler.pool.take
        monkeypatch.setattr(
            server.engine.scheduler.pool, "take", lambda ids, tenant: (order.append(tenant), admitted(ids, tenant))[1]
        )
        first = send(key=ann)
        eventually(lambda: order == ["ann"])
        futures = [send(key=ann), send(key=ann), send(key=bob), send({"priority": 5}, bob)]
        target.gate.set()
        assert all(future.result().status_code == 200 for future in [first, *futures])
        assert order == ["ann", "bob", "ann", "ann", "bob"]  # the last has a high number


def test_a_free_slot_goes_to_who_has_fewest() -> None:
    """Two slots, one tenant with a backlog: the other tenant's only request does not wait behind it."""
    engine = Engine(target=model(), max_batch=2)
    many = [engine.submit([1, 2], SamplingParams(max_tokens=2 + i), tenant="many") for i in range(5)]
    engine.step()
    one = engine.submit([1, 2], SamplingParams(max_tokens=2), tenant="one")
    urgent = engine.prepare([1, 2], SamplingParams(max_tokens=2), tenant="many", priority=-1)
    engine.add(urgent)
    while engine.scheduler.busy:
        engine.step()
    times = {name: request.admitted_at or 0 for name, request in (("one", one), ("urgent", urgent), ("third", many[2]))}
    assert times["urgent"] <= times["one"] < times["third"]
    assert [request.admitted_at for request in many] == sorted(request.admitted_at or 0 for request in many)


def test_requests_of_one_key_at_once() -> None:
    with held(max_batch=4, key_requests=2) as (_server, target, send):
        inside = [send(), send()]
        refused = send().result()
        assert (refused.status_code, refused.json()["error"]["code"]) == (429, "too_many_requests")
        target.gate.set()
        assert [future.result().status_code for future in inside] == [200, 200]
        assert send().result().status_code == 200


def test_token_budget() -> None:
    with running(reciting_engine(), key_tokens_per_minute=60) as server:
        body = {"prompt": "hello", "max_tokens": 20, "temperature": 0, "stop": "the café"}  # writes 9 of its 20
        assert server.post("/v1/completions", body).status_code == 200
        assert server.post("/v1/completions", body).status_code == 200  # 28 of 60 are used, not 50
        assert server.post("/v1/completions", body).status_code == 200
        refused = server.post("/v1/completions", body)
        assert (refused.status_code, refused.json()["error"]["code"]) == (429, "token_budget_exceeded")
        assert 1 <= int(refused.headers["retry-after"]) <= 60
        never = server.post("/v1/completions", body | {"max_tokens": 56})
        assert (never.status_code, never.json()["error"]["param"]) == (400, "max_tokens")


def test_a_bucket_refills_steadily() -> None:
    now = [0.0]
    quota = Quota(Client("x", tokens_per_minute=60), lambda: now[0])
    quota.take(60)
    with pytest.raises(ApiError) as refused:
        quota.take(10)
    assert refused.value.retry_after == pytest.approx(10)
    now[0] = 10.0
    quota.take(10)
    quota.give_back(1000)  # never more than a minute's worth
    quota.take(60)
    with pytest.raises(ApiError):
        quota.take(1)


def test_waiting_and_running_too_long() -> None:
    with held(queue_timeout=0.2) as (server, target, send):
        running_one, waiting = send(), send()
        target.gate.set()
        assert running_one.result().status_code == 200
        assert waiting.result().status_code == 200
        target.gate.clear()
        slow = send({"timeout": 0.2})
        waiting = send()
        threading.Timer(0.4, target.gate.set).start()
        answer = waiting.result()
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "queue_timeout")
        assert answer.headers["retry-after"]
        answer = slow.result()
        assert (answer.status_code, answer.json()["error"]["code"]) == (504, "timeout")
        server.settled()


def test_a_deadline_ends_a_stream_with_an_error_event() -> None:
    now = [0.0]
    engine = Engine(target=model(), clock=lambda: now[0])
    request = engine.prepare([1, 2], SamplingParams(max_tokens=100), timeout=5.0)
    engine.add(request)
    for _ in range(3):
        engine.step()
    now[0] = 5.0
    engine.step()
    assert request.finish_reason == "error"
    assert "did not finish" in str(request.error)
    assert request.written == 3
    engine.reset()
    assert engine.target.cache.slots_in_use == 0
