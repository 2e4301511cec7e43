"""A server with several drafters: requests choose, share batches, and are told, counted and kept apart by drafter."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from browser import CHROMIUM, Browser, chromium
from cli_support import SENTENCE, TEMPLATE, byte_tokenizer, reciter
from openai import BadRequestError
from server_support import Running, reciting_engine, running

from foredraft.drafters import LookupDrafter, ModelDrafter, SuffixDrafter
from foredraft.server.metrics import PREFIX

KEYS = {"alice": "alice-0123456789", "bob": "bob-0123456789abc"}
BODY = {"prompt": SENTENCE[:9], "max_tokens": 72, "temperature": 0}


def several() -> dict[str, Any]:
    return {
        "lookup": LookupDrafter(3, 1),
        "twin": ModelDrafter(reciter(byte_tokenizer(TEMPLATE))),
        "suffix": SuffixDrafter(),
    }


def spec(name: str | None, **more: Any) -> dict[str, Any]:
    return {"speculation": {"drafter": name, "k": 4, "stats": "summary"} | more}


def test_mixed_requests_share_batches_and_write_plain_text() -> None:
    with running(reciting_engine(several(), max_batch=16)) as server:
        plain = server.post("/v1/completions", BODY | spec(None, off=True, k=None)).json()["choices"][0]["text"]
        rows: list[int] = []
        step = server.engine.step

        def counted() -> Any:
            rows.append(len({request.drafter for request in server.engine.scheduler.active}))
            return step()

        server.engine.step = counted  # type: ignore[method-assign]
        names = ["lookup", "twin", "suffix", None] * 3
        with ThreadPoolExecutor(len(names)) as pool:
            answers = list(pool.map(lambda name: server.post("/v1/completions", BODY | spec(name)).json(), names))
        assert {answer["choices"][0]["text"] for answer in answers} == {plain}
        specs = [answer["metrics"]["speculative_decoding"] for answer in answers]
        assert [spec["drafter"] for spec in specs] == [name or "lookup" for name in names]
        assert all(
            spec["draft_acceptance_rate"] == 1.0 for spec, name in zip(specs, names, strict=True) if name == "twin"
        )
        assert max(rows) == 3  # different drafters in one batch
        server.settled()


def test_seeded_draws_do_not_depend_on_the_drafter() -> None:
    with running(reciting_engine(several())) as server:
        body = BODY | {"temperature": 5.0, "seed": 7, "top_k": 30}
        texts = {server.post("/v1/completions", body | spec(name)).json()["choices"][0]["text"] for name in several()}
        texts.add(server.post("/v1/completions", body | spec(None, off=True, k=None)).json()["choices"][0]["text"])
        assert len(texts) == 1
        assert texts != {SENTENCE[9:81]}


@pytest.mark.parametrize(
    ("drafter", "names"),
    [(None, "'none', which is all"), ("lookup", "'lookup', which is all"), (several, "one of lookup, twin, suffix")],
)
def test_unknown_names_are_refused_with_those_that_are_there(drafter: Any, names: str) -> None:
    with running(reciting_engine(drafter() if callable(drafter) else drafter)) as server:
        with pytest.raises(BadRequestError, match=names) as caught:
            server.openai().completions.create(model="reciter", extra_body=spec("model"), **BODY)
        assert caught.value.param == "speculation.drafter"  # type: ignore[union-attr]
        assert server.post("/v1/completions", BODY | spec(None)).status_code == 200


def test_limits_hold_for_every_drafter() -> None:
    with running(reciting_engine(several()), request_max_k=4) as server:
        for name in several():
            answer = server.post("/v1/completions", BODY | spec(name, k=5))
            assert answer.json()["error"]["param"] == "speculation.k"
            assert server.post("/v1/completions", BODY | spec(name, off=True, k=3)).status_code == 400


def test_figures_are_told_apart_by_drafter() -> None:
    with running(reciting_engine(several())) as server:
        specs = {}
        for name in ("twin", "lookup"):
            answer = server.post("/v1/completions", BODY | spec(name)).json()
            specs[name] = answer["metrics"]["speculative_decoding"]
        server.post("/v1/completions", BODY | spec("twin", off=True, k=None))
        server.settled()
        with server.http() as http:
            text, stats = http.get("/metrics").text, http.get("/stats").json()
        for name, found in specs.items():
            by = f'drafter="{name}",model_name="reciter",tenant_class="default"'
            line = f"{PREFIX}spec_decode_num_accepted_tokens_total{{{by}}}"
            assert f"{line} {float(found['num_accepted_draft_tokens'])}" in text
            assert stats["drafters"][name]["num_draft_tokens"] == found["num_draft_tokens"] > 0
        assert (
            f'{PREFIX}generation_tokens_total{{drafter="none",model_name="reciter",tenant_class="default"}} 72.0'
            in text
        )
        for name in several():
            assert f'drafter="{name}",model_name="reciter",version=' in text
        assert (stats["drafter"], stats["choice"]) == ("lookup", ["lookup", "twin", "suffix"])
        assert "suffix" not in stats["drafters"]
        both = stats["all_drafters"]
        assert both["num_draft_tokens"] == sum(found["num_draft_tokens"] for found in specs.values())
        assert both["num_steps"] == sum(found["num_steps"] for found in specs.values())  # plain decoding apart
        assert stats["recent"]["all_drafters"] == both


def test_each_drafter_keeps_tenants_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two drafters with a memory of past outputs: another tenant's, or the other drafter's, must not help."""
    monkeypatch.setenv("FOREDRAFT_API_KEYS", ",".join(f"{name}={key}" for name, key in KEYS.items()))
    engine = reciting_engine(["one=suffix", "two=suffix"], prefix_reuse=False)
    with running(engine) as server:

        def steps(who: str, name: str) -> int:
            body = BODY | {"max_tokens": 30, "prompt": "x"} | spec(name)
            answer = server.post("/v1/completions", body, KEYS[who]).json()
            return int(answer["metrics"]["speculative_decoding"]["num_steps"])

        cold = steps("alice", "one")
        assert steps("alice", "one") < cold
        assert steps("alice", "two") == cold
        assert steps("bob", "one") == cold
        assert steps("bob", "two") == cold
        assert steps("bob", "one") < cold


