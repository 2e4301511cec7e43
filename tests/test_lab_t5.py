"""The encoder–decoder study in its toy size, the task it learns, and what its page says."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from xml.etree import ElementTree

import pytest
import torch

from foredraft.engine.result import Result
from foredraft.errors import ModelLoadError
from foredraft.lab.char_models import DONE
from foredraft.lab.corpus import load_corpus
from foredraft.lab.progress import NoProgress
from foredraft.lab.stats import predicted_speedup
from foredraft.lab.study import StudyReport
from foredraft.lab.t5 import QUICK, claims, run_t5, study
from foredraft.lab.t5_measure import Runs
from foredraft.lab.t5_page import lossless, page, summary
from foredraft.lab.t5_schema import T5Study
from foredraft.lab.t5_task import (
    END,
    PASSAGE,
    SPECIAL,
    START,
    SUMMARISE,
    TRANSLATE,
    VOCABULARY,
    WORDS,
    Passages,
    batch,
    passages,
    show,
)


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("home")


@pytest.fixture(scope="module")
def report(home: Path) -> StudyReport[T5Study]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FOREDRAFT_HOME", str(home))
        return run_t5(home / "out", seed=3, quick=True)


def test_json_is_the_study(report: StudyReport[T5Study]) -> None:
    text = report.json_path.read_text()
    assert T5Study.model_validate_json(text) == report.result
    data = json.loads(text)
    assert {"command", "date", "commit", "machine"} <= data["provenance"].keys()
    assert [model["name"] for model in data["models"]] == ["target", "base", "small"]
    assert str(Path.home()) not in text


def test_every_drafter_ran_at_every_length_and_changed_no_greedy_text(report: StudyReport[T5Study]) -> None:
    rows = report.result.rows
    assert {(r.task, r.temperature, r.drafter) for r in rows} == {
        (task, temperature, drafter)
        for task in ("translate", "summarise")
        for temperature in (0.0, 1.0)
        for drafter in ("small", "base", "lookup")
    }
    for row in rows:
        assert [at.k for at in row.lengths] == list(QUICK.ks)
        assert row.texts == QUICK.rounds * len(QUICK.ks)
        assert row.temperature or row.identical == row.texts
        assert row.best.measured == max(at.measured for at in row.lengths)
        assert row.drafter != "lookup" or row.c == 0


def test_the_formula_is_the_papers(report: StudyReport[T5Study]) -> None:
    costs = report.result.costs
    for row in report.result.rows:
        if math.isnan(row.alpha) or row.alpha == 1:
            continue
        for at in row.lengths:
            tokens = (1 - row.alpha ** (at.k + 1)) / (1 - row.alpha)
            assert at.predicted == pytest.approx(tokens / (at.k * row.c + 1))
            price = costs.target_ms[at.k + 1] / costs.target_ms[1]
            assert at.priced == pytest.approx(predicted_speedup(row.alpha, at.k, row.c, price))


def test_a_second_run_trains_nothing_and_writes_the_same_texts(report: StudyReport[T5Study], home: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FOREDRAFT_HOME", str(home))
        again = study(QUICK, "english", seed=3, retrain=False, quick=True, progress=NoProgress())
        damaged = next((home / "lab").glob("t5_small-*")) / DONE
        damaged.write_text("{}")
        with pytest.raises(ModelLoadError, match="damaged checkpoint"):
            study(QUICK, "english", seed=3, retrain=False, quick=True, progress=NoProgress())
    assert all(model.reused for model in again.models)
    assert [row.alpha for row in again.rows] == [row.alpha for row in report.result.rows]
    assert again.laws == report.result.laws
    assert again.examples == report.result.examples


def test_the_page_stands_alone(report: StudyReport[T5Study]) -> None:
    text = report.html_path.read_text(encoding="utf-8")
    assert "<script" not in text
    assert not re.search(r"url\(\s*['\"]?(https?:|//)|@import", text)
    pictures = re.findall(r"<svg.*?</svg>", text, flags=re.DOTALL)
    assert len(pictures) == 2
    for picture in pictures:
        ElementTree.fromstring(picture)
    for name in ("lengths", "costs"):
        assert (report.json_path.parent / f"t5-{name}.png").stat().st_size > 5_000


def test_the_page_says_so_when_a_text_differs(report: StudyReport[T5Study]) -> None:
    found = report.result
    laws = tuple(
        law.model_copy(update={"rows": tuple(r.model_copy(update={"p_value": 0.5}) for r in law.rows)})
        for law in found.laws
    )
    fine = found.model_copy(update={"laws": laws})
    assert lossless(fine)
    rows = (found.rows[0].model_copy(update={"identical": found.rows[0].texts - 1}), *found.rows[1:])
    assert not lossless(fine.model_copy(update={"rows": rows}))
    assert "NOT as it must be" in summary(fine.model_copy(update={"rows": rows}))
    low = tuple(r.model_copy(update={"p_value": 1e-6}) for r in laws[0].rows)
    broken = fine.model_copy(update={"laws": (laws[0].model_copy(update={"rows": low}), *laws[1:])})
    assert not lossless(broken)
    assert "<strong>At least one set of texts differs" in page(broken)


def test_a_claim_that_fails_is_shown_as_failing(report: StudyReport[T5Study]) -> None:
    rows = [
        row.model_copy(update={"alpha": {"small": 0.5, "base": 0.6}.get(row.drafter, 0.1)})
        for row in report.result.rows
    ]
    rows = [row.model_copy(update={"alpha": row.alpha - 0.1 * row.temperature}) for row in rows]
    assert [claim.holds for claim in claims(rows)][:2] == [True, True]
    worse = [row.model_copy(update={"alpha": 0.9}) if row.drafter == "small" else row for row in rows]
    assert [claim.holds for claim in claims(worse)][:2] == [False, False] or not claims(worse)[0].holds


@pytest.fixture(scope="module")
def texts() -> tuple[Passages, Passages, object]:
    return passages(load_corpus("english", max_chars=60_000))


def test_the_tasks_are_what_they_say(texts: tuple[Passages, Passages, object]) -> None:
    text = texts[0]
    generator = torch.Generator().manual_seed(5)
    for _ in range(20):
        example = text.example("translate", generator)
        assert example.source[0] == TRANSLATE
        assert example.answer[-1] == END
        assert len(example.source) == len(example.answer) == PASSAGE["translate"] + 1
        changed = [(a, b) for a, b in zip(example.source[1:], example.answer, strict=False) if a != b]
        assert all(b >= SPECIAL + WORDS for _, b in changed)
        assert changed
        assert (
            show(texts[2], example.answer, text.creole).lower() == show(texts[2], example.source, text.creole).lower()
        )  # type: ignore[arg-type]
    for _ in range(20):
        example = text.example("summarise", generator)
        assert example.source[0] == SUMMARISE
        rest = iter(example.source[1:])
        assert all(token in rest for token in example.answer[:-1])  # in order, nothing added
        assert len(example.answer) < len(example.source)
    source, mask, labels = batch(text, 6, 0, 0, 1.0)
    assert int(source.max()) < VOCABULARY
    assert bool((source[mask == 0] == START).all())
    assert bool((source[mask == 1] != START).all())
    assert labels.shape[0] == 6


def test_training_starts_with_short_shuffled_passages(texts: tuple[Passages, Passages, object]) -> None:
    widths = [batch(texts[0], 8, 0, 0, progress)[0].shape[1] for progress in (0.0, 0.39, 0.5, 1.0)]
    assert widths[0] == widths[1] < widths[2] < widths[3] == PASSAGE["summarise"] + 1


def test_what_lies_behind_an_accepted_end_counts_for_no_rate() -> None:
    class Stats:
        num_steps = 2
        trace = ()

    def run(tokens: int, steps: list[tuple[int, int]]) -> Runs:
        from foredraft.types import StepRecord

        runs, stats = Runs(), Stats()
        stats.trace = [StepRecord(d, a) for d, a in steps]  # type: ignore[assignment]
        result = Result.__new__(Result)
        object.__setattr__(result, "token_ids", [5] * tokens)
        object.__setattr__(result, "stats", stats)
        runs.take(result, 0.1)
        return runs

    inside = run(4, [(0, 0), (5, 3)])  # the third drafted token was the end
    assert (inside.accepted, inside.drafted) == ([3], [3])
    corrected = run(5, [(0, 0), (5, 3)])  # three accepted, then the end as correction
    assert (corrected.accepted, corrected.drafted) == ([3], [5])
