"""The whole study in its toy size: files, consistency of the tables with their formulas, reuse, the page."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree

import pytest

from foredraft.errors import ConfigError
from foredraft.lab.article import QUICK, ArticleReport, run_article, study
from foredraft.lab.progress import NoProgress
from foredraft.lab.report import page
from foredraft.lab.report_prose import lossless, summary
from foredraft.lab.schema import Article
from foredraft.lab.stats import predicted_speedup


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("home")


@pytest.fixture(scope="module")
def report(home: Path) -> ArticleReport:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FOREDRAFT_HOME", str(home))
        return run_article(home / "out", seed=3, quick=True)


def test_json_is_the_article(report: ArticleReport) -> None:
    text = report.json_path.read_text()
    assert Article.model_validate_json(text) == report.article
    data = json.loads(text)
    assert {"command", "date", "commit", "machine"} <= data["provenance"].keys()
    assert [model["name"] for model in data["models"]] == ["target", "drafter"]
    assert data["quick"] is True
    assert str(Path.home()) not in text


def test_table_b_follows_from_its_own_columns(report: ArticleReport) -> None:
    a, b = report.article.table_a, report.article.table_b
    assert b.c == pytest.approx(b.draft_ms / b.target_ms)
    for row, accepted in zip(b.rows, a.rows, strict=True):
        assert row.tokens_per_step == accepted.mean_accepted + 1
        assert row.step_ms == pytest.approx(row.k * b.draft_ms + row.target_ms)
        assert row.arithmetic == pytest.approx(row.tokens_per_step * b.target_ms / row.step_ms)
        assert row.predicted == pytest.approx(predicted_speedup(a.alpha, row.k, b.c))
        assert row.measured_interval[0] <= row.measured <= row.measured_interval[1]
        assert row.engine_step_ms > 0
    assert b.best_k_measured == max(b.rows, key=lambda row: row.measured).k
    assert report.article.batches.k == b.best_k_measured


def test_a_second_run_trains_nothing_and_finds_the_same_laws(report: ArticleReport, home: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FOREDRAFT_HOME", str(home))
        again = study(QUICK, "english", seed=3, retrain=False, quick=True, progress=NoProgress())
    first = report.article
    assert [model.reused for model in first.models] == [False, False]
    assert [model.reused for model in again.models] == [True, True]
    assert again.table_a == first.table_a
    assert again.table_c == first.table_c
    assert again.strips == first.strips


def test_a_folder_that_cannot_be_written_is_refused_before_the_work(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(ConfigError, match="cannot write") as caught:
        run_article(tmp_path / "file" / "out", quick=True)
    assert caught.value.field == "out"


class Outline(HTMLParser):
    """Collects what the page asks the browser to load, and the sizes of its tables."""

    def __init__(self) -> None:
        super().__init__()
        self.loads: list[str] = []
        self.tags: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.loads += [value or "" for name, value in attrs if name in ("src", "href", "xlink:href")]


def test_the_page_stands_alone(report: ArticleReport) -> None:
    text = report.html_path.read_text(encoding="utf-8")
    outline = Outline()
    outline.feed(text)
    assert all(address.startswith("#") for address in outline.loads)
    assert not re.search(r"url\(\s*['\"]?(https?:|//)|@import", text)
    assert "script" not in outline.tags
    assert outline.tags.count("svg") == 4
    assert outline.tags.count("table") == 5
    assert text.count('role="img"') == 4
    assert "prefers-color-scheme: dark" in text
    assert "RTX 5080, torch 2.8" in text
    assert "Quick run" in text
    ids = re.findall(r'\bid="([^"]+)"', text)
    assert len(ids) == len(set(ids))


def test_pictures_are_well_formed_and_follow_the_pages_colours(report: ArticleReport) -> None:
    text = report.html_path.read_text(encoding="utf-8")
    pictures = re.findall(r"<svg.*?</svg>", text, flags=re.DOTALL)
    for picture in pictures:
        ElementTree.fromstring(picture)
        assert "var(--ink)" in picture
        assert "#000000" not in picture.split("</defs>")[-1]
    for name in ("strips", "speed", "batches", "laws"):
        assert (report.json_path.parent / f"article-{name}.png").stat().st_size > 5_000


def test_the_page_says_so_when_the_law_is_missed(report: ArticleReport) -> None:
    article = report.article
    rows = tuple(row.model_copy(update={"within_noise": row.name != "block"}) for row in article.table_c.rows)
    broken = article.model_copy(update={"table_c": article.table_c.model_copy(update={"rows": rows})})
    assert not lossless(broken)
    assert "NOT within the noise" in summary(broken)
    assert "<strong>outside</strong>" in page(broken)


def test_a_busy_machine_is_admitted(report: ArticleReport) -> None:
    quiet, loud = (report.article.model_copy(update={"load_before": load}) for load in (0.2, 3.0))
    assert "Other programs were running (load 3.0" in page(loud)
    assert "Other programs" not in page(quiet)


def test_hostile_text_cannot_enter_the_page(report: ArticleReport) -> None:
    hostile = report.article.model_copy(
        update={
            "corpus": report.article.corpus.model_copy(update={"source": "<script>alert(1)</script>"}),
            "strips": (report.article.strips[0].model_copy(update={"context": "<script>x</script> $a_b$"}),),
        }
    )
    assert "<script>" not in page(hostile)
