"""Every rule for trees emits exactly the target's law: all trees and all outcomes of a step, summed in float64."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from test_law_enumeration import CONTROLS, pair, reference, token_law
from torch import Tensor

from foredraft.config import SamplingParams
from foredraft.sampling import draw
from foredraft.testing.law import Law, Prefix, chains, exact_law, expected_tokens, law_of_drafts, plain_law
from foredraft.testing.trees import trees
from foredraft.types import NO_DRAFT, Draft, Verdict
from foredraft.verify import rejection, rejection_tree, traversal
from foredraft.verify._tree import children, excess, share

ATOL = 1e-12
SAMPLED = ["rejection", "block"]
FORK = (-1, -1, 0, 1)  # two siblings, a child each
DEEP = (-1, -1, 0, 0, 1, 2, 2)  # depth 3, two siblings at every level
WIDE = (-1, -1, -1, 0, 1)  # three siblings


def model(seed: int, vocab: int = 3, scale: float = 1.2) -> Law:
    def row(prefix: Prefix) -> Tensor:
        generator = torch.Generator().manual_seed(hash((seed, *prefix)) % 2**31)
        return (torch.randn(vocab, generator=generator, dtype=torch.float64) * scale).softmax(-1)

    return row


def after_a_tree(p: Law, drafts: Callable[[], Any]) -> Callable[[Prefix], Any]:
    """The step under test drafts; those that complete the text do not."""
    return lambda prefix: [(NO_DRAFT, 1.0)] if prefix else drafts()


def error(rule: Any, p: Law, drafts: Callable[[], Any], length: int) -> float:
    law = law_of_drafts(rule, p, after_a_tree(p, drafts), length)
    assert float(law.sum()) == pytest.approx(1.0, abs=1e-12)
    return float((law - plain_law(p, length)).abs().max())


@pytest.mark.parametrize("shape", [(-1, -1), FORK, (-1, -1, 0, 0, 2, 3), DEEP])
@pytest.mark.parametrize("rule", SAMPLED)
def test_siblings_without_replacement(rule: str, shape: tuple[int, ...]) -> None:
    assert error(rule, model(1), lambda: trees(model(2), shape), 3) < ATOL


@pytest.mark.parametrize("rule", SAMPLED)
def test_three_siblings_of_four_tokens(rule: str) -> None:
    assert error(rule, model(1, 4), lambda: trees(model(2, 4), WIDE), 2) < ATOL


@pytest.mark.parametrize("shape", [(-1, -1), FORK, (-1, -1, 0, 0, 2)])
@pytest.mark.parametrize("rule", SAMPLED)
def test_siblings_with_replacement_may_be_equal(rule: str, shape: tuple[int, ...]) -> None:
    made = [draft for draft, _ in trees(model(2), shape, replace=True)]
    assert any(draft.tokens[0] == draft.tokens[1] for draft in made)
    assert error(rule, model(1), lambda: trees(model(2), shape, replace=True), 3) < ATOL


@pytest.mark.parametrize("tokens", [(0, 1, 2, 0, 1, 2, 0), (0, 0, 1, 1, 2, 1, 1), (2, 1, 2, 1, 0, 0, 1)])
@pytest.mark.parametrize("rule", [*SAMPLED, "coupled"])
def test_tokens_that_were_not_drawn_duplicates_included(rule: str, tokens: tuple[int, ...]) -> None:
    for shape in (DEEP, (-1, -1, -1, 0, 1, 2, 2), (-1, 0, 1, 1, 0, -1, 5)):
        assert error(rule, model(1), lambda shape=shape: [(Draft(tokens, None, shape), 1.0)], 4) < ATOL


@pytest.mark.parametrize("control", CONTROLS)
@pytest.mark.parametrize("rule", [*SAMPLED, "coupled"])
def test_emitted_law_is_the_targets_under_every_control(rule: Any, control: str) -> None:
    params = SamplingParams(**{"temperature": 1.0, **CONTROLS[control]})
    for situation in ("generic", "same", "disjoint", "one_hot"):
        target, p, q = pair(params, situation)
        shape = FORK if control in ("top_k", "top_p", "min_p", "typical_p", "all") else (-1, -1, 0)
        law = law_of_drafts(rule, p, after_a_tree(p, lambda q=q, shape=shape: trees(q, shape)), 2)
        wanted = plain_law(reference(params, target), 2)
        assert float((law - wanted).abs().max()) < ATOL, situation


@pytest.mark.parametrize("rule", SAMPLED)
def test_depth_three_with_filters(rule: str) -> None:
    params = SamplingParams(temperature=0.8, top_k=2, repetition_penalty=1.3, min_tokens=2)
    p, q = token_law(params, "target"), token_law(params, "drafts")
    shape = (-1, -1, 0, 0, 1, 1, 2, 2, 3, 4)
    assert error(rule, p, lambda: trees(q, shape), 4) < ATOL


@pytest.mark.parametrize("rule", [*SAMPLED, "coupled"])
def test_texts_over_many_tree_steps(rule: str) -> None:
    p, q = model(3), model(4)
    law = law_of_drafts(rule, p, lambda prefix: trees(q, (-1, -1, 0) if sum(prefix) % 2 else (-1, 0), prefix), 3)
    assert float((law - plain_law(p, 3)).abs().max()) < ATOL


@pytest.mark.parametrize("rule", SAMPLED)
def test_shapes_that_follow_what_was_drawn(rule: str) -> None:
    """Which node gets children may depend on all drawn so far, elder and younger siblings included."""

    def growing() -> Iterator[tuple[Draft, float]]:
        for draft, weight in trees(model(2), (-1, -1)):
            favourite = 0 if draft.tokens[1] == 2 else 1
            for child, more in chains(model(2), 1 + draft.tokens[0] % 2, (draft.tokens[favourite],)):
                parents = (-1, -1, favourite, 2)[: 2 + child.k]
                yield Draft(draft.tokens + child.tokens, torch.cat((draft.q, child.q)), parents), weight * more

    assert error(rule, model(1), growing, 3) < ATOL


def test_greedy_walks_into_the_argmax() -> None:
    one_hot = lambda prefix: torch.eye(3, dtype=torch.float64)[int(model(1)(prefix).argmax())]  # noqa: E731
    for rule in ("exact", *SAMPLED, "coupled"):
        assert error(rule, one_hot, lambda: trees(model(2), FORK), 3) < ATOL


@pytest.mark.parametrize("rules", [("rejection", rejection_tree), ("block", traversal)])
def test_on_chains_the_rules_are_those_for_chains(rules: tuple[str, Any]) -> None:
    name, rule = rules
    p, q = model(5), model(6)
    for k in range(4):
        for proposal in (q, lambda prefix: int(q(prefix).argmax())):
            as_tree, as_chain = (exact_law(r, p, proposal, k, 3) for r in (rule, name))
            assert float((as_tree - as_chain).abs().max()) < ATOL
            assert expected_tokens(rule, p, proposal, k) == pytest.approx(expected_tokens(name, p, proposal, k))


def accepted(rule: Any, p: Law, drafts: Iterator[tuple[Draft, float]]) -> float:
    from foredraft.testing.law import _step

    return sum(n * weight for _, n, weight in _step(rule, p, drafts, ()))


def test_traversal_never_accepts_less_and_siblings_help() -> None:
    gains = []
    for seed in range(6):
        p, q = model(seed), model(seed + 50)
        by = {rule: accepted(rule, p, trees(q, FORK)) for rule in SAMPLED}
        gains.append(by["block"] - by["rejection"])
        assert accepted("block", p, trees(q, (-1, 0))) < by["block"]
    assert min(gains) > -1e-12
    assert max(gains) > 0.02


# --- what must not pass


def test_draws_without_replacement_must_not_claim_q_itself() -> None:
    """Drawn without replacement, reported as if with: q is not the law that was drawn from."""
    p, q = model(3, 5), model(4, 5)

    def lying() -> Iterator[tuple[Draft, float]]:
        for draft, weight in trees(q, (-1, -1)):
            yield Draft(draft.tokens, torch.stack([q(()), q(())]), draft.parents), weight

    for rule in SAMPLED:
        assert error(rule, p, lying, 1) > 1e-3


def test_a_rejected_sibling_must_change_what_is_left() -> None:
    def forgetful(draft: Draft, p: Tensor, uniforms: Sequence[float], next_uniform: float) -> Verdict:
        follow, row, path = children(draft, p.shape[0]), 0, []
        while True:
            rest = p[row]
            hit = next((n for n in follow[row] if uniforms[n] < share(rest, draft, n, 1.0)), None)
            if hit is None:
                left = excess(1.0, rest, draft, follow[row][-1], 1.0) if follow[row] else rest
                return Verdict(len(path), draw(left, next_uniform), not follow[row], tuple(path))
            path.append(hit)
            row = hit + 1

    assert error(forgetful, model(1), lambda: trees(model(2), (-1,)), 1) < ATOL  # right on a chain
    assert error(forgetful, model(1), lambda: trees(model(2), (-1, -1)), 1) > 1e-3


def test_picking_the_longest_match_among_candidates_is_not_lossless() -> None:
    """Each leaf's path is verified on its own by a lossless rule, and the longest accepted one is kept."""

    def longest(draft: Draft, p: Tensor, uniforms: Sequence[float], next_uniform: float) -> Verdict:
        if not draft.k:
            return rejection(draft, p, uniforms, next_uniform)
        best = Verdict(-1, 0, False)
        for leaf in range(2, 4):
            nodes = [leaf - 2, leaf]
            chain = Draft(tuple(draft.tokens[n] for n in nodes), draft.q[nodes])
            rows = p[[0, nodes[0] + 1, nodes[1] + 1]]
            found = rejection(chain, rows, [uniforms[n] for n in nodes], next_uniform)
            if found.accepted > best.accepted:
                best = Verdict(found.accepted, found.next_token, found.bonus, tuple(nodes[: found.accepted]))
        return best

    assert error(longest, model(1), lambda: trees(model(2), FORK, replace=True), 2) > 1e-3


def test_dropping_a_drawn_node_is_not_lossless() -> None:
    """Reranking a sampled tree by the drafter's confidence bends the law: only trees that were not drawn may be cut."""
    q = model(2)

    def reranked() -> Iterator[tuple[Draft, float]]:
        for draft, weight in trees(q, (-1, -1)):
            best = max((0, 1), key=lambda node: float(q(())[draft.tokens[node]]))
            yield Draft((draft.tokens[best],), q(())[None], (-1,)), weight

    for rule in SAMPLED:
        assert error(rule, model(1), reranked, 1) > 1e-3
