"""The live page in a real browser: what it shows, what it must not do, and how it behaves on small screens."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import cli_support
import pytest
from browser import CHROMIUM, Browser, chromium
from server_support import Running, reciting_engine, running

from foredraft import Engine
from foredraft.engine.costs import PassCosts
from foredraft.models import catalog
from foredraft.server.ceiling import Ceiling, measure, weight_bytes
from foredraft.server.history import POINT, POINTS, History
from foredraft.server.page import PATHS
from foredraft.types import StepRecord

HOSTILE = "<img src=x onerror=window.pwned=1> <b>&amp;</b> "
KEY = "0123456789abcdef"
PICTURE = os.environ.get("FOREDRAFT_PICTURE")
"""Where to keep the screenshot: docs/img/live-page.png for the documentation."""

needs_browser = pytest.mark.skipif(not CHROMIUM, reason="no Chromium is installed here")


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with chromium(tmp_path_factory.mktemp("chromium")) as found:
        yield found


@contextmanager
def served(engine: Engine, **options: Any) -> Iterator[Running]:
    """A server that lets go of open streams of figures at its end, as it does after SIGTERM."""
    with running(engine, **options) as server:
        yield server
        server.application.service.draining = True


@pytest.fixture
def hostile(monkeypatch: pytest.MonkeyPatch) -> Iterator[Running]:
    """A server whose model writes markup."""
    monkeypatch.setattr(cli_support, "SENTENCE", HOSTILE)
    with served(reciting_engine(k=4), request_max_k=8) as server:
        yield server


def opened(browser: Browser, server: Running, width: int = 1280, height: int = 1380) -> Browser:
    browser.requests.clear()
    browser.complaints.clear()
    browser.size(width, height)
    browser.open(server.url + "/")
    browser.run("sessionStorage.clear()")
    return browser


def choose(browser: Browser, **values: str | int) -> None:
    for name, value in values.items():
        browser.run(f"document.getElementById('{name.replace('_', '-')}').value = {str(value)!r}")


def finished(browser: Browser) -> None:
    browser.until("document.getElementById('go').textContent === 'Run' && verdict.textContent !== 'Running…'")


def text_of(browser: Browser, selector: str) -> str:
    return str(browser.run(f"document.querySelector({selector!r}).textContent"))


# --- without a browser


def test_the_page_needs_no_key_and_forbids_everything_foreign(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FOREDRAFT_API_KEYS", f"bob={KEY}")
    with running(reciting_engine()) as server, server.http() as http:
        for path in PATHS:
            answer = http.get(path)
            assert answer.status_code == 200
            policy = answer.headers["content-security-policy"]
            assert "default-src 'none'" in policy
            assert "script-src 'self';" in policy
            assert "unsafe" not in policy
            assert answer.headers["x-content-type-options"] == "nosniff"
            again = http.get(path, headers={"If-None-Match": answer.headers["etag"]})
            assert (again.status_code, again.content) == (304, b"")
            assert not re.findall(r"https?://(?!www\.w3\.org/2000/svg)", answer.text), path
        page = http.get("/").text
        assert not re.findall(r"<style|\sstyle=|\son\w+=|<script>", page)
        named = {"/" + path for path in re.findall(r'(?:src|href)="(page/[^"]+)"', page)}
        assert named <= PATHS
        for path in ("/page/secret", "/page/%2e%2e/app.py", "/page/", "/pages"):
            assert http.get(path).status_code == 401
            assert http.get(path, headers={"Authorization": f"Bearer {KEY}"}).status_code == 404


def test_history_keeps_ten_minutes_in_points() -> None:
    now = 1000.0 * POINT
    history = History(lambda: now)
    history.add(("lookup", "chat"), 6, [StepRecord(4, 3, 4), StepRecord(0, 0, 0)])
    history.add(("lookup", ""), 2, [StepRecord(2, 0, 2)])
    history.add(("none", "chat"), 2, [StepRecord(0, 0, 0)] * 2)
    assert history.since(-1) == []  # not finished yet
    now += POINT
    [point] = history.since(-1)
    assert point["tokens_per_second"] == 10 / POINT
    assert point["drafters"] == {"lookup": {"alpha": 3 / 6, "tau": 1 + 3 / 2}}
    assert point["categories"] == {"chat": {"alpha": 3 / 4, "tau": 1 + 3 / 1}}
    assert history.since(point["number"]) == []
    for _ in range(POINTS + 5):
        now += POINT
        history.add(("lookup", ""), 1, [])
    points = history.since(-1)
    assert [p["number"] for p in points] == list(range(points[0]["number"], points[0]["number"] + POINTS))
    assert len(history._steps) <= POINTS


@pytest.mark.real_model
@pytest.mark.skipif(catalog.resolve("smollm2-135m") is None, reason="the small real model is not here")
def test_the_ceiling_counts_what_a_pass_reads() -> None:
    engine = Engine("smollm2-135m", None)
    nbytes = weight_bytes(engine.target)
    assert nbytes is not None
    assert engine.target_info is not None
    assert nbytes == pytest.approx(engine.target_info.file_bytes, rel=0.1)  # the file's blocks, packed as they are
    passes = PassCosts()
    ceiling = Ceiling(bandwidth=nbytes / 0.02, weight_bytes=nbytes)
    assert ceiling.figures(passes) is None
    passes.observe(1, 0.04)
    figures = ceiling.figures(passes)
    assert figures is not None
    assert figures["share"] == pytest.approx(0.5)
    assert measure(reciting_engine().target) is None  # a table has no weights


# --- in the browser


@needs_browser
@pytest.mark.real_model
@pytest.mark.skipif(catalog.resolve("smollm2-135m") is None, reason="the small real model is not here")
def test_the_playground_colours_what_the_server_says(browser: Browser, tmp_path: Path) -> None:
    """Both texts, token by token as the API gives them; figures and charts follow; nothing leaves the host."""
    engine = Engine("smollm2-135m", "lookup", max_batch=4, guard=True)
    with served(engine, served_name="smollm2-135m") as server:
        server.application.stats.ceiling = measure(engine.target)
        page = opened(browser, server)
        page.until("connection.dataset.state === 'live'")
        height = page.run("document.body.scrollHeight")
        choose(page, k=4, max_tokens=64)
        prompt = page.run("document.getElementById('prompt').value")
        page.run("go.click()")
        finished(page)
        body = {"messages": [{"role": "user", "content": prompt}], "temperature": 0, "max_tokens": 64}
        for column, speculation in (("plain", {"off": True}), ("speculative", {"k": 4})):
            more = {"speculation": {**speculation, "stats": "summary"}, "return_token_ids": True}
            answer = server.post("/v1/chat/completions", body | more).json()
            choice = answer["choices"][0]
            shown = page.run(f"[...{column}.querySelectorAll('.token')].map((t) => [t.dataset.kind, t.textContent])")
            assert shown == [[token["kind"], token["text"]] for token in choice["tokens"] if token["text"]]
            assert text_of(page, f"#{column} .text") == choice["message"]["content"]
            facts = text_of(page, f"#{column} .facts")
            assert f"{len(choice['tokens'])} tokens in" in facts
            assert f"{answer['metrics']['speculative_decoding']['num_steps']} target passes" in facts
            assert float(text_of(page, f"#{column} output")) > 0
        assert {kind for kind, _ in shown} == {"plain", "accepted", "correction", "bonus"}
        assert "token by token" in text_of(page, "#verdict")
        colour = "(e) => getComputedStyle(e).backgroundColor"
        legend = page.run(f"[...document.querySelectorAll('.legend .token')].map({colour})")
        assert len(set(legend)) == 4
        for kind, expected in zip(("accepted", "correction", "bonus", "plain"), legend, strict=True):
            found = page.run(f"[...speculative.querySelectorAll('[data-kind={kind}]')].map({colour})")
            assert set(found) == {expected}
        page.until("document.querySelectorAll('#alpha-chart .line, #alpha-chart .dot').length")
        for tile in ("#alpha", "#ceiling"):
            assert re.fullmatch(r"\d+ %", text_of(page, tile))
        assert re.fullmatch(r"\d\.\d\d", text_of(page, "#tau"))
        assert "since the start" in text_of(page, "#total")
        assert page.run("document.querySelectorAll('#position-chart .block').length") == 4
        assert page.run("document.querySelectorAll('#k-chart .block').length") >= 2
        page.run("document.querySelector('[value=categories]').click()")
        assert "playground" in text_of(page, "#tau-chart")
        page.run("document.querySelector('[value=drafters]').click()")
        assert page.run("document.body.scrollHeight") == height  # nothing jumped
        page.picture(Path(PICTURE) if PICTURE else tmp_path / "page.png")
        server.application.service.event("guard_request_paused", "guard: drafting paused for request req-7", "req-7")
        page.until("document.querySelector('#events .guard')?.textContent === 'guard request paused'")
        assert page.complaints == []
        assert {url for url in page.requests if not url.startswith(server.url + "/")} == set()
        assert any(url.endswith("/stats/stream") for url in page.requests)


@needs_browser
def test_markup_stays_text(browser: Browser, hostile: Running) -> None:
    page = opened(browser, hostile)
    hostile.application.service.event("<i>kind", HOSTILE)
    choose(page, prompt=HOSTILE, max_tokens=100)
    page.run("go.click()")
    finished(page)
    page.until("events.textContent.includes('onerror')")
    for column in ("plain", "speculative"):
        assert HOSTILE in text_of(page, f"#{column} .text")
    assert page.run("document.querySelectorAll('main img, main b, main i').length") == 0
    assert page.run("typeof window.pwned") == "undefined"
    thrown = "try { document.body.innerHTML = '<p>'; 'written' } catch (e) { e.name }"
    assert page.run(thrown) == "TypeError"  # the policy stands behind the code
    assert not any(url.endswith("/x") for url in page.requests)


@needs_browser
def test_errors_are_shown_in_words(browser: Browser, hostile: Running) -> None:
    page = opened(browser, hostile)
    choose(page, prompt="<|im_end|>", run="speculative")
    page.run("go.click()")
    finished(page)
    assert "control token '<|im_end|>'" in text_of(page, "#speculative .facts")
    assert text_of(page, "#plain .facts") == "Not asked for."
    choose(page, prompt="short", k=16)
    page.run("go.click()")
    finished(page)
    assert re.search(r"speculation.k: at most 8 on this server .*\(req-\w+\)", text_of(page, "#speculative .facts"))


@needs_browser
def test_keys_stay_in_the_tab_and_open_the_figures(browser: Browser, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FOREDRAFT_API_KEYS", f"bob={KEY}")
    with served(reciting_engine(k=4)) as server:
        page = opened(browser, server)
        page.until("problem.textContent.includes('Enter an API key')")
        page.run(f"key.value = '{KEY}'; key.dispatchEvent(new Event('change'))")
        page.until("problem.textContent.includes('admin = true')")
        assert text_of(page, "#model") == "reciter"
        choose(page, max_tokens=30)
        page.run("document.getElementById('prompt').focus()")
        page.call("Input.dispatchKeyEvent", type="keyDown", key="Enter", windowsVirtualKeyCode=13, modifiers=2)
        finished(page)
        assert cli_support.SENTENCE[:20] in text_of(page, "#speculative .text")
        assert page.run("Object.values(sessionStorage).length") == 1
        assert page.run("[localStorage.length, document.cookie]") == [0, ""]


@needs_browser
def test_phones_dark_mode_and_the_keyboard(browser: Browser) -> None:
    with served(reciting_engine()) as server:
        page = opened(browser, server, 360, 740)
        page.until("connection.dataset.state === 'live'")
        assert page.run("document.documentElement.scrollWidth") == 360
        cut = "(e) => e.scrollWidth > e.clientWidth + 1"
        assert page.run(f"[...document.querySelectorAll('dd, h3')].filter({cut}).map((e) => e.id)") == []
        light = page.run("getComputedStyle(document.body).backgroundColor")
        page.size(360, 740, dark=True)
        assert page.run("getComputedStyle(document.body).backgroundColor") != light
        page.run("document.getElementById('key').focus()")
        visited = []
        for _ in range(10):
            page.press("Tab", 9)
            visited.append(page.run("((e) => e.id || e.className || e.name)(document.activeElement)"))
        assert visited == ["prompt", "run", "k", "temperature", "max-tokens", "as", "go", "text", "text", "by"]
    page.until("problem.textContent.includes('The server cannot be reached. Trying again.')")
