"""The study of mixtures of experts in its toy size, and its parts: what is counted, what breaks even."""

from __future__ import annotations

import json
import re
from pathlib import Path
from xml.etree import ElementTree

import pytest
import torch

from foredraft import Engine, SamplingParams
from foredraft.lab.moe import QUICK, break_even, cost_at, oracle, run_moe
from foredraft.lab.moe_models import MoeSpec, distinct, experts_of_text, random_decoder, weights_of
from foredraft.lab.moe_page import page
from foredraft.lab.moe_schema import MoeStudy
from foredraft.lab.study import StudyReport
from foredraft.models.experts import touched
from foredraft.models.mlp import MoeMlp

SPEC = MoeSpec("small", width=64, layers=2, experts=6, top_k=2, intermediate=32, shared=16)


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> StudyReport[MoeStudy]:
    return run_moe(tmp_path_factory.mktemp("out"), seed=1, quick=True)


def test_json_is_the_study(report: StudyReport[MoeStudy]) -> None:
    text = report.json_path.read_text()
    assert MoeStudy.model_validate_json(text) == report.result
    assert {"command", "date", "commit", "machine"} <= json.loads(text)["provenance"].keys()
    assert str(Path.home()) not in text


def test_the_tables_follow_from_their_own_columns(report: StudyReport[MoeStudy]) -> None:
    for model, spec in zip(report.result.models, QUICK.specs, strict=True):
        assert [row.rows for row in model.rows] == list(QUICK.rows)
        assert model.rows[0].distinct == model.top_k  # one row takes its own experts
        for row in model.rows:
            assert row.independent == pytest.approx(touched(spec.experts, spec.top_k, row.rows))
            assert row.ratio == pytest.approx(row.ms / model.rows[0].ms)
            assert model.top_k <= row.distinct <= model.experts
        costs = {row.rows: row.ms for row in model.rows}
        for even in model.break_even:
            ratio = cost_at(costs, even.batch * (even.k + 1)) / cost_at(costs, even.batch)
            assert even.alpha == break_even(ratio, even.k)


def test_the_page_stands_alone(report: StudyReport[MoeStudy]) -> None:
    text = report.html_path.read_text(encoding="utf-8")
    assert "<script" not in text
    assert not re.search(r"url\(\s*['\"]?(https?:|//)|@import", text)
    pictures = re.findall(r"<svg.*?</svg>", text, flags=re.DOTALL)
    assert len(pictures) == 2
    for picture in pictures:
        ElementTree.fromstring(picture)
    never = report.result.models[0].break_even[0].model_copy(update={"alpha": None})
    model = report.result.models[0].model_copy(update={"break_even": (never,)})
    assert ">never " in page(report.result.model_copy(update={"models": (model, report.result.models[1])}))


def test_break_even_solves_its_equation() -> None:
    for k, alpha in ((1, 0.3), (4, 0.8), (8, 0.95)):
        ratio = sum(alpha**i for i in range(k + 1))
        assert break_even(ratio, k) == pytest.approx(alpha)
    assert break_even(3.0, 2) is None
    assert break_even(0.9, 4) == pytest.approx(0.0, abs=1e-9)
    assert cost_at({1: 1.0, 3: 2.0}, 2) == 1.5
    assert cost_at({1: 1.0, 3: 2.0}, 6) == 4.0


def test_experts_are_counted_as_the_model_chooses_them() -> None:
    """Against the router's own arithmetic, and without a trace left in the model."""
    model = random_decoder(SPEC.shape(40), seed=0)
    before = [layer.mlp.router for layer in model.layers if isinstance(layer.mlp, MoeMlp)]
    chosen = experts_of_text(model, list(range(30)))
    assert [c.shape for c in chosen] == [(30, 2)] * 2
    assert [layer.mlp.router for layer in model.layers if isinstance(layer.mlp, MoeMlp)] == before
    assert model.cache.bytes_in_use == 0
    ran: list[int] = []
    mlp = model.layers[0].mlp
    assert isinstance(mlp, MoeMlp)
    mlp.experts = tuple(_Counted(expert, i, ran) for i, expert in enumerate(mlp.experts))  # type: ignore[misc]
    again = experts_of_text(model, list(range(30)))
    assert sorted(set(ran)) == sorted(set(again[0].flatten().tolist()))
    rows = torch.tensor([[0, 1], [0, 1], [2, 3], [0, 4]])
    assert distinct(rows, 1) == 2
    assert distinct(rows, 4) == 5
    assert distinct(rows, 2) == pytest.approx((2 + 4 + 4) / 3)


class _Counted:
    def __init__(self, expert: object, number: int, ran: list[int]) -> None:
        self.expert, self.number, self.ran = expert, number, ran

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        self.ran.append(self.number)
        return self.expert(x)  # type: ignore[operator,no-any-return]


def test_random_weights_are_the_same_every_time_and_counted_right() -> None:
    shape = SPEC.shape(40)
    a, b = (random_decoder(shape, seed=0) for _ in range(2))
    params = SamplingParams(max_tokens=12, ignore_eos=True)
    texts = [Engine(target=model).generate([[1, 2, 3]], params)[0].token_ids for model in (a, b)]
    assert texts[0] == texts[1]
    # attention, router, experts, shared expert and its gate, norms, by hand
    d, kv = 64, 64
    layer = 2 * d * d + 2 * d * kv + 6 * d + 6 * 3 * d * 32 + 3 * d * 16 + d + 2 * d
    assert weights_of(shape) == 40 * d + d + 2 * layer


def test_the_oracle_is_right_as_often_as_it_says() -> None:
    text = [i % 40 for i in range(2000)]
    propose = oracle([text], 0.7, seed=0)
    drafts = [propose(tuple(text[:at]), 1)[0] == text[at] for at in range(16, 1990)]
    assert sum(drafts) / len(drafts) == pytest.approx(0.7, abs=0.03)
    assert propose(tuple(text[:50]), 3) == propose(tuple(text[:50]), 3)
