"""The request's own rule applied to its draft; a row without a law is an error only where the text reaches it."""

from __future__ import annotations

import torch
from torch import Tensor

from foredraft import verify
from foredraft.engine.request import Request
from foredraft.sampling.noise import Purpose
from foredraft.types import Draft, Verdict


def judge(request: Request, draft: Draft, logits: Tensor) -> Verdict:
    """Verifies the draft.

    A row may have no law: the model broke down there, a custom processor raised, every token is banned. Plain
    decoding would fail only if its text got to that row, so the same must hold here. The draft is judged whole all
    the same: dropping it because of where it leads would bend the law of what comes before. The rows that have no law
    stand in as uniform ones, whose numbers are never used for what is committed; if the text gets there, what
    precedes is delivered and the next step meets the row as its own first.

    Args:
        logits: ``[n, V]``, ``1 <= n <= k+1`` the target's rows: the last committed token's, then each drafted
            token's as far as the pass got.

    Raises:
        Exception: The first row has no law.
    """
    sound = len(logits)
    if sound == draft.k + 1:
        try:
            return _verdict(request, draft, logits)
        except Exception:
            sound = _sound_rows(request, draft, logits)
            if not 0 < sound <= draft.k:
                raise
    verdict = _verdict(request, draft, logits[:sound])
    if verdict.accepted < sound:
        return verdict
    return Verdict.chain(sound - 1, draft.tokens[sound - 1], draft.k)


def _verdict(request: Request, draft: Draft, logits: Tensor) -> Verdict:
    """The rule's verdict where rows from ``len(logits)`` on are stand-ins."""
    law, noise = request.law, request.noise
    law.rewind()
    anchor = len(request.ids)
    missing = draft.k + 1 - len(logits)
    paths = [draft.path(row) for row in range(len(logits))]
    if request.rule == "exact":
        return verify.exact(draft, [*law.argmax(logits, paths), *[0] * missing])
    p = law.probs(logits, paths)
    if missing:
        p = torch.cat((p, p.new_full((missing, p.shape[-1]), 1 / p.shape[-1])))
    if request.rule == "coupled":
        return verify.coupled(draft, p, noise.rows(anchor, draft.k + 1, p.shape[-1]))
    uniforms = [noise.uniform(Purpose.ACCEPT, position, anchor) for position in range(anchor, anchor + draft.k)]
    rule = verify.rejection if request.rule == "rejection" else verify.block
    return rule(draft, p, uniforms, noise.uniform(Purpose.NEXT, anchor, anchor))


def _sound_rows(request: Request, draft: Draft, logits: Tensor) -> int:
    """How many rows have a law before the first that has none."""
    paths = [draft.path(row) for row in range(len(logits))]
    for row in range(len(logits)):
        request.law.rewind()
        try:
            request.law.argmax(logits[: row + 1], paths[: row + 1])
        except Exception:
            return row
    return len(logits)
