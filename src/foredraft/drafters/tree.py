"""Token trees over any drafter that can give logits behind the nodes of a tree; see docs/trees.md."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol, Self

from torch import Tensor

from foredraft.drafters.base import Drafter, DrafterContext, DraftRequest, require_trees
from foredraft.drafters.outlook import Outlook, StepPrice
from foredraft.drafters.tree_growth import DynamicGrowth, Growth, StaticGrowth
from foredraft.drafters.tree_shape import RankRates, Shape, best_shape
from foredraft.errors import ConfigError
from foredraft.sampling.drafting import Children
from foredraft.types import NO_DRAFT, Draft, Verdict

log = logging.getLogger("foredraft")


class NodeScorer(Protocol):
    """A drafter that gives logits behind nodes. Besides this it is told all that a drafter is told.

    Attributes:
        columns: ``[D]`` int64, ascending: the tokens that it gives logits of; None for the whole vocabulary.
    """

    taps: tuple[int, ...]
    columns: Tensor | None

    def attach(self, context: DrafterContext) -> None: ...

    def start(self, request: DraftRequest) -> None: ...

    def observe(self, request: DraftRequest, verdict: Verdict | None, taps: Tensor | None) -> None: ...

    def stop(self, request: DraftRequest) -> None: ...

    def reset(self) -> None: ...

    def roots(self, requests: Sequence[DraftRequest], depth: int) -> list[tuple[Tensor, int] | None]:
        """``[V]`` or ``[D]`` logits behind each committed text, and how deep a tree may grow there; else None."""

    def behind(self, trees: Sequence[Growth], new: Sequence[int]) -> list[Tensor]:
        """``[n, V]`` or ``[n, D]`` logits behind the last ``n = new[i] >= 1`` scored nodes of each tree."""

    @property
    def spines(self) -> bool:
        """Whether :meth:`spine` is there: the scorer drafts a chain with siblings quicker than level by level."""

    def spine(
        self, requests: Sequence[DraftRequest], depths: Sequence[int], branch: int
    ) -> list[Sequence[Children] | None]:
        """The spine behind each committed text: of each level ``branch`` children of the likeliest node above.

        None where it must be grown level by level: other tokens than the likeliest are wanted, or none are there.
        """

    def finish(self, requests: Sequence[DraftRequest]) -> None:
        """Drops what the drafts have left behind; also after an error."""


@dataclass(slots=True)
class _State:
    """One request: how its trees fare, and the one under way.

    Attributes:
        planned: Nodes of the tree that pays best at present; 0 if none does.
        floor: Chance of acceptance under which a node of that tree costs more than it brings.
    """

    ranks: RankRates = field(default_factory=RankRates)
    planned: int = 0
    floor: float = 0.0
    draft: Draft = NO_DRAFT


class TreeDrafter(Drafter):
    """Drafts trees: dynamic ones (EAGLE-2) where tokens may be dropped, else of a shape fixed beforehand.

    Args:
        scorer: What gives logits behind nodes.
        depth: Longest path, >= 1.
        branch: Most children of a node, >= 1.
        nodes: Most nodes, >= 1.
        beam: Nodes of a level that are scored, >= 1: the heaviest. With one the tree is a chain whose tokens have
            siblings. None takes one where the scorer does that quicker than the rest, else ``branch``.
        static: Fix the shape beforehand in any case.
        clock: Monotonic seconds.
    """

    name = "tree"

    def __init__(
        self,
        scorer: NodeScorer,
        depth: int = 6,
        branch: int = 4,
        nodes: int = 16,
        beam: int | None = None,
        static: bool = False,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        beam = beam if beam is not None else 1 if scorer.spines else branch
        for option, value in (("depth", depth), ("branch", branch), ("nodes", nodes), ("beam", beam)):
            if not 1 <= value <= 128:
                raise ConfigError(f"{option} must be 1 … 128 (got {value})", field="drafter tree")
        self.scorer = scorer
        self.taps = scorer.taps
        self.depth, self.branch, self.nodes, self.beam, self.static = depth, branch, nodes, beam, static
        self._quick = beam == 1 and branch > 1 and scorer.spines and not static
        self.clock = clock
        self._states: dict[str, _State] = {}
        self._seconds: deque[float] = deque(maxlen=9)  # of the latest passes, one a level
        self._told = False

    @classmethod
    def from_spec(cls, argument: str | None, context: DrafterContext) -> Self:
        from foredraft.drafters import tree_spec  # it names drafters that this file must not import

        scorer, options = tree_spec.parse(argument, context)
        return cls(scorer, **options)

    def attach(self, context: DrafterContext) -> None:
        require_trees(context)
        self.scorer.attach(context)

    def start(self, request: DraftRequest) -> None:
        self._states[request.id] = _State()
        self.scorer.start(request)

    def outlook(self, request: DraftRequest, limit: int, price: StepPrice) -> Outlook:
        """The best tree by what each rank of children was worth so far and by what levels and rows cost."""
        state = self._states[request.id]
        shape = self._shape(state, min(limit, self.nodes))
        level = sorted(self._seconds)[len(self._seconds) // 2] if self._seconds else 0.0
        best, speed, expected = 0, price.tokens / price.seconds(0), price.tokens
        for n, value in enumerate(shape.values, 1):
            expected += value
            now = expected / (price.seconds(n) + shape.levels(n) * level)
            if now > speed:
                best, speed = n, now
        state.planned = best
        if best:
            state.floor = max(price.seconds(best) - price.seconds(best // 2), 0.0) / (best - best // 2) * speed
        n = best or len(shape.values)
        return Outlook(shape.values[:n], seconds=0.0, setup=shape.levels(n) * level, watched=False)

    def propose(self, request: DraftRequest, k: int) -> Draft:
        return self.propose_batch([request], [k])[0]

    def propose_batch(self, requests: Sequence[DraftRequest], ks: Sequence[int]) -> list[Draft]:
        asked = [(request, min(k, self.nodes)) for request, k in zip(requests, ks, strict=True) if k]
        drafts = dict.fromkeys((request.id for request in requests), NO_DRAFT)
        try:
            trees = self._spines(asked) if self._quick else []
            filled = {tree.request.id for tree in trees}
            asked = [pair for pair in asked if pair[0].id not in filled]
            roots = self.scorer.roots([request for request, _ in asked], self.depth)
            for tree in [*trees, *self._grow(asked, roots)]:
                drafts[tree.request.id] = self._states[tree.request.id].draft = tree.draft()
        finally:
            self.scorer.finish([request for request, _ in asked])
        return [drafts[request.id] for request in requests]

    def observe(self, request: DraftRequest, verdict: Verdict | None, taps: Tensor | None) -> None:
        self.scorer.observe(request, verdict, taps)
        state = self._states[request.id]
        if verdict is not None and state.draft.k:
            state.ranks.learn(state.draft, verdict)
            state.draft = NO_DRAFT

    def stop(self, request: DraftRequest) -> None:
        self._states.pop(request.id, None)
        self.scorer.stop(request)

    def reset(self) -> None:
        self.scorer.reset()

    def _shape(self, state: _State, nodes: int) -> Shape:
        return best_shape(state.ranks.rates(self.branch), nodes, self.depth, self.beam == 1)

    def _spines(self, asked: Sequence[tuple[DraftRequest, int]]) -> list[Growth]:
        """The trees that the scorer drafts at once; who is left is grown level by level."""
        depths = [self._levels(self._states[request.id], k) for request, k in asked]
        start = self.clock()
        found = self.scorer.spine([request for request, _ in asked], depths, self.branch)
        trees: list[Growth] = []
        for (request, k), depth, levels in zip(asked, depths, found, strict=True):
            if levels is not None:
                tree = DynamicGrowth(request, k, depth, self.branch, self._floor(request, k))
                tree.fill(levels)
                trees.append(tree)
        if trees:
            self._seconds.append((self.clock() - start) / max(depths))
        return trees

    def _levels(self, state: _State, k: int) -> int:
        """How deep a spine of k nodes shall be: as the best one is, or as can be if k was asked for."""
        return self._shape(state, k).levels(k) if k == state.planned else min(self.depth, k)

    def _floor(self, request: DraftRequest, k: int) -> float:
        state = self._states[request.id]
        return state.floor if k == state.planned else 0.0  # a length that was asked for is given in full

    def _grow(
        self, asked: Sequence[tuple[DraftRequest, int]], roots: Sequence[tuple[Tensor, int] | None]
    ) -> list[Growth]:
        trees: list[Growth] = []
        for (request, k), root in zip(asked, roots, strict=True):
            if root is not None:
                logits, depth = root
                trees.append(tree := self._tree(request, k, depth))
                tree.add(tree.frontier(), logits[None])
        growing = trees
        while growing := self._level(growing):
            pass
        return trees

    def _tree(self, request: DraftRequest, k: int, depth: int) -> Growth:
        state = self._states[request.id]
        if self.static or request.sampler.sampled:
            shape = best_shape(state.ranks.rates(self.branch), k, min(depth, self.depth))
            return StaticGrowth(request, k, shape, self.scorer.columns)
        floor, columns = self._floor(request, k), self.scorer.columns
        return DynamicGrowth(request, k, min(depth, self.depth), self.branch, floor, columns, self.beam)

    def _level(self, trees: Sequence[Growth]) -> list[Growth]:
        """Grows one level; returns the trees that may grow on.

        What was drawn stands. So where a pass or a draw fails, the trees are left as they are.
        """
        fronts = [(tree, nodes) for tree in trees if (nodes := tree.frontier())]
        if not fronts:
            return []
        growing = [tree for tree, _ in fronts]
        try:
            start = self.clock()
            rows = self.scorer.behind(growing, [len(nodes) for _, nodes in fronts])
            self._seconds.append(self.clock() - start)
        except Exception as error:
            if not self._told:
                log.warning("trees stay as deep as they are, since scoring a level failed: %s", error)
            self._told = True
            return []
        return [tree for (tree, nodes), logits in zip(fronts, rows, strict=True) if _added(tree, nodes, logits)]


def _added(tree: Growth, nodes: Sequence[int], logits: Tensor) -> bool:
    try:
        tree.add(nodes, logits)
    except Exception:
        return False
    return True
