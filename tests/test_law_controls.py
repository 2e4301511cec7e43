"""Negative controls: known ways to get the law wrong, each of which the enumeration must expose."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pytest
import torch
from torch import Tensor

from foredraft.config import SamplingParams
from foredraft.sampling import TokenLaw, draw, race
from foredraft.testing.law import Prefix, chains, exact_law, law_of_drafts, plain_law
from foredraft.types import Draft, Verdict
from foredraft.verify import block, coupled, rejection

P = torch.tensor([0.4, 0.3, 0.2, 0.1], dtype=torch.float64)
Q = torch.tensor([0.1, 0.2, 0.3, 0.4], dtype=torch.float64)


def moving(row: Tensor) -> object:
    """A law that depends on the prefix: the row, rolled by the tokens before."""
    return lambda prefix: row.roll(sum(prefix) % 4)


p, q = moving(P), moving(Q)


def error(law: Tensor, wanted: Tensor) -> float:
    return float((law - wanted).abs().max())


# Each of these resembles a real rule and is wrong in one place.


def bonus_from_wrong_row(draft: Draft, p: Tensor, uniforms: Sequence[float], next_uniform: float) -> Verdict:
    verdict = rejection(draft, p, uniforms, next_uniform)
    return Verdict.chain(draft.k, draw(p[draft.k - 1], next_uniform), draft.k) if verdict.bonus else verdict


def correction_from_p(draft: Draft, p: Tensor, uniforms: Sequence[float], next_uniform: float) -> Verdict:
    verdict = rejection(draft, p, uniforms, next_uniform)
    return Verdict.chain(verdict.accepted, draw(p[verdict.accepted], next_uniform), draft.k)


def residual_of_wrong_row(draft: Draft, p: Tensor, uniforms: Sequence[float], next_uniform: float) -> Verdict:
    verdict = rejection(draft, p, uniforms, next_uniform)
    if verdict.bonus:
        return verdict
    rest = (p[verdict.accepted] - draft.q[0]).clamp(min=0)
    return Verdict.chain(verdict.accepted, draw(rest if rest.sum() > 0 else p[0], next_uniform), draft.k)


def ratio_upside_down(draft: Draft, p: Tensor, uniforms: Sequence[float], next_uniform: float) -> Verdict:
    swapped = rejection(Draft(draft.tokens, p[: draft.k]), torch.cat((draft.q, p[draft.k :])), uniforms, next_uniform)
    return Verdict.chain(swapped.accepted, rejection(draft, p, uniforms, next_uniform).next_token, draft.k)


def same_number_twice(draft: Draft, p: Tensor, uniforms: Sequence[float], next_uniform: float) -> Verdict:
    """The correction is drawn with the number that decided the first token."""
    return rejection(draft, p, uniforms, uniforms[0])


def block_with_tokenwise_residual(draft: Draft, p: Tensor, uniforms: Sequence[float], next_uniform: float) -> Verdict:
    verdict = block(draft, p, uniforms, next_uniform)
    if verdict.bonus:
        return verdict
    rest = (p[verdict.accepted] - draft.q[verdict.accepted]).clamp(min=0)
    return Verdict.chain(verdict.accepted, draw(rest, next_uniform), draft.k)


def block_that_stops_early(draft: Draft, p: Tensor, uniforms: Sequence[float], next_uniform: float) -> Verdict:
    """Token-wise order with block's thresholds: the first failure ends it, as if it were rejection."""
    accepted = 0
    for i in range(draft.k):
        prefix = Draft(draft.tokens[: i + 1], draft.q[: i + 1])
        if block(prefix, p[: i + 2], [1 - 1e-12] * i + [uniforms[i]], next_uniform).accepted <= i:
            break
        accepted = i + 1
    rest = (p[accepted] - draft.q[accepted]).clamp(min=0) if accepted < draft.k else p[accepted]
    return Verdict.chain(accepted, draw(rest, next_uniform), draft.k)


