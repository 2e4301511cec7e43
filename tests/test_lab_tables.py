"""Tables A and C on table models whose laws are known exactly."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from foredraft.lab import exactness
from foredraft.lab.acceptance import random_contexts, strips, table_a
from foredraft.lab.corpus import Corpus
from foredraft.lab.exactness import table_c
from foredraft.lab.progress import NoProgress
from foredraft.lab.rounds import RULES, last_laws, play_rounds, row_laws
from foredraft.lab.schema import TableC
from foredraft.testing import TableModel
from foredraft.types import Draft, Verdict

V = 5
HELD_OUT = [[(7 * i + j * j) % V for j in range(200)] for i in range(3)]
CORPUS = Corpus("x", "x", "x", "abcde" * 100, "abcde", 0)


def model(sharpness: float, shift: int = 0) -> TableModel:
    """A law that depends on the last token: sharp or flat, agreeing with others of the same shift or not."""
    return TableModel(lambda prefix: [sharpness * math.cos(prefix[-1] + shift + 2 * x) for x in range(V)], V)


def test_contexts_are_windows_of_the_held_out_text() -> None:
    generator = torch.Generator().manual_seed(0)
    windows = random_contexts(HELD_OUT, 500, 198, generator)
    possible = [block[start : start + 198] for block in HELD_OUT for start in range(3)]
    assert all(window in possible for window in windows)
    assert all(block in windows for block in possible)  # all 9 are reached, the last ones too


def test_row_laws_are_the_models_own() -> None:
    target = model(1.0)
    sequence = HELD_OUT[0][:10]
    [rows] = row_laws(target, [sequence], [3])
    for i, row in enumerate(rows):
        expected = torch.softmax(torch.as_tensor(target.logits_fn(tuple(sequence[: 8 + i]))).double(), -1)
        torch.testing.assert_close(row, expected)
    torch.testing.assert_close(last_laws(target, [sequence])[0], rows[-1])
    assert target.cache.slots_in_use == 0


def test_drafts_are_drawn_from_the_law_that_they_report() -> None:
    target, drafter = model(1.0), model(0.5, shift=1)
    contexts = random_contexts(HELD_OUT, 40, 20, torch.Generator().manual_seed(1))
    for r in play_rounds(target, drafter, contexts, 3, RULES["rejection"], torch.Generator().manual_seed(2)):
        assert r.draft.q is not None
        prefix = (*r.context, *r.draft.tokens)
        for i in range(3):
            law = torch.softmax(torch.as_tensor(drafter.logits_fn(prefix[: 20 + i])).double(), -1)
            torch.testing.assert_close(r.draft.q[i], law)
    assert drafter.cache.slots_in_use == target.cache.slots_in_use == 0


def test_a_drafter_equal_to_the_target_is_always_accepted() -> None:
    same = table_a(model(1.0), model(1.0), HELD_OUT, ks=(1, 3), trials=50, context=20, seed=0, progress=NoProgress())
    assert same.alpha == 1.0
    assert [row.mean_accepted for row in same.rows] == [1.0, 3.0]
    assert all(row.all_accepted == 1.0 and row.block_mean_accepted == row.k for row in same.rows)


def test_acceptance_is_one_minus_total_variation() -> None:
    target, drafter = model(1.2), model(0.6, shift=1)
    table = table_a(target, drafter, HELD_OUT, ks=(1, 4), trials=1_500, context=20, seed=0, progress=NoProgress())
    one, four = table.rows
    contexts = random_contexts(HELD_OUT, 1_500, 20, torch.Generator().manual_seed(1))
    overlap = torch.minimum(last_laws(target, contexts), last_laws(drafter, contexts)).sum(-1).mean().item()
    assert one.mean_interval[0] - 0.02 < overlap < one.mean_interval[1] + 0.02
    assert one.mean_accepted == one.all_accepted
    assert sum(four.by_accepted) == four.trials
    assert sum(i * n for i, n in enumerate(four.by_accepted)) == pytest.approx(four.mean_accepted * four.trials)
    assert four.block_mean_accepted > four.mean_interval[0]
    assert four.predicted == pytest.approx(sum(table.alpha**i for i in range(1, 5)))


def test_strips_tell_what_happened_to_every_character() -> None:
    shown = strips(model(1.0), model(0.2), HELD_OUT, CORPUS, k=6, n=12, context=20, seed=0)
    assert len(shown) == 12
    for strip in shown:
        assert len(strip.drafted) == 6
        assert len(strip.context) == 20
        assert 0 <= strip.accepted <= 6
        if strip.accepted < 6:
            assert strip.next != strip.drafted[strip.accepted], "a rejected character has no mass in the residual"


def law_table() -> TableC:
    sizes = {"positions": 60, "samples": 4_000, "context": 20, "seed": 0}
    return table_c(model(1.5), model(1.0, shift=2), HELD_OUT, CORPUS, progress=NoProgress(), **sizes)


def test_every_rule_has_the_targets_law_and_the_wrong_one_has_not() -> None:
    table = law_table()
    verdicts = {row.name: row.within_noise for row in table.rows}
    assert verdicts == {
        "drafter's own law": False,
        "rejection": True,
        "block": True,
        "coupled": True,
        "direct": True,
        "naive": False,
    }
    assert table.tv_mean_interval[0] < table.tv_mean < table.tv_max
    assert table.rows[0].tv == table.tv_max
    assert table.noise_band[0] < table.noise_mean < table.noise_band[1]


def test_a_broken_rule_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    def greedy(draft: Draft, p: Tensor, _uniforms: object, _last: float) -> Verdict:
        accepted = int(p[0].argmax()) == draft.tokens[0]
        return Verdict.chain(draft.k if accepted else 0, int(p[0].argmax()), draft.k)

    monkeypatch.setitem(exactness.RULES, "block", greedy)
    verdicts = {row.name: row.within_noise for row in law_table().rows}
    assert not verdicts["block"]
    assert verdicts["rejection"]
