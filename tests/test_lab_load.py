"""The study of draft lengths under load in its toy size; what its policies really do."""

from __future__ import annotations

import json
import re
from pathlib import Path
from xml.etree import ElementTree

import pytest

from foredraft import SamplingParams
from foredraft.drafters.model import ModelDrafter
from foredraft.engine.load import LoadAware
from foredraft.errors import ConfigError
from foredraft.lab import load
from foredraft.lab.load import (
    POLICIES,
    QUICK,
    Clock,
    Reckoned,
    draft_cost,
    engine_for,
    run_load,
    tables,
    target_cost,
    warm_up,
)
from foredraft.lab.load_page import page, summary, worth
from foredraft.lab.load_schema import LoadStudy
from foredraft.lab.study import StudyReport


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> StudyReport[LoadStudy]:
    return run_load(tmp_path_factory.mktemp("out"), seed=2, quick=True)


def test_json_is_the_study(report: StudyReport[LoadStudy]) -> None:
    text = report.json_path.read_text()
    assert LoadStudy.model_validate_json(text) == report.result
    assert {"command", "date", "commit", "machine"} <= json.loads(text)["provenance"].keys()
    assert str(Path.home()) not in text


def test_every_policy_ran_at_every_batch(report: StudyReport[LoadStudy]) -> None:
    [setting] = report.result.settings
    assert [(row.batch, row.policy) for row in setting.rows] == [(b, p) for b in QUICK.batches for p in POLICIES]
    for row in setting.rows:
        if row.policy == "plain":
            assert (row.gain, row.drafted) == (1, 0)
        assert row.accepted <= row.drafted
    product = 1.0
    for batch in QUICK.batches:
        gains = {row.policy: row.gain for row in setting.rows if row.batch == batch}
        product *= gains["auto"] / gains["k = 4"]
    assert worth(setting, "auto", "k = 4") == pytest.approx(product ** (1 / len(QUICK.batches)))
    assert worth(setting, "auto", "k = 99") is None


def test_the_page_stands_alone(report: StudyReport[LoadStudy]) -> None:
    text = report.html_path.read_text(encoding="utf-8")
    assert "<script" not in text
    assert not re.search(r"url\(\s*['\"]?(https?:|//)|@import", text)
    [picture] = re.findall(r"<svg.*?</svg>", text, flags=re.DOTALL)
    ElementTree.fromstring(picture)


def test_the_verdict_follows_the_figures(report: StudyReport[LoadStudy]) -> None:
    def with_gain(gain: float) -> LoadStudy:
        [setting] = report.result.settings
        rows = tuple(
            row.model_copy(update={"gain": gain if row.policy == "auto, admitted" else 1.0}) for row in setting.rows
        )
        return report.result.model_copy(update={"settings": (setting.model_copy(update={"rows": rows}),)})

    assert "it pays" in summary(with_gain(1.1))
    assert "it does not pay" in summary(with_gain(0.9))
    assert "it is not worth it" in page(with_gain(1.01))


def drafted(policy: str, batch: int) -> float:
    clock = Clock()
    p, q = tables(0)
    drafter = ModelDrafter(Reckoned(q, clock, draft_cost))
    engine = engine_for(Reckoned(p, clock, target_cost), drafter, policy, batch, clock)
    warm_up(engine, [[1, 2]], batch, 8)
    params = [SamplingParams(temperature=1.0, max_tokens=40, seed=i) for i in range(batch)]
    results = engine.generate([[i, 1] for i in range(batch)], params)
    assert isinstance(engine.drafter, LoadAware) == policy.endswith("admitted")
    return sum(r.stats.num_draft_tokens for r in results) / sum(r.stats.num_steps for r in results)


def test_policies_do_what_they_are_called() -> None:
    """Rows are free up to 16: a batch of 12 leaves few of them, which only the batch's own policies respect."""
    assert drafted("plain", 3) == 0
    fixed, alone, auto, admitted = (drafted(p, 12) for p in ("k = 4", "each alone", "auto", "k = 4, admitted"))
    assert fixed > 3
    assert alone > 2 * auto
    assert admitted < 0.7 * fixed
    assert drafted("auto", 1) > 2 * auto


def test_what_is_missing_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(load, "resolve", lambda name: None)
    with pytest.raises(ConfigError, match="the real model is not here; foredraft models fetch smollm2-135m"):
        run_load(tmp_path)
