"""Load-aware admission: what is admitted, and that looking at drafts does not bend the law unless it peeks."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterator

import pytest
import torch
from rig import chain
from torch import Tensor

from foredraft import Engine, SamplingParams
from foredraft.drafters import ModelDrafter
from foredraft.engine.load import LoadAware, Trust, admit, confidences
from foredraft.testing import TableModel
from foredraft.testing.law import chains, law_of_drafts, plain_law
from foredraft.testing.stats import goodness_of_fit
from foredraft.types import Draft

P = torch.tensor([0.4, 0.3, 0.2, 0.1], dtype=torch.float64)


def p(prefix: tuple[int, ...]) -> Tensor:
    return P.roll(sum(prefix) % 4)


def q(prefix: tuple[int, ...]) -> Tensor:
    """Sure behind some tokens, unsure behind others."""
    sharp = torch.tensor([0.85, 0.05, 0.05, 0.05], dtype=torch.float64)
    flat = torch.tensor([0.2, 0.25, 0.3, 0.25], dtype=torch.float64)
    return (flat if sum(prefix) % 2 else sharp).roll(len(prefix))


Cost = Callable[[int], float]


def rising(rows: int) -> float:
    return {1: 1.0, 2: 1.35, 3: 1.75, 4: 1.8}[rows]


def bumpy(rows: int) -> float:
    """The second extra row is dear, the third is nearly free: it is worth looking beyond the second."""
    return {1: 1.0, 2: 1.35, 3: 2.0, 4: 2.05}[rows]


def admitted_drafts(
    reach_of: Callable[[Draft], list[float]], cost: Cost = rising, best: bool = False
) -> Callable[..., Iterator[tuple[Draft, float]]]:
    """All drafts of three tokens, each cut as admission says."""

    def of(prefix: tuple[int, ...]) -> Iterator[tuple[Draft, float]]:
        for draft, weight in chains(q, 3, prefix):
            reach = reach_of(draft)
            if best:  # searches the whole list, as only lengths that are fixed beforehand may be searched
                sums = [1 + sum(reach[:n]) for n in range(4)]
                n = max(range(4), key=lambda n: sums[n] / cost(1 + n))
            else:
                [n] = admit([reach], 1, cost)
            yield Draft(draft.tokens[:n], draft.q[:n] if n else None), weight  # type: ignore[index]

    return of


def by_law(draft: Draft) -> list[float]:
    assert draft.q is not None
    return list(itertools.accumulate(confidences(draft.q), lambda a, b: a * b))


def by_token(draft: Draft) -> list[float]:
    """Peeks: how probable the drawn tokens are."""
    assert draft.q is not None
    return list(itertools.accumulate(draft.q[range(draft.k), draft.tokens].tolist(), lambda a, b: a * b))


def error(drafts: Callable[..., Iterator[tuple[Draft, float]]], rule: str) -> float:
    law = law_of_drafts(rule, p, drafts, length=3)  # type: ignore[arg-type]
    return float((law - plain_law(p, length=3)).abs().max())


@pytest.mark.parametrize("rule", ["rejection", "block", "coupled"])
def test_admission_leaves_the_law_alone(rule: str) -> None:
    lengths = {draft.k for draft, _ in admitted_drafts(by_law)(())}
    assert len(lengths) > 1  # it does decide
    assert error(admitted_drafts(by_law), rule) < 1e-12


@pytest.mark.parametrize("rule", ["rejection", "block"])
def test_peeking_at_the_drawn_tokens_bends_the_law(rule: str) -> None:
    assert error(admitted_drafts(by_token), rule) > 1e-3


@pytest.mark.parametrize("rule", ["rejection", "block"])
def test_searching_the_whole_list_peeks(rule: str) -> None:
    assert error(admitted_drafts(by_law, bumpy, best=True), rule) > 1e-3
    assert error(admitted_drafts(by_law, bumpy), rule) < 1e-12


def test_the_best_tokens_of_the_batch_are_admitted_while_the_rate_rises() -> None:
    reach = [[0.9, 0.8, 0.1], [0.3, 0.2], []]
    assert admit(reach, 3, lambda rows: 1.0) == [3, 2, 0]  # rows are free
    assert admit(reach, 3, lambda rows: float(rows)) == [0, 0, 0]  # every row costs what it can bring at most
    assert admit(reach, 3, lambda rows: 1.0 + 0.15 * (rows - 3)) == [2, 0, 0]
    assert admit([], 0, lambda rows: 1.0) == []


def test_a_token_is_looked_at_only_after_those_before_it() -> None:
    class Guarded(list):  # type: ignore[type-arg]
        def __getitem__(self, j: int) -> float:  # type: ignore[override]
            asked.append(j)
            return super().__getitem__(j)

    asked: list[int] = []
    assert admit([Guarded([0.9, 0.05, 0.99])], 1, lambda rows: 1.0 + 0.3 * (rows - 1)) == [1]
    assert max(asked) == 1


def test_trust_learns_within_a_request() -> None:
    trust = Trust()
    before = trust.rate(0.9), trust.rate(0.3)
    assert before[0] > before[1]
    for _ in range(40):
        trust.learn([0.9, 0.3], 1)  # sure tokens are accepted, unsure ones are not
    assert trust.rate(0.9) > before[0]
    assert trust.rate(0.3) < 0.5 * before[1]
    assert trust.reach([0.9, 0.3]) == pytest.approx([trust.rate(0.9), trust.rate(0.9) * trust.rate(0.3)])


def test_the_engines_samples_have_the_law_while_drafts_are_cut() -> None:
    """Many sampled requests in one batch, on a clock on which rows cost time."""
    now = [0.0]

    class Timed(TableModel):
        def forward(self, segments, taps=()):  # type: ignore[no-untyped-def]
            now[0] += 0.01 + 0.0004 * sum(len(segment.tokens) for segment in segments)
            return super().forward(segments, taps)

    logits = chain(2, 4, spread=1.0)
    drafter = LoadAware(ModelDrafter(TableModel(chain(7, 4, spread=1.0), 4)))
    engine = Engine(target=Timed(logits, 4), drafter=drafter, k=3, verify="block", max_batch=48, clock=lambda: now[0])
    drafter.passes = engine.controller.passes
    each = [SamplingParams(temperature=1.0, max_tokens=4, seed=seed) for seed in range(1500)]
    results = engine.generate([[1, 2, 0]] * len(each), each)
    drafted = Counter(step.drafted for r in results for step in r.stats.trace[1:])
    assert len([n for n in drafted if n < 3]) > 1  # drafts were cut, to more than one length
    common = Counter(r.token_ids[0] for r in results).most_common(1)[0][0]
    counts = Counter(tuple(r.token_ids[1:3]) for r in results if r.token_ids[0] == common)
    law = {}
    for a, b in itertools.product(range(4), repeat=2):
        first = torch.tensor(logits((1, 2, 0, common)), dtype=torch.float64).softmax(-1)[a]
        law[a, b] = float(first * torch.tensor(logits((1, 2, 0, common, a)), dtype=torch.float64).softmax(-1)[b])
    pairs = list(law)
    assert goodness_of_fit([counts[pair] for pair in pairs], [law[pair] for pair in pairs]).p_value > 1e-3
