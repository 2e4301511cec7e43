"""One token tree in the making, level by level, over whatever gives logits behind its nodes."""

from __future__ import annotations

import heapq
from collections.abc import Sequence

import torch
from torch import Tensor

from foredraft.drafters.base import DraftRequest
from foredraft.drafters.tree_shape import Shape
from foredraft.sampling.drafting import Children
from foredraft.types import NO_DRAFT, Draft


class Growth:
    """What the two ways to grow a tree have in common.

    Nodes whose logits are wanted are *scored*, a level at a time: :meth:`frontier` names them, :meth:`add` takes
    the logits behind them. The committed text is node -1 and scored first.

    Args:
        depth: Most levels.
        columns: ``[D]`` the tokens whose logits are scored, None for the whole vocabulary.

    Attributes:
        tokens, parents: Of every node so far, as in :class:`~foredraft.types.Draft`.
        scored: Nodes that were scored, in order.
    """

    def __init__(self, request: DraftRequest, depth: int, columns: Tensor | None = None) -> None:
        self.request = request
        self._columns = columns
        self.tokens: list[int] = []
        self.parents: list[int] = []
        self.scored: list[int] = []
        self._levels = depth
        self._last: list[int] = [-1]  # nodes of the deepest level

    def frontier(self) -> list[int]:
        """The nodes to score next, or none if the tree is grown."""
        nodes = self._choose() if self._levels else []
        self.scored += [node for node in nodes if node >= 0]
        return nodes

    def add(self, nodes: Sequence[int], logits: Tensor) -> None:
        """Grows children behind scored nodes, from ``[n, V]`` or ``[n, D]`` logits."""
        self._levels -= 1
        paths = [self.path(node) for node in nodes]
        grown = self.request.sampler.children(logits, paths, [self._count(node) for node in nodes], self._columns)
        self._last = []
        for node, children in zip(nodes, grown, strict=True):
            self._put(node, children)

    def _put(self, node: int, children: Children) -> None:
        for token in children.tokens:
            self._last.append(len(self.tokens))
            self.tokens.append(token)
            self.parents.append(node)
        self._keep(node, children)

    def path(self, node: int) -> list[int]:
        """Tokens from the committed text to a node."""
        path: list[int] = []
        while node >= 0:
            path.append(self.tokens[node])
            node = self.parents[node]
        return path[::-1]

    def draft(self) -> Draft:
        """The tree."""
        raise NotImplementedError

    def _choose(self) -> list[int]:
        raise NotImplementedError

    def _count(self, node: int) -> int:
        raise NotImplementedError

    def _keep(self, node: int, children: Children) -> None:
        raise NotImplementedError


class DynamicGrowth(Growth):
    """Grows where the drafter is sure, then keeps the likeliest nodes of the whole tree (EAGLE-2, arXiv 2406.16858).

    A node's weight is the product of the drafter's probabilities along its path. At every level the ``beam`` heaviest
    nodes are scored and get ``branch`` children each; in the end the k heaviest of all nodes are kept. None is heavier
    than its parent, so that they form a tree. Nodes are dropped after their tokens are known, so this is for requests
    whose tokens may be dropped.

    Args:
        k: Most nodes.
        floor: Lighter nodes are not worth verifying.
        beam: None for as many as ``branch``. With one, the tree is a *spine*: the drafter's own chain, whose tokens
            have siblings. It takes no more steps of the drafter than the chain, nor wider ones.
    """

    def __init__(
        self,
        request: DraftRequest,
        k: int,
        depth: int,
        branch: int,
        floor: float = 0.0,
        columns: Tensor | None = None,
        beam: int | None = None,
    ) -> None:
        super().__init__(request, min(depth, k), columns)
        self._k, self._branch, self._floor = k, branch, floor
        self._beam = beam or branch
        self._weights: list[float] = []

    def _choose(self) -> list[int]:
        if self._last == [-1]:
            return [-1]
        # A child is never heavier than its parent: one that many others outweigh already will not be kept.
        least = heapq.nlargest(self._k, self._weights)[-1] if len(self._weights) >= self._k else 0.0
        likely = [node for node in self._last if self._weights[node] > max(least, self._floor)]
        return heapq.nlargest(self._beam, likely, key=self._weights.__getitem__)

    def fill(self, levels: Sequence[Children]) -> None:
        """Takes a whole spine: of each level the children of the eldest node of the level above."""
        node = -1
        for children in levels:
            eldest = len(self.tokens)
            self._put(node, children)
            node = eldest

    def _count(self, node: int) -> int:
        return self._branch

    def _keep(self, node: int, children: Children) -> None:
        above = 1.0 if node < 0 else self._weights[node]
        self._weights += [above * weight for weight in children.weights]

    def draft(self) -> Draft:
        order = sorted(range(len(self.tokens)), key=lambda node: -self._weights[node])[: self._k]
        kept = sorted(node for node in order if self._weights[node] >= self._floor or node == order[0])
        number = {node: i for i, node in enumerate(kept)} | {-1: -1}
        tokens = tuple(self.tokens[node] for node in kept)
        return Draft(tokens, None, tuple(number[self.parents[node]] for node in kept)) if kept else NO_DRAFT


class StaticGrowth(Growth):
    """Fills a shape that was fixed before anything was drawn, as requests with sampled drafts need it.

    Args:
        shape: Where the nodes are.
        k: How many of its first nodes are wanted. There are fewer where a law has fewer tokens than a node wants.
    """

    def __init__(self, request: DraftRequest, k: int, shape: Shape, columns: Tensor | None = None) -> None:
        super().__init__(request, shape.levels(k), columns)
        self._shape, self._k = shape, k
        self._counts = shape.counts(k)
        self._place = {-1: -1}  # of each node in the shape
        self._laws: list[Tensor] = []

    def _choose(self) -> list[int]:
        return [node for node in self._last if self._count(node)]

    def _count(self, node: int) -> int:
        return self._counts[self._place[node] + 1]

    def _keep(self, node: int, children: Children) -> None:
        places = [i for i in range(self._k) if self._shape.parents[i] == self._place[node]]
        first = len(self._place) - 1
        for i, place in enumerate(places[: len(children.tokens)]):
            self._place[first + i] = place
        if children.q is not None:
            self._laws += list(children.q)

    def draft(self) -> Draft:
        q = torch.stack(self._laws) if self._laws else None
        return Draft(tuple(self.tokens), q, tuple(self.parents)) if self.tokens else NO_DRAFT
