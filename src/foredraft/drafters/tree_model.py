"""Nodes scored by a smaller causal model: one pass a level, with the tree mask that the target's pass has."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

import torch
from torch import Tensor

from foredraft.drafters.base import DraftRequest
from foredraft.drafters.model import ModelDrafter
from foredraft.drafters.tree_growth import Growth
from foredraft.errors import CacheFullError
from foredraft.models.base import Segment
from foredraft.sampling.drafting import Children


class ModelNodes(ModelDrafter):
    """A model drafter as a :class:`~foredraft.drafters.tree.NodeScorer`.

    Only committed text stays in the model's cache. A pass over a level carries the scored nodes above it again: there
    are few, and a slot keeps nothing of a tree but a path.
    """

    name = "tree"
    columns: Tensor | None = None
    spines = False

    def spine(
        self, requests: Sequence[DraftRequest], depths: Sequence[int], branch: int
    ) -> list[Sequence[Children] | None]:
        """A chain with siblings takes as many passes as a tree."""
        return [None] * len(requests)

    def roots(self, requests: Sequence[DraftRequest], depth: int) -> list[tuple[Tensor, int] | None]:
        jobs = [self._begin(request, depth) for request in requests]
        writing = [job for job in jobs if job is not None]
        rows = iter(self._read(writing)) if writing else iter(())
        return [None if job is None else (self._fit(next(rows)[-1]), job.k) for job in jobs]

    def behind(self, trees: Sequence[Growth], new: Sequence[int]) -> list[Tensor]:
        segments = [self._segment(tree, n) for tree, n in zip(trees, new, strict=True)]
        try:
            logits = self.model.forward(segments).logits
        except CacheFullError:
            if not self._pool.evict():
                raise
            return self.behind(trees, new)
        finally:
            for segment in segments:
                with contextlib.suppress(Exception):
                    self.model.cache.commit(segment.slot, 0)
        return [torch.stack([self._fit(row) for row in rows]) for rows in logits]

    def finish(self, requests: Sequence[DraftRequest]) -> None:
        """Nothing is left behind."""

    def _segment(self, tree: Growth, new: int) -> Segment:
        number = {node: i for i, node in enumerate(tree.scored)} | {-1: -1}
        tokens = [tree.tokens[node] for node in tree.scored]
        parents = [number[tree.parents[node]] for node in tree.scored]
        return Segment(self._states[tree.request.id].slot, tokens, len(tokens) - new, parents)
