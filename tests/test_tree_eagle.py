"""Trees over an EAGLE-3 head: every node is scored as if its path had been drafted alone; the text is the target's."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from test_eagle_drafter import PROMPTS, head_for, target  # noqa: F401  (a fixture)
from torch import Tensor

from foredraft import Engine, SamplingParams
from foredraft.drafters.eagle import Eagle3Drafter
from foredraft.drafters.eagle_head import EagleHead, HeadSegment
from foredraft.drafters.tree import TreeDrafter
from foredraft.drafters.tree_eagle import EagleNodes
from foredraft.drafters.tree_growth import Growth
from foredraft.drafters.tree_shape import best_shape
from foredraft.errors import ConfigError
from foredraft.kernels import available
from foredraft.models.decoder import Decoder

PARAMS = SamplingParams(max_tokens=20, ignore_eos=True)


class Compared(EagleNodes):
    """Scores each new node a second time, along its path alone."""

    seen = 0

    def behind(self, trees: Sequence[Growth], new: Sequence[int]) -> list[Tensor]:
        rows = super().behind(trees, new)
        for tree, n, logits in zip(trees, new, rows, strict=True):
            state = self._state(tree.request)
            pending, state._pending = state._pending, []
            kept = state._kv.clone()
            for node, row in zip(tree.scored[-n:], logits, strict=True):
                feature = self._features[tree.request.id][:1]
                for token in tree.path(node):
                    [alone], [feature] = self.head.step([HeadSegment(state, [token], feature)])
                assert torch.allclose(row, alone[0], atol=1e-5)
                state.drop()
                self.seen += 1
            state._pending, state._kv = pending, kept
        return rows


def test_every_node_is_scored_along_its_own_path(target: Decoder) -> None:  # noqa: F811
    nodes = Compared(head_for(target))
    drafter = TreeDrafter(nodes, depth=4, branch=3, nodes=12)
    results = Engine(target, drafter, k=12, max_step_tokens=16).generate(PROMPTS, PARAMS)
    assert [r.token_ids for r in results] == [r.token_ids for r in Engine(target).generate(PROMPTS, PARAMS)]
    assert nodes.seen > 100
    assert not nodes._texts


def test_one_branch_drafts_the_chain(target: Decoder) -> None:  # noqa: F811
    chain = Engine(target, Eagle3Drafter(head_for(target)), k=4).generate(PROMPTS, PARAMS)
    tree = Engine(target, TreeDrafter(EagleNodes(head_for(target)), branch=1), k=4).generate(PROMPTS, PARAMS)
    assert [r.stats.trace for r in tree] == [r.stats.trace for r in chain]


@pytest.mark.skipif(not available(), reason="no compiled kernels")
@pytest.mark.parametrize("k", [3, 9, "auto"])
def test_a_spine_drafted_at_once_is_the_one_grown_level_by_level(
    target: Decoder,  # noqa: F811
    k: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls = []
    steps = EagleHead.step
    monkeypatch.setattr(EagleHead, "step", lambda *args: calls.append(args) or steps(*args))

    def run() -> tuple[list[list[int]], list[Any], int]:
        calls.clear()
        clock = itertools.count().__next__
        drafter = TreeDrafter(EagleNodes(head_for(target, table=True)), depth=5, beam=1, clock=clock)
        results = Engine(target, drafter, k=k).generate(PROMPTS, PARAMS)
        return [r.token_ids for r in results], [r.stats.trace for r in results], len(calls)

    texts, traces, slow = run()
    assert texts == [r.token_ids for r in Engine(target).generate(PROMPTS, PARAMS)]
    assert slow == 0
    if k == "auto":  # which follows the clock
        return
    monkeypatch.setattr(EagleNodes, "spines", False)
    grown = run()
    assert grown[:2] == (texts, traces)
    assert grown[2] > 0
    wide = Engine(target, TreeDrafter(EagleNodes(head_for(target)), depth=5), k=k).generate(PROMPTS, PARAMS)
    assert ([r.stats.trace for r in wide] == traces) == (k == 3)  # children of the text alone


def test_one_node_a_level_is_the_default_where_it_is_quick(target: Decoder) -> None:  # noqa: F811
    assert TreeDrafter(EagleNodes(head_for(target, table=True))).beam == (1 if available() else 4)
    assert TreeDrafter(EagleNodes(head_for(target))).beam == 4
    assert TreeDrafter(EagleNodes(head_for(target, table=True)), beam=3).beam == 3
    with pytest.raises(ConfigError, match="beam must be 1"):
        TreeDrafter(EagleNodes(head_for(target)), beam=0)


def test_only_eldest_children_of_a_spine_have_children() -> None:
    spine = best_shape((0.7, 0.5, 0.3), 12, 5, spine=True)
    eldest = {min(i for i, own in enumerate(spine.parents) if own == parent) for parent in set(spine.parents)}
    assert {parent for parent in spine.parents if parent >= 0} <= eldest
    assert max(spine.depths) == 5
    assert best_shape((0.7, 0.5, 0.3), 12, 5) != spine


@pytest.mark.parametrize("static", [False, True])
def test_a_seed_gives_the_text_of_plain_decoding(target: Decoder, static: bool) -> None:  # noqa: F811
    params = SamplingParams(temperature=0.9, top_p=0.9, max_tokens=20, seed=5, ignore_eos=True)
    drafter = TreeDrafter(EagleNodes(head_for(target)), static=static)
    drafted = Engine(target, drafter, k=9).generate(PROMPTS, params)
    assert [r.token_ids for r in drafted] == [r.token_ids for r in Engine(target).generate(PROMPTS, params)]


@pytest.mark.parametrize("verify", ["rejection", "block"])
def test_sampled_trees_run_to_the_end(target: Decoder, verify: str) -> None:  # noqa: F811
    """A head that cannot propose all tokens, filters, and states of its own between steps."""
    params = SamplingParams(temperature=1.0, top_k=4, max_tokens=20, ignore_eos=True)
    drafter = TreeDrafter(EagleNodes(head_for(target)), depth=3, branch=3)
    results = Engine(target, drafter, k=8, verify=verify).generate(PROMPTS, params)
    assert all(len(r.token_ids) == 20 for r in results)
    assert sum(r.stats.num_draft_tokens for r in results) > 50
    assert max(s.positions for r in results for s in r.stats.trace) == 3
