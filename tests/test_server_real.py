"""``foredraft serve`` as users start it, on the small real model: identity under load, the page's examples, the end."""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from server_support import PATIENCE, eventually

from foredraft import Engine, SamplingParams
from foredraft.models import catalog

pytestmark = [
    pytest.mark.real_model,
    pytest.mark.skipif(catalog.resolve("smollm2-135m") is None, reason="the small real model is not here"),
]
PAGE = Path(__file__).parent.parent / "docs" / "server.md"
QUESTIONS = [
    "Repeat this: red green blue red green blue red green blue.",
    "What is the capital of France?",
    "Write a haiku about rain.",
    "List three fruits, then list them again.",
    "Say 🙂 twice.",
    "def add(a, b):",
    "Translate 'good morning' to French.",
    "Why is the sky blue?",
]


class Process:
    """A server in its own process."""

    def __init__(self, *options: str) -> None:
        self.child = subprocess.Popen(
            [sys.executable, "-m", "foredraft", "serve", "--port", "0", *options],
            stderr=subprocess.PIPE,
            text=True,
            env=os.environ | {"OMP_NUM_THREADS": "1", "NO_COLOR": "1"},
        )
        assert self.child.stderr is not None
        self.lines: list[str] = []
        for line in self.child.stderr:
            self.lines.append(line)
            if found := re.search(r"on (http://\S+)/v1", line):
                self.url = found[1]
                break
        else:
            raise AssertionError("".join(self.lines))
        threading.Thread(target=lambda: self.lines.extend(self.child.stderr or ()), daemon=True).start()
        eventually(self.ready)

    def ready(self) -> bool:
        with contextlib.suppress(httpx.TransportError):
            return httpx.get(self.url + "/ready").status_code == 200
        return False

    def chat(self, content: str, **extra: Any) -> Any:
        body = {"messages": [{"role": "user", "content": content}], "temperature": 0, "max_tokens": 16} | extra
        answer = httpx.post(self.url + "/v1/chat/completions", json=body, timeout=120)
        assert answer.status_code == 200, answer.text
        return answer.json()


@pytest.fixture(scope="module")
def server() -> Iterator[Process]:
    found = Process("--target", "smollm2-135m", "--max-batch", "8", "--max-step-tokens", "32")
    yield found
    found.child.kill()
    found.child.wait()


def test_eight_clients_at_once_get_what_plain_decoding_writes(server: Process) -> None:
    engine = Engine("smollm2-135m", None, prefix_reuse=False)
    assert engine.tokenizer is not None
    prompts = [engine.tokenizer.chat([{"role": "user", "content": question}]) for question in QUESTIONS]
    plain = [result.token_ids for result in engine.generate(prompts, SamplingParams(max_tokens=16))]
    for options in ({"k": 3}, {}):
        with ThreadPoolExecutor(8) as pool:
            answers = list(
                pool.map(lambda q: server.chat(q, return_token_ids=True, speculation=options), QUESTIONS)  # noqa: B023
            )
        assert [answer["choices"][0]["token_ids"] for answer in answers] == plain


def test_a_warm_prefix_changes_neither_text_nor_acceptance(server: Process) -> None:
    extra = {"speculation": {"k": 3, "stats": "detailed"}, "max_tokens": 20}
    cold, warm = (server.chat("Once more: one two three one two three one two three one", **extra) for _ in range(2))
    assert cold["choices"][0]["message"] == warm["choices"][0]["message"]
    assert warm["usage"]["prompt_tokens_details"]["cached_tokens"] > 20
    left, right = (answer["metrics"]["speculative_decoding"] for answer in (cold, warm))
    assert left == right
    assert left["num_draft_tokens"] > 0


def test_the_examples_of_the_page_run(server: Process) -> None:
    text = PAGE.read_text("utf-8").replace("http://127.0.0.1:8000", server.url)
    [curl] = re.findall(r"^```bash\n(curl.*?)^```", text, re.M | re.S)
    answer = json.loads(subprocess.run(["bash", "-c", curl], capture_output=True, check=True).stdout)
    assert "Paris" in answer["choices"][0]["message"]["content"]
    [code] = re.findall(r"^```python\n(from openai.*?)^```", text, re.M | re.S)
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(code, str(PAGE), "exec"), {})
    assert re.search(r"\d+ \d\.\d+", printed.getvalue())


def test_sigterm_finishes_what_runs_and_refuses_what_is_new(server: Process) -> None:
    body = {"prompt": "Once upon a time", "max_tokens": 80, "temperature": 0, "stream": True, "ignore_eos": True}
    refused, pieces = [], 0
    with (
        httpx.Client(timeout=120) as client,
        client.stream("POST", server.url + "/v1/completions", json=body) as answer,
    ):
        for line in answer.iter_lines():
            if line.startswith("data: {"):
                pieces += len(json.loads(line[6:])["choices"])
                if pieces == 3:
                    server.child.send_signal(signal.SIGTERM)
                    eventually(lambda: not server.ready())
                    refused.append(httpx.post(server.url + "/v1/completions", json=body | {"stream": False}))
        assert line == "data: [DONE]" or not line
    assert pieces >= 20
    assert [(r.status_code, r.json()["error"]["code"]) for r in refused] == [(503, "draining")]
    assert refused[0].headers["retry-after"]
    assert server.child.wait(PATIENCE) == 0
    logged = [json.loads(line) for line in server.lines[1:]]
    assert {"done", "draining"} <= {line["outcome"] for line in logged if line["message"] == "request"}
    assert not [line for line in logged if line["level"] in ("error", "critical")]