@pytest.mark.skipif(not CHROMIUM, reason="no Chromium is installed here")
def test_the_page_shows_all_and_lets_one_choose(tmp_path: Path) -> None:
    with chromium(tmp_path) as page, running(reciting_engine(several(), k=4)) as server:
        try:
            _on_the_page(page, server)
        finally:
            server.application.service.draining = True


def _on_the_page(page: Browser, server: Running) -> None:
    page.size(1280, 1380)
    page.open(server.url + "/")
    page.until("connection.dataset.state === 'live'")
    assert page.run("drafter.textContent") == "lookup, twin, suffix"
    options = "[...document.getElementById('{}').options].map((o) => o.textContent)"
    assert page.run(options.format("by-drafter")) == ["lookup", "twin", "suffix"]
    assert page.run(options.format("drafts-of")) == ["all drafters", "lookup", "twin", "suffix"]
    page.run("document.getElementById('by-drafter').value = 'twin'")
    page.run("document.getElementById('k').value = 4; document.getElementById('max-tokens').value = 60")
    page.run("go.click()")
    page.until("go.textContent === 'Run' && verdict.textContent !== 'Running…'")
    assert "token by token" in page.run("verdict.textContent")
    page.until("alpha.textContent === '100 %'")
    assert page.run("document.querySelectorAll('#position-chart .block').length") == 4
    select = "{ const e = document.getElementById('drafts-of'); e.value = '%s'; e.dispatchEvent(new Event('change')) }"
    page.run(select % "suffix")
    assert page.run("document.getElementById('drafts-when').textContent") == ""
    page.run(select % "twin")
    assert page.run("document.querySelectorAll('#position-chart .block').length") == 4
    assert page.complaints == []