@pytest.mark.parametrize(
    "rule",
    [
        bonus_from_wrong_row,
        correction_from_p,
        residual_of_wrong_row,
        ratio_upside_down,
        same_number_twice,
        block_with_tokenwise_residual,
        block_that_stops_early,
    ],
)
def test_a_wrong_rule_is_exposed(rule: object) -> None:
    wanted = plain_law(p, 3)
    assert error(exact_law(rejection, p, q, 2, 3), wanted) < 1e-12
    assert error(exact_law(rule, p, q, 2, 3), wanted) > 1e-3


def filtered_law(row: Tensor, **controls: object) -> Tensor:
    law = TokenLaw(SamplingParams(temperature=1.0, **controls), (), 4)
    return law.probs(row.log()[None], [()])[0]


@pytest.mark.parametrize("rule", [rejection, block])
def test_raw_q_for_a_filtered_draft(rule: object) -> None:
    target, drafted = filtered_law(P, top_k=2), filtered_law(Q, top_k=2)
    assert target.tolist() == pytest.approx([4 / 7, 3 / 7, 0, 0])
    right = exact_law(rule, lambda _: target, lambda _: drafted, 1)
    assert right.tolist() == pytest.approx([4 / 7, 3 / 7, 0, 0], abs=1e-12)
    # The draft was drawn from the filtered law, the rule is told the raw one. Drawn from the raw one and told so,
    # all is well again: it is the mismatch that hurts.
    wrong = exact_law(rule, lambda _: target, lambda _: filtered_law(P.flip(0), top_k=3), 1, claimed_q=lambda _: Q)
    assert error(wrong, target) > 1e-3
    assert error(exact_law(rule, lambda _: target, lambda _: Q, 1), target) < 1e-12


def test_the_known_figure_of_raw_q() -> None:
    """Raw q in the residual: [.673, .327] instead of [.571, .429]."""
    target = filtered_law(P, top_k=2)

    def raw_residual(draft: Draft, p: Tensor, uniforms: Sequence[float], next_uniform: float) -> Verdict:
        verdict = rejection(draft, p, uniforms, next_uniform)
        return verdict if verdict.bonus else Verdict.chain(0, draw((p[0] - Q).clamp(min=0), next_uniform), 1)

    law = exact_law(raw_residual, lambda _: target, lambda _: filtered_law(Q, top_k=2), 1)
    assert law.tolist() == pytest.approx([0.673, 0.327, 0, 0], abs=1e-3)


@pytest.mark.parametrize("rule", [rejection, block])
def test_argmax_proposals_scored_with_a_softmax(rule: object) -> None:
    top = lambda prefix: int(q(prefix).argmax())  # noqa: E731
    assert error(exact_law(rule, p, top, 2, 2), plain_law(p, 2)) < 1e-12
    assert error(exact_law(rule, p, top, 2, 2, claimed_q=q), plain_law(p, 2)) > 1e-2


def test_q_of_lower_precision_than_the_draw() -> None:
    """A law rounded to bfloat16 is not the law that was drawn from; the enumeration sees even that."""
    rounded = lambda prefix: (r := q(prefix).bfloat16().double()) / r.sum()  # noqa: E731
    wrong = exact_law(rejection, p, lambda prefix: (x := q(prefix) ** 1.01) / x.sum(), 2, 2, claimed_q=rounded)
    assert error(wrong, plain_law(p, 2)) > 1e-5


