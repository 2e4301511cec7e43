"""Mixtures of experts: what several rows touch, what the engine expects of them, and what it makes of measurements."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers as tf
from models_support import make_hf, save_and_load

from foredraft import Engine, SamplingParams, kernels
from foredraft.config import SpeculationConfig
from foredraft.engine.controller import Acceptance, Candidate, Controller
from foredraft.engine.costs import PassCosts
from foredraft.models.experts import PassPrior, pass_prior, prior_of_module, touched
from foredraft.models.fused import FusedDecoder
from foredraft.models.linear import dense_linear
from foredraft.models.packed import packed_linear
from foredraft.testing import ScriptedDrafter, TableModel

MIXTRAL = pass_prior(dense=0.3, expert=0.35, experts=8, top_k=2)


def test_touched_is_what_independent_routing_touches() -> None:
    torch.manual_seed(0)
    for experts, top_k, rows in ((8, 2, 1), (8, 2, 5), (60, 4, 9)):
        drawn = torch.rand(4000, rows, experts).argsort(-1)[..., :top_k].flatten(1)
        seen = torch.zeros(4000, experts).scatter_(1, drawn, 1.0).sum(-1).mean()
        assert touched(experts, top_k, rows) == pytest.approx(float(seen), rel=0.01)
    assert touched(8, 2, 0) == 0
    assert touched(4, 4, 3) == 4


def test_a_prior_counts_the_weights_that_a_pass_reads() -> None:
    assert MIXTRAL(1) == 1
    assert MIXTRAL(10_000) == pytest.approx((0.3 + 8 * 0.35) / (0.3 + 2 * 0.35))
    assert all(MIXTRAL(n) <= MIXTRAL(n + 1) for n in range(1, 40))


@pytest.mark.parametrize("family", ["mixtral", "qwen2_moe", "qwen3_moe"])
def test_both_kinds_of_model_know_their_experts(family: str, tmp_path: Path) -> None:
    model = make_hf(family)
    target = save_and_load(model, tmp_path)
    ours, theirs = target.pass_prior, prior_of_module(model, model.config)
    assert ours is not None
    assert theirs is not None
    for rows in (1, 2, 5, 30):
        assert ours(rows) == pytest.approx(theirs(rows), rel=0.02)
    engine = Engine(target=target)
    assert engine.controller.passes.prior(3) == pytest.approx(ours(3))


def test_a_model_without_experts_has_no_prior(tmp_path: Path) -> None:
    assert save_and_load(make_hf("llama"), tmp_path, make_linear=dense_linear).pass_prior is None
    assert prior_of_module(tf.GPT2LMHeadModel(tf.GPT2Config(n_layer=1, n_embd=32, n_head=2)), tf.GPT2Config()) is None


def test_estimates_follow_the_prior_until_passes_say_otherwise() -> None:
    costs = PassCosts(MIXTRAL)
    costs.observe(1, 0.01)
    for rows in (2, 5, 9):
        assert costs.estimate(rows) == pytest.approx(0.01 * MIXTRAL(rows))
    for _ in range(3):  # rows are free after all
        costs.observe(5, 0.01)
    assert costs.estimate(5) == pytest.approx(0.01, rel=0.05)
    assert costs.estimate(3) == pytest.approx(0.01, rel=0.05)  # no dearer than five
    beyond = costs.estimate(9)
    assert beyond is not None
    assert 0.01 <= beyond < 0.01 * MIXTRAL(9)


def test_measured_experts_are_interpolated_along_the_curve() -> None:
    """A straight line between 1 and 17 rows would promise that 3 rows cost little."""
    flat, curved = PassCosts(), PassCosts(MIXTRAL)
    for costs in (flat, curved):
        for _ in range(3):
            costs.observe(1, 0.01)
            costs.observe(17, 0.01 * MIXTRAL(17))
    assert curved.estimate(3) == pytest.approx(0.01 * MIXTRAL(3), rel=1e-6)
    assert flat.estimate(3) < 0.8 * 0.01 * MIXTRAL(3)  # type: ignore[operator]


def chosen(prior: PassPrior | None, requests: int, rate: float, measured: PassPrior | None = None) -> int:
    """Tokens that the controller drafts for a batch of which it has seen plain steps, and others if ``measured``."""
    controller = Controller(prior)
    for rows in (requests, *(range(requests, 12 * requests) if measured else ())):
        for _ in range(3):
            controller.passes.observe(rows, 0.01 * (measured(rows) if measured else 1.0))
    seen = [Acceptance(accepted=20 * rate, rejected=20 * (1 - rate)) for _ in range(requests)]
    return sum(controller.choose([Candidate(a, 8, SpeculationConfig()) for a in seen], requests))


def test_fewer_tokens_are_drafted_for_experts_before_and_after_measuring() -> None:
    for requests in (1, 4):
        dense = chosen(None, requests, 0.25)
        assert dense > 0
        assert chosen(MIXTRAL, requests, 0.25) < dense
        assert chosen(MIXTRAL, requests, 0.25, measured=MIXTRAL) < chosen(
            None, requests, 0.25, measured=lambda rows: 1.0
        )
    assert chosen(MIXTRAL, 2, 0.97) > 0  # where nearly all is accepted it pays all the same


def test_the_engine_learns_it_from_a_real_run() -> None:
    """A target whose passes cost what its experts cost, by the clock that the engine reads."""
    now = [0.0]

    class Timed(TableModel):
        cost: PassPrior | None = None

        def forward(self, segments, taps=()):  # type: ignore[no-untyped-def]
            rows = sum(len(segment.tokens) for segment in segments)
            now[0] += 0.01 * (self.cost(rows) if self.cost else 1.0)
            return super().forward(segments, taps)

    def drafted(cost: PassPrior | None) -> float:
        target = Timed(lambda prefix: [float(i == (prefix[-1] + 1) % 7) for i in range(7)], 7)
        target.cost = target.pass_prior = cost  # type: ignore[attr-defined]

        def propose(prefix: tuple[int, ...], k: int) -> list[int]:  # every other token is wrong
            return [(prefix[-1] + 1 + i + (len(prefix) + i) % 2) % 7 for i in range(k)]

        engine = Engine(target=target, drafter=ScriptedDrafter(propose), clock=lambda: now[0])
        results = engine.generate([[0]] * 2, SamplingParams(max_tokens=200))
        return sum(r.stats.num_draft_tokens for r in results) / sum(r.stats.num_steps for r in results)

    assert drafted(MIXTRAL) < 0.7 * drafted(None)
    assert drafted(None) > 1


@pytest.mark.skipif(not kernels.available(), reason="no kernels")
def test_a_large_batch_does_not_believe_rows_to_be_free_that_it_never_ran(tmp_path: Path) -> None:
    """Sixteen requests that begin together must not all draft a long way before anybody knows the price."""
    target = FusedDecoder(save_and_load(make_hf("llama"), tmp_path, make_linear=packed_linear("float32")))
    prior = target.pass_prior
    assert prior(1) == 1
    assert 2 < prior(8) < 3  # as measured: docs/benchmarks.md

    def drafted(prior: PassPrior | None, requests: int) -> int:
        controller = Controller(prior)
        controller.passes.observe(requests, 0.03)
        speculation = SpeculationConfig(k="auto")
        return sum(controller.choose([Candidate(Acceptance(), 8, speculation) for _ in range(requests)], requests))

    assert drafted(prior, 16) == 0
    assert drafted(None, 16) > 12
    assert drafted(prior, 1) > 0


def test_a_request_alone_tries_although_the_prior_is_dark() -> None:
    controller, state = Controller(lambda rows: 1 + 2 * (rows - 1)), Acceptance()
    ks = []
    for _ in range(40):
        ks += controller.choose([Candidate(state, 8, SpeculationConfig(k="auto"))], 1)
        controller.passes.observe(1 + ks[-1], 0.01)  # rows are free here
        state.update(ks[-1], ks[-1])
    assert ks[:15] == [0] * 15
    assert min(ks[20:]) > 0
