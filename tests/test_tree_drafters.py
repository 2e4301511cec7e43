"""Tree drafters: the text is the target's, trees are the best of their size, and nothing is left behind."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from rig import V, model, plain

from foredraft import Engine, SamplingParams, SpeculationConfig
from foredraft.drafters import DrafterContext
from foredraft.drafters.outlook import StepPrice
from foredraft.drafters.registry import create
from foredraft.drafters.tree import TreeDrafter
from foredraft.drafters.tree_growth import DynamicGrowth, StaticGrowth
from foredraft.drafters.tree_lookup import LookupTreeDrafter
from foredraft.drafters.tree_model import ModelNodes
from foredraft.drafters.tree_shape import RankRates, best_shape
from foredraft.errors import ConfigError, UnsupportedModelError
from foredraft.sampling import RequestNoise, RequestSampler, TokenLaw
from foredraft.testing.stats import goodness_of_fit
from foredraft.types import Draft, Verdict

PROMPTS = [[0], [1, 2, 3], [7, 7, 7, 7, 1]]


def trees(seed: int = 0, **options: Any) -> TreeDrafter:
    return TreeDrafter(ModelNodes(model(seed)), **options)


@pytest.mark.parametrize("k", [1, 4, 12, "auto"])
@pytest.mark.parametrize(
    "make", [trees, lambda: trees(9, branch=2), lambda: trees(static=True), lambda: LookupTreeDrafter(2, 1)]
)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_text_is_plain(make: Any, k: int | str, temperature: float) -> None:
    params = SamplingParams(max_tokens=30, temperature=temperature, seed=4, repetition_penalty=1.2)
    drafter = make()
    engine = Engine(target=model(), drafter=drafter, k=k)
    results = engine.generate(PROMPTS, params)
    assert [r.token_ids for r in results] == [plain(p, params) for p in PROMPTS]
    assert k == "auto" or sum(r.stats.num_accepted_draft_tokens for r in results) > 0
    assert not drafter._states
    if isinstance(drafter, TreeDrafter):
        drafter.scorer._pool.clear()  # type: ignore[attr-defined]
        assert drafter.scorer.model.cache.slots_in_use == 0  # type: ignore[attr-defined]


@pytest.mark.parametrize("rule", ["exact", "coupled", "rejection", "block"])
def test_a_perfect_drafter_is_accepted_to_the_end_of_a_path(rule: str) -> None:
    params = SamplingParams(max_tokens=60, temperature=float(rule != "exact"))
    config = SpeculationConfig(k=9, verify="auto" if rule == "exact" else rule)  # type: ignore[arg-type]
    results = Engine(target=model(), drafter=trees()).generate(PROMPTS, params, speculation=config)
    kinds = [kind for result in results for kind in result.kinds]
    assert "correction" not in kinds
    assert all(r.stats.mean_acceptance_length > 3.0 for r in results)  # type: ignore[operator]


def test_a_tree_accepts_more_than_a_chain_of_its_depth() -> None:
    """A drafter that is right with its second choice now and then."""
    params = SamplingParams(max_tokens=80)

    class Noisy(ModelNodes):
        def _fit(self, logits: torch.Tensor) -> torch.Tensor:
            top = super()._fit(logits)
            return top + 3.0 * (torch.arange(V) == int(1000 * abs(float(top[0]))) % V)

    counts = {}
    for branch in (1, 3):
        made = TreeDrafter(Noisy(model()), depth=4, branch=branch, nodes=12)
        results = Engine(target=model(), drafter=made, k=12).generate(PROMPTS, params)
        counts[branch] = sum(r.stats.num_steps for r in results)
    assert counts[3] < 0.85 * counts[1]


def test_models_with_a_short_context_draft_as_far_as_they_can() -> None:
    made = TreeDrafter(ModelNodes(model(max_context=20)))
    params = SamplingParams(max_tokens=40)
    [result] = Engine(target=model(), drafter=made, k=8).generate([[1, 2]], params)
    assert result.token_ids == plain([1, 2], params)
    depths = [s.positions for s in result.stats.trace]
    assert max(depths) > 1
    assert set(depths[-5:]) == {0}


# --- what is drawn


def sampler(rule: str, seed: int = 0, **controls: Any) -> RequestSampler:
    made = RequestSampler(TokenLaw(SamplingParams(temperature=1.0, **controls), [0], 4), RequestNoise(seed), rule)  # type: ignore[arg-type]
    made.anchor = 1
    return made


def test_siblings_are_drawn_without_replacement_from_what_they_say() -> None:
    logits = torch.tensor([[0.5, 0.0, -0.7, 1.0]], dtype=torch.float64)
    law = logits[0].softmax(-1)
    counts = torch.zeros(4, 4)
    for seed in range(2000):
        [children] = sampler("block", seed).children(logits, [(2,)], [2])
        a, b = children.tokens
        assert children.q is not None
        assert torch.allclose(children.q[0], law)
        assert float(children.q[1, a]) == 0.0
        assert torch.allclose(children.q[1], torch.where(torch.arange(4) == a, 0.0, law) / (1 - law[a]))
        counts[a, b] += 1
    wanted = law[:, None] * law[None] / (1 - law[:, None]) * (1 - torch.eye(4))
    assert goodness_of_fit(counts.flatten(), wanted.flatten()).p_value > 1e-3


def test_nodes_of_one_position_have_numbers_of_their_own() -> None:
    """Children behind two nodes of one depth must not be drawn from the same numbers."""
    flat = torch.zeros(2, 4, dtype=torch.float64)
    same = 0
    for seed in range(400):
        one, other = sampler("rejection", seed).children(flat, [(0,), (1,)], [1, 1])
        same += one.tokens == other.tokens
        assert sampler("rejection", seed).children(flat[:1], [(0,)], [1])[0].tokens == one.tokens  # asked again
    assert 60 < same < 140  # a quarter, if independent


def test_fewer_children_where_the_law_has_fewer_tokens() -> None:
    logits = torch.tensor([[0.5, 0.0, -0.7, 1.0]], dtype=torch.float64)
    for rule in ("exact", "coupled", "rejection"):
        [children] = sampler(rule, top_k=2).children(logits, [()], [4])
        assert children.tokens[:2] == [3, 0] or rule != "exact"
        assert len(children.tokens) == (4 if rule == "exact" else 2)  # greedy decoding has no filters
        assert (children.q is None) == (rule != "rejection")


def test_the_first_child_of_a_coupled_request_is_what_a_chain_would_draft() -> None:
    for seed in range(50):
        logits = torch.randn(1, 4, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
        made = sampler("coupled", seed)
        assert made.children(logits, [(3,)], [3])[0].tokens[0] == made.draw(logits[0], (3,))[0]


# --- shapes


def value(shape: Any, rates: tuple[float, ...]) -> float:
    chances = [rates[0]]
    for before, rate in itertools.pairwise(rates):
        chances.append(chances[-1] / before * (1 - before) * rate)
    values: list[float] = []
    ranks: dict[int, int] = {}
    for parent in shape:
        rank = ranks[parent] = ranks.get(parent, -1) + 1
        values.append((1.0 if parent < 0 else values[parent]) * chances[rank])
    return sum(values)


@pytest.mark.parametrize("rates", [(0.7, 0.3), (0.4, 0.4), (0.9, 0.1), (0.5, 0.5)])
def test_the_shape_is_the_best_of_its_size(rates: tuple[float, ...]) -> None:
    for n in range(1, 6):
        every = itertools.product(*[range(-1, node) for node in range(n)])
        legal = [s for s in every if max(s.count(parent) for parent in s) <= len(rates)]
        shape = best_shape(rates, n, n)
        assert sum(shape.values) == pytest.approx(max(value(s, rates) for s in legal), abs=1e-9)
        assert value(shape.parents, rates) == pytest.approx(sum(shape.values))
        assert list(shape.values) == sorted(shape.values, reverse=True)
        assert best_shape(rates, 5, 5).parents[:n] == shape.parents  # the first n nodes are the best n


def test_ranks_learn_from_what_was_tried() -> None:
    ranks = RankRates()
    tree = Draft((1, 2, 3, 4), None, (-1, -1, 1, 1))
    for _ in range(300):
        ranks.learn(tree, Verdict(2, 0, True, (1, 3)))
    assert ranks.rates(3) == (0.03, 0.97, 0.2)  # the third was never there
    for _ in range(300):
        ranks.learn(tree, Verdict(1, 0, False, (0,)))
    assert ranks.rates(1)[0] > 0.9


@pytest.mark.parametrize(("row", "deeper"), [(0.0, 16), (0.02, 8), (0.3, 1), (3.0, 0)])
def test_the_tree_follows_what_rows_cost(row: float, deeper: int) -> None:
    """Free rows: as many nodes as allowed. Dear ones: few, down to none."""
    drafter = trees()
    engine = Engine(target=model(), drafter=drafter)
    request = engine.submit([1], SamplingParams(max_tokens=20))
    drafter.start(request)
    outlook = drafter.outlook(request, 16, StepPrice(1.0, lambda n: 1.0 + row * n))
    planned = drafter._states[request.id].planned
    assert (planned == 16) if deeper == 16 else (deeper <= planned < 16 if deeper else planned == 0)
    if planned:
        assert len(outlook.reach) == planned
        # the cheapest node that was taken is worth its row, the next one would not be
        total = (1.0 + sum(outlook.reach)) / (1.0 + row * planned)
        assert outlook.reach[-1] >= row * total * 0.99
        assert drafter._states[request.id].floor == pytest.approx(row * total)


def test_dear_levels_make_flat_trees() -> None:
    depths = []
    for seconds in (0.0, 0.25, 0.8):
        drafter = trees()
        drafter._seconds.append(seconds)
        request = Engine(target=model(), drafter=drafter).submit([1], SamplingParams(max_tokens=20))
        drafter.start(request)
        outlook = drafter.outlook(request, 16, StepPrice(1.0, lambda n: 1.0 + 0.02 * n))
        planned = drafter._states[request.id].planned
        depths.append(best_shape(RankRates().rates(4), 16, 6).levels(planned))
        assert outlook.setup == depths[-1] * seconds or not planned
    assert depths[0] > depths[1] >= depths[2]


# --- growth


class Asked:
    """A request as growth sees it."""

    def __init__(self, rule: str) -> None:
        self.sampler = sampler(rule)


def grow(tree: Any, logits: torch.Tensor) -> Draft:
    while nodes := tree.frontier():
        tree.add(nodes, logits.expand(len(nodes), -1))
    return tree.draft()


def test_dynamic_trees_keep_the_likeliest_nodes() -> None:
    logits = torch.tensor([0.6, 0.3, 0.08, 0.02], dtype=torch.float64).log()
    made = grow(DynamicGrowth(Asked("exact"), 7, 3, 3), logits)  # type: ignore[arg-type]
    p = [0.6, 0.3, 0.08, 0.02]
    every = [path for n in (1, 2, 3) for path in itertools.product(range(4), repeat=n)]
    best = sorted(every, key=lambda path: -torch.tensor([p[x] for x in path]).prod())[:7]
    assert {made.path(row + 1) for row in range(made.k)} == set(best)
    few = grow(DynamicGrowth(Asked("exact"), 7, 3, 3, floor=0.2), logits)  # type: ignore[arg-type]
    assert {few.path(row + 1) for row in range(few.k)} == {(0,), (1,), (0, 0), (0, 0, 0)}


def test_static_trees_fill_their_shape_and_lose_what_has_no_token() -> None:
    shape = best_shape((0.5, 0.4, 0.3), 9, 3)
    flat = torch.zeros(4, dtype=torch.float64)
    for k in range(1, 10):
        made = grow(StaticGrowth(Asked("block"), k, shape), flat)  # type: ignore[arg-type]
        assert made.k == k
        assert made.depth == shape.levels(k)
        assert made.q is not None
        assert made.q.shape == (k, 4)
    narrow = torch.tensor([0.0, -torch.inf, 0.0, -torch.inf], dtype=torch.float64)
    made = grow(StaticGrowth(Asked("block"), 9, shape), narrow)  # type: ignore[arg-type]
    assert 2 <= made.k < 9
    assert set(made.tokens) == {0, 2}


# --- lookup


def propose(ids: list[int], k: int, drafter: LookupTreeDrafter | None = None) -> Draft:
    drafter = drafter or LookupTreeDrafter(2, 1)
    request = Engine(target=model(), drafter=drafter).submit(ids, SamplingParams(max_tokens=50))
    drafter.start(request)
    return drafter.propose(request, k)


def test_lookup_merges_continuations() -> None:
    #          1 2 -> 3 4        1 2 -> 5 6       1 2 -> 3 7
    ids = [1, 2, 3, 4, 0, 1, 2, 5, 6, 0, 1, 2, 3, 7, 0, 1, 2]
    paths = {draft.path(row + 1) for draft in [propose(ids, 12)] for row in range(draft.k)}
    assert {(3,), (5,), (3, 7), (3, 4), (5, 6)} <= paths
    assert len(paths) == 12
    assert propose(ids, 1).tokens == (3,)  # two of three, the latest among them
    assert propose([0, 1, 2, 3], 5).k == 0
    loop = propose([1, 2, 1, 2], 5)
    assert (loop.tokens[:3], loop.parents[:3]) == ((1, 2, 1), (-1, 0, 1))


# --- how it is asked for


def test_specs_and_their_refusals(monkeypatch: pytest.MonkeyPatch) -> None:
    context = DrafterContext(model(), None)
    monkeypatch.setattr(ModelNodes, "from_spec", classmethod(lambda cls, name, context: cls(model())))
    made = create("tree:small,depth=4,branch=3,nodes=12,static", context)
    assert isinstance(made, TreeDrafter)
    assert (made.depth, made.branch, made.nodes, made.static) == (4, 3, 12, True)
    for spec in ("tree", "tree:small,deep=4", "tree:small,depth=x", "tree:small,depth=0", "tree:small,nodes=500"):
        with pytest.raises(ConfigError, match="tree"):
            create(spec, context)
    for spec in ("lookup-tree:a", "lookup-tree:1,2,3", "lookup-tree:1,2"):
        with pytest.raises(ConfigError, match="lookup-tree"):
            create(spec, context)
    assert isinstance(create("lookup-tree:3", context), LookupTreeDrafter)


def test_targets_that_cannot_read_trees_are_refused_at_once() -> None:
    target = model()
    target.tree_problem = "its windows follow memory"  # type: ignore[attr-defined]
    for drafter in (trees(), LookupTreeDrafter()):
        with pytest.raises(UnsupportedModelError, match="cannot read a tree of tokens: its windows"):
            Engine(target=target, drafter=drafter)
