"""Figures of a server: Prometheus's names and formulas, live statistics, and that they agree with the answers."""

from __future__ import annotations

import json
import shutil
import ssl
import subprocess
from pathlib import Path

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families
from server_support import Running, eventually, reciting_engine, running

from foredraft import __version__
from foredraft.server.metrics import PREFIX
from foredraft.server.stats import CATEGORIES

BODY = {"prompt": "hello", "max_tokens": 80, "temperature": 0, "speculation": {"k": 3, "stats": "summary"}}


def values(server: Running) -> dict[tuple[str, str], float]:
    """Samples by name and one label: the drafter, else the kind, position or part."""
    with server.http() as http:
        families = text_string_to_metric_families(http.get("/metrics").text)
    found: dict[tuple[str, str], float] = {}
    for family in families:
        for sample in family.samples:
            labels = {k: v for k, v in sample.labels.items() if k not in ("model_name", "tenant_class", "le")}
            label = labels.get("position") or labels.get("finished_reason") or "".join(labels.values())
            found[sample.name.removeprefix(PREFIX), label] = sample.value
    return found


def test_counters_agree_with_the_answers() -> None:
    with running(reciting_engine()) as server:
        specs = [server.post("/v1/completions", BODY).json()["metrics"]["speculative_decoding"] for _ in range(2)]
        server.post("/v1/completions", BODY | {"speculation": {"off": True}})
        server.settled()
        found = values(server)
        for name, field in (("num_drafts", "spec_steps"), ("num_draft_tokens", "draft_tokens")):
            assert found[f"spec_decode_{name}_total", "lookup"] == sum(spec[f"num_{field}"] for spec in specs)
        accepted = sum(spec["num_accepted_draft_tokens"] for spec in specs)
        assert found["spec_decode_num_accepted_tokens_total", "lookup"] == accepted > 0
        at = [found["spec_decode_num_accepted_tokens_per_pos_total", str(i)] for i in range(3)]
        assert sum(at) == accepted
        assert at == sorted(at, reverse=True)
        rates = specs[0]["acceptance_rate_per_position"]
        assert at[0] / found["spec_decode_num_drafts_total", "lookup"] == pytest.approx(rates[0])
        assert found["generation_tokens_total", "lookup"] == 160
        assert found["generation_tokens_total", "none"] == 80
        assert ("spec_decode_num_drafts_total", "none") not in found
        assert found["request_success_total", "length"] in (1, 2)
        assert found["time_to_first_token_seconds_count", "lookup"] == 2
        deliveries = 1 + found["inter_token_latency_seconds_count", "lookup"] + 1
        assert deliveries <= found["request_steps_total", "lookup"] == sum(spec["num_steps"] for spec in specs)
        assert found["step_seconds_count", "total"] > 0
        assert found["num_requests_running", ""] == found["num_requests_waiting", ""] == 0
        assert found["info", f"lookup{__version__}"] == 1


def test_live_figures() -> None:
    with running(reciting_engine()) as server, server.http() as http:
        for i in range(CATEGORIES + 3):
            http.post("/v1/completions", json=BODY | {"max_tokens": 20, "metadata": {"category": f"kind-{i}"}})
        spec = http.post("/v1/completions", json=BODY).json()["metrics"]["speculative_decoding"]
        server.settled()
        stats = http.get("/stats").json()
        lookup = stats["drafters"]["lookup"]
        assert 0 < lookup["draft_acceptance_rate"] <= 1
        assert lookup["mean_acceptance_length"] == pytest.approx(
            1 + lookup["num_accepted_draft_tokens"] / lookup["num_spec_steps"]
        )
        assert sum(lookup["k_chosen"].values()) == lookup["num_steps"] > spec["num_steps"]
        assert len(stats["categories"]) == CATEGORIES + 1
        assert stats["categories"]["other"]["num_steps"] == 3 * stats["categories"]["kind-0"]["num_steps"]
        assert stats["tokens"]["total"] == 20 * (CATEGORIES + 3) + 80
        assert stats["requests"] == {"running": 0, "waiting": 0, "max_batch": 8, "finished": {"length": CATEGORIES + 4}}
        assert stats["costs"]["pass_s_by_rows"]
        assert stats["latency"]["first_token_s"]["p50"] > 0
        assert stats["recent"]["drafters"]["lookup"]["num_steps"] == lookup["num_steps"]
        with http.stream("GET", "/stats/stream") as stream:
            line = next(line for line in stream.iter_lines() if line.startswith("data: "))
        assert json.loads(line[6:])["model"] == "reciter"
        eventually(lambda: server.application.service.in_flight == 0)


@pytest.mark.skipif(shutil.which("openssl") is None, reason="makes its certificate with openssl")
def test_tls(tmp_path: Path) -> None:
    certificate, key = tmp_path / "c.pem", tmp_path / "k.pem"
    subprocess.run(
        [
            *[
                "openssl",
                "req",
                "-x509",
                "-newkey",
                "ec",
                "-pkeyopt",
                "ec_paramgen_curve:prime256v1",
                "-nodes",
                "-days",
                "2",
            ],
            *["-subj", "/CN=127.0.0.1", "-addext", "subjectAltName=IP:127.0.0.1"],
            *("-keyout", str(key), "-out", str(certificate)),
        ],
        check=True,
        capture_output=True,
    )
    with running(reciting_engine(), tls_certificate=str(certificate), tls_key=str(key)) as server:
        assert server.url.startswith("https://")
        trusting = ssl.create_default_context(cafile=str(certificate))
        assert httpx.get(server.url + "/health", verify=trusting).json() == {"status": "ok"}
        with pytest.raises(httpx.TransportError):
            httpx.get(server.url.replace("https", "http") + "/health")
