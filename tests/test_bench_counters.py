"""Acceptance read off ``/metrics``: vLLM's text, and a running server of our own."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
from cli_support import Cli
from server_support import reciting_engine, running

from foredraft.bench.counters import Acceptance, fetch, read
from foredraft.errors import ConfigError

VLLM = """\
# HELP vllm:spec_decode_num_drafts_total Number of spec decoding drafts.
# TYPE vllm:spec_decode_num_drafts_total counter
vllm:spec_decode_num_drafts_total{engine="0",model_name="m"} 400.0
vllm:spec_decode_num_drafts_total{engine="1",model_name="m"} 61.0
# HELP vllm:spec_decode_num_drafts_created Number of spec decoding drafts.
# TYPE vllm:spec_decode_num_drafts_created gauge
vllm:spec_decode_num_drafts_created{engine="0",model_name="m"} 1.7960614659290266e+09
# TYPE vllm:spec_decode_num_draft_tokens_total counter
vllm:spec_decode_num_draft_tokens_total{engine="0",model_name="m"} 1383.0
# TYPE vllm:spec_decode_num_accepted_tokens_total counter
vllm:spec_decode_num_accepted_tokens_total{engine="0",model_name="m"} 202.0
# TYPE vllm:spec_decode_num_accepted_tokens_per_pos_total counter
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="m",position="0"} 150.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="m",position="1"} 43.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="m",position="2"} 9.0
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="m"} 1.0
# TYPE vllm:num_requests_waiting gauge
vllm:num_requests_waiting{engine="0",model_name="m"} 2.0
# TYPE vllm:generation_tokens_total counter
vllm:generation_tokens_total{engine="0",model_name="m"} 669.0
"""
BODY = {
    "model": "reciter",
    "prompt": "The",
    "max_tokens": 24,
    "temperature": 0,
    "speculation": {"stats": "summary"},
}


def test_vllms_counters() -> None:
    [(name, found)] = read(VLLM).items()
    assert name == "m"
    assert found.to_dict() == {
        "num_spec_steps": 461,  # both engines
        "num_draft_tokens": 1383,
        "num_accepted_draft_tokens": 202,
        "completion_tokens": 669,
        "draft_acceptance_rate": 202 / 1383,
        "mean_acceptance_length": 1 + 202 / 461,
        "acceptance_rate_per_position": [150 / 461, 43 / 461, 9 / 461],
        "running": 1,
        "waiting": 2,
    }


def test_nothing_drafted_is_no_rate() -> None:
    [found] = read('vllm:generation_tokens_total{model_name="m"} 5.0\n').values()
    assert (found.alpha, found.tau, found.rates) == (None, None, [])
    assert found.to_dict()["draft_acceptance_rate"] is None


def test_differences() -> None:
    before, after = read(VLLM)["m"], read(VLLM.replace("1383.0", "1400.0").replace("} 43.0", "} 45.0"))["m"]
    found = after.since(before)
    assert found.counts["num_draft_tokens"] == 17
    assert found.by_position[1] == 2
    assert found.counts["num_spec_steps"] == 0
    assert found.levels["waiting"] == 2  # as it is now
    anew = before.since(after)  # the server was started again: it counts from 0
    assert anew.counts["num_draft_tokens"] == 1383
    total = sum([before, after], Acceptance())
    assert total.counts["num_draft_tokens"] == 2783


@pytest.mark.parametrize("text", ["", "<html>", "python_info 1\n", "vllm:x{ 5\n"])
def test_other_text_is_refused(text: str) -> None:
    with pytest.raises(ConfigError):
        read(text)


def test_our_own_server_is_read_with_the_same_names(capsys: pytest.CaptureFixture[str]) -> None:
    with running(reciting_engine("lookup", k=3)) as server:
        specs = [server.post("/v1/completions", BODY).json()["metrics"]["speculative_decoding"] for _ in range(3)]
        server.settled()  # counters follow answers
        for suffix in ("", "/", "/v1", "/v1/", "/metrics"):
            [(name, found)] = fetch(server.url + suffix).items()
        outcome = Cli(capsys)("metrics", "--url", server.url, "--json")
        line = Cli(capsys)("metrics", "--url", server.url)
    assert name == "reciter lookup"
    steps = sum(spec["num_spec_steps"] for spec in specs)
    accepted = sum(spec["num_accepted_draft_tokens"] for spec in specs)
    assert accepted > 0
    assert found.tau == 1 + accepted / steps
    assert found.alpha == accepted / sum(spec["num_draft_tokens"] for spec in specs)
    assert (
        found.rates[0]
        == sum(spec["acceptance_rate_per_position"][0] * spec["num_spec_steps"] for spec in specs) / steps
    )
    assert found.to_dict()["tokens_per_step"] == 1 + accepted / sum(spec["num_steps"] for spec in specs)
    assert outcome.json["models"]["reciter lookup"] == found.to_dict()
    assert line.out.startswith(f"reciter lookup: α {found.alpha:.2f}, τ {found.tau:.2f}, {accepted} of ")


def test_traffic_of_some_seconds_only(capsys: pytest.CaptureFixture[str]) -> None:
    with running(reciting_engine("lookup", k=3)) as server:
        first = server.post("/v1/completions", BODY).json()["metrics"]["speculative_decoding"]
        later = threading.Timer(0.5, lambda: server.post("/v1/completions", BODY))
        later.start()
        outcome = Cli(capsys)("metrics", "--url", server.url, "--over", "2", "--json")
        later.join()
        server.settled()
        [whole] = fetch(server.url).values()
    [during] = outcome.json["models"].values()
    assert during["num_draft_tokens"] == whole.counts["num_draft_tokens"] - first["num_draft_tokens"] > 0


def test_keys_of_admins(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from foredraft.server.keys import new_key

    key, entry = new_key("root")
    (tmp_path / "keys.toml").write_text(entry + "admin = true\n")
    with running(reciting_engine("lookup", k=3), api_keys=str(tmp_path / "keys.toml")) as server:
        refused = Cli(capsys)("metrics", "--url", server.url)
        monkeypatch.setenv("FOREDRAFT_API_KEY", key)
        assert Cli(capsys)("metrics", "--url", server.url).code == 0
    assert refused.code == 2
    assert "answers 401; put an admin's key into FOREDRAFT_API_KEY" in refused.error_line


@pytest.mark.parametrize(
    ("url", "expected"), [("foo", "'foo' is no address"), ("http://127.0.0.1:1", "cannot be reached")]
)
def test_addresses(capsys: pytest.CaptureFixture[str], url: str, expected: str) -> None:
    outcome = Cli(capsys)("metrics", "--url", url)
    assert outcome.code == 2
    assert expected in outcome.error_line


def test_the_bench_sees_what_a_server_by_url_accepts() -> None:
    from foredraft.bench.workers.serve import Request
    from foredraft.bench.workers.url_worker import OpenAiUrl

    worker = OpenAiUrl()
    with running(reciting_engine("lookup", k=3)) as server:
        worker.load("row", {"url": server.url + "/v1"})
        request = Request([[]], [[{"role": "user", "content": "Hello"}]], max_tokens=32, ignore_eos=True)
        for _ in range(2):
            found = worker.generate("row", request)
            [stats] = [server.engine.stats]
            server.settled()
        counted = fetch(server.url)["reciter lookup"].counts
    assert found.written == 32
    assert found.stats["accepted"] > 0
    assert found.stats["drafted"] * 2 == counted["num_draft_tokens"] == stats.num_draft_tokens
    assert found.stats["spec_steps"] * 2 == counted["num_spec_steps"]
