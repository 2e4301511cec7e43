"""Requests that schemathesis makes from our own OpenAPI document: none is a 500, all have an id, nothing leaks.

FOREDRAFT_FUZZ sets how many examples each operation and mode gets (``make fuzz`` takes many).
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis import Case, GenerationMode
from server_support import Running, reciting_engine, running

EXAMPLES = int(os.environ.get("FOREDRAFT_FUZZ", "4"))
SKIPPED = {"/stats/stream"}  # never ends


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    with running(reciting_engine(), max_output_tokens=4, max_prompt_tokens=500, request_timeout=10) as found:
        yield found


@pytest.mark.parametrize("mode", list(GenerationMode), ids=lambda mode: mode.value)
def test_no_request_breaks_the_server(server: Running, mode: GenerationMode) -> None:
    seen: Counter[int] = Counter()
    document = schemathesis.openapi.from_url(server.url + "/openapi.json")
    with server.http() as http:
        for found in document.get_all_operations():
            operation = found.ok()
            plain = not operation.body
            if operation.path in SKIPPED or (plain and mode is GenerationMode.NEGATIVE):
                continue

            @settings(
                max_examples=1 if plain else EXAMPLES,
                deadline=None,
                database=None,
                derandomize=True,
                phases=[Phase.generate],
                suppress_health_check=list(HealthCheck),
            )
            @given(case=operation.as_strategy(generation_mode=mode))
            def send(case: Case) -> None:
                answer = case.call(base_url=server.url, timeout=30)
                seen[answer.status_code] += 1
                assert answer.headers["x-request-id"]
                assert answer.status_code < 500, answer.text
                if answer.status_code >= 400 and case.method != "HEAD":
                    assert answer.json()["error"]["request_id"]

            send()
        assert http.get("/health").status_code == 200
    server.settled()
    assert seen[200 if mode is GenerationMode.POSITIVE else 400] > 0
