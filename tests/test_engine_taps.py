"""A feature drafter gets the hidden states of exactly the positions that the cache kept, in order."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from rig import V, chain, oracle

from foredraft import Engine, SamplingParams
from foredraft.drafters import Drafter, DraftRequest
from foredraft.models.base import ForwardOutput, Segment
from foredraft.testing import TableModel
from foredraft.types import Draft, Verdict


class Tapped(TableModel):
    """Its hidden state at every layer is the token and its position."""

    def forward(self, segments: Sequence[Segment], taps: Sequence[int] = ()) -> ForwardOutput:
        starts = [self.cache.length(s.slot) for s in segments]
        output = super().forward(segments)
        rows = [
            torch.tensor([[[layer, token, start + i] for layer in taps] for i, token in enumerate(s.tokens)])
            for s, start in zip(segments, starts, strict=True)
        ]
        return ForwardOutput(output.logits, rows)


class Watching(Drafter):
    """Drafts with the oracle's errors and keeps what it is shown."""

    taps = (2, 5)

    def __init__(self) -> None:
        self.inner = oracle(wrong=lambda position: position % 4 == 0)
        self.seen: dict[str, list[list[int]]] = {}
        self.lengths: dict[str, list[int]] = {}

    def start(self, request: DraftRequest) -> None:
        self.seen[request.id], self.lengths[request.id] = [], []

    def propose(self, request: DraftRequest, k: int) -> Draft:
        return self.inner.propose(request, k)

    def observe(self, request: DraftRequest, verdict: Verdict | None, taps: torch.Tensor | None) -> None:
        assert taps is not None
        self.seen[request.id] += taps.tolist()
        self.lengths[request.id].append(len(request.ids))
        if verdict is not None:  # the taps end one before the last committed token
            assert len(self.seen[request.id]) == len(request.ids) - 1


@pytest.mark.parametrize("chunk", [3, 512])
def test_taps_follow_the_committed_text(chunk: int) -> None:
    drafter = Watching()
    engine = Engine(target=Tapped(chain(), V), drafter=drafter, k=5, max_step_tokens=chunk)
    requests = [engine.submit(prompt, SamplingParams(max_tokens=30)) for prompt in ([1, 2, 3, 4, 5, 6, 7], [3])]
    while engine.scheduler.busy:
        engine.step()
    for request in requests:
        expected = [[[layer, token, i] for layer in (2, 5)] for i, token in enumerate(request.ids[:-1])]
        assert drafter.seen[request.id] == expected
        assert drafter.lengths[request.id] == sorted(drafter.lengths[request.id])