def test_longest_match_among_independent_candidates() -> None:
    """Four candidates ab, ac, ad, ef, p(a) = p(e) = .5: choosing the longest match writes a too often."""
    a, b, c, d, e, f = range(6)
    first, second = torch.zeros(2, 6, dtype=torch.float64)
    first[[a, e]], second[[b, f]] = 0.5, 0.5
    law = lambda prefix: first if not prefix else second  # noqa: E731
    tree = Draft((a, b, a, c, a, d, e, f), None, (-1, 0, -1, 2, -1, 4, -1, 6))

    def longest_match(draft: Draft, p: Tensor, uniforms: Sequence[float], next_uniform: float) -> Verdict:
        best: tuple[int, ...] = ()
        for branch in range(0, 8, 2):
            # Each candidate is checked by an independent draw of the target.
            if draw(p[0], uniforms[branch]) != draft.tokens[branch]:
                continue
            match = draw(p[branch + 1], uniforms[branch + 1]) == draft.tokens[branch + 1]
            path = (branch, branch + 1) if match else (branch,)
            best = max(best, path, key=len)
        row = best[-1] + 1 if best else 0
        return Verdict(len(best), draw(p[row], next_uniform), len(best) == 2, best)

    wrong = law_of_drafts(longest_match, law, lambda prefix: [(tree, 1.0)] if not prefix else [(Draft(), 1.0)])
    assert float(wrong.sum()) == pytest.approx(1.0, abs=1e-12)
    assert float(wrong[a]) > 0.6

    def first_candidate(draft: Draft, p: Tensor, uniforms: Sequence[float], next_uniform: float) -> Verdict:
        verdict = rejection(Draft(draft.tokens[:2]), p[:3], uniforms[:2], next_uniform)
        return Verdict(verdict.accepted, verdict.next_token, verdict.bonus, tuple(range(verdict.accepted)))

    right = law_of_drafts(first_candidate, law, lambda prefix: [(tree, 1.0)] if not prefix else [(Draft(), 1.0)])
    assert error(right, first) < 1e-12


def test_a_coupled_rule_that_races_the_wrong_row(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(draft: Draft, p: Tensor, exponentials: Sequence[Tensor]) -> Verdict:
        verdict = coupled(draft, p, exponentials)
        return (
            Verdict.chain(draft.k, race(p[draft.k - 1], exponentials[draft.k]), draft.k) if verdict.bonus else verdict
        )

    assert error(exact_law("coupled", p, q, 2, 3), plain_law(p, 3)) < 1e-12
    monkeypatch.setattr("foredraft.testing.law.coupled", wrong)
    assert error(exact_law("coupled", p, q, 2, 3), plain_law(p, 3)) > 1e-3


@pytest.mark.parametrize("rule", [rejection, block])
def test_a_drafter_may_stop_at_a_token_that_it_drew_but_not_drop_it(rule: object) -> None:
    """Whether to go on may depend on what was drawn; whether to propose it may not."""

    def stops_at_zero(prefix: Prefix) -> Iterator[tuple[Draft, float]]:
        for draft, weight in chains(q, 1, prefix):
            if draft.tokens == (0,):
                yield draft, weight
                continue
            for longer, more in chains(q, 1, prefix + draft.tokens):
                yield Draft(draft.tokens + longer.tokens, torch.cat((draft.q, longer.q))), weight * more

    def drops_zero(prefix: Prefix) -> Iterator[tuple[Draft, float]]:
        for draft, weight in chains(q, 1, prefix):
            yield (Draft() if draft.tokens == (0,) else draft), weight

    assert error(law_of_drafts(rule, p, stops_at_zero, 3), plain_law(p, 3)) < 1e-12
    assert error(law_of_drafts(rule, p, drops_zero, 3), plain_law(p, 3)) > 1e-2


def test_prefix_is_not_forgotten() -> None:
    """A target whose rows are all taken at the committed prefix, drafts not seen."""
    blind = lambda prefix: p(prefix[:1])  # noqa: E731
    assert error(exact_law(rejection, blind, q, 2, 3), plain_law(p, 3)) > 1e-2


def test_prefix_type() -> None:
    seen: set[Prefix] = set()

    def record(prefix: Prefix) -> Tensor:
        seen.add(prefix)
        return P

    exact_law(rejection, record, lambda _: Q, 1, 1)
    assert seen == {(), (0,), (1,), (2,), (3,)}
