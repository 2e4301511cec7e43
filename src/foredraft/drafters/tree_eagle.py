"""Nodes scored by an EAGLE-3 head, which keeps the rows of a growing tree itself."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from foredraft.drafters.base import DraftRequest
from foredraft.drafters.eagle import Eagle3Drafter
from foredraft.drafters.eagle_head import EagleHead, HeadSegment, HeadState
from foredraft.drafters.tree_growth import Growth
from foredraft.sampling.drafting import Children, possible


class EagleNodes(Eagle3Drafter):
    """An EAGLE-3 drafter as a :class:`~foredraft.drafters.tree.NodeScorer`."""

    name = "tree"

    def __init__(self, head: EagleHead) -> None:
        super().__init__(head)
        self.columns: Tensor | None = head.weights.token_ids
        self._features: dict[str, Tensor] = {}

    def roots(self, requests: Sequence[DraftRequest], depth: int) -> list[tuple[Tensor, int] | None]:
        jobs = [self._begin(request, depth) for request in requests]
        writing = [job for job in jobs if job is not None]
        found: list[tuple[Tensor, int] | None] = []
        self._features.clear()
        steps = zip(*self.head.step([job.segment for job in writing]), strict=True) if writing else iter(())
        for job in jobs:
            if job is None:
                found.append(None)
                continue
            logits, hidden = next(steps)
            job.read()
            self._features[job.request.id] = hidden[-1:]
            found.append((logits[-1], depth))
        return found

    @property
    def spines(self) -> bool:
        return self.head.draws

    def spine(
        self, requests: Sequence[DraftRequest], depths: Sequence[int], branch: int
    ) -> list[Sequence[Children] | None]:
        jobs = [self._begin(request, depth) for request, depth in zip(requests, depths, strict=True)]
        plans = [(job, plan) for job in jobs if job is not None and (plan := self._ahead(job)) is not None]
        planned = [(job, plan) for job, plan in plans if plan.controls is None]
        drafts = self._chains(planned, branch) if planned else []
        found: dict[str, Sequence[Children]] = {
            job.request.id: [possible(*level) for level in draft.siblings]
            for (job, _), draft in zip(planned, drafts, strict=True)
            if draft.tokens
        }
        return [found.get(request.id) for request in requests]

    def behind(self, trees: Sequence[Growth], new: Sequence[int]) -> list[Tensor]:
        segments = []
        for tree, n in zip(trees, new, strict=True):
            number = {node: i for i, node in enumerate(tree.scored)} | {-1: -1}
            parents = [number[tree.parents[node]] for node in tree.scored[-n:]]
            # row 0 of the features is the committed text's, row i + 1 that of the i-th scored node
            features = self._features[tree.request.id][[parent + 1 for parent in parents]]
            tokens = [tree.tokens[node] for node in tree.scored[-n:]]
            segments.append(HeadSegment(self._state(tree.request), tokens, features, parents))
        logits, hidden = self.head.step(segments)
        for tree, rows in zip(trees, hidden, strict=True):
            self._features[tree.request.id] = torch.cat((self._features[tree.request.id], rows))
        return logits

    def finish(self, requests: Sequence[DraftRequest]) -> None:
        for request in requests:
            text = self._texts.get(request.id)
            if text is not None and text.state is not None:
                text.state.drop()

    def _state(self, request: DraftRequest) -> HeadState:
        state = self._texts[request.id].state
        assert state is not None
        return state
