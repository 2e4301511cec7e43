"""The request's own rule applied to its draft; a row without a law is an error only where the text reaches it."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from foredraft import verify
from foredraft.engine.request import Request
from foredraft.sampling.noise import Purpose
from foredraft.types import Draft, Verdict


def judge(request: Request, draft: Draft, logits: Tensor, likeliest: Sequence[int] = ()) -> Verdict:
    """Verifies the draft.

    A row may have no law: the model broke down there, a custom processor raised, every token is banned. Plain
    decoding would fail only if its text got to that row, so the same must hold here. The draft is judged whole all
    the same: dropping it because of where it leads would bend the law of what comes before. The rows that have no law
    stand in as uniform ones, whose numbers are never used for what is committed; if the text gets there, what
    precedes is delivered and the next step meets the row as its own first.

    Args:
        logits: ``[n, V]``, ``1 <= n <= k+1`` the target's rows: the last committed token's, then each drafted
            token's as far as the pass got.
        likeliest: Where each row's largest logit is, if the pass has told.

    Raises:
        Exception: The first row has no law.
    """
    if request.rule == "exact" and request.law.plain and len(likeliest) == draft.k + 1 and min(likeliest) >= 0:
        return _exact(draft, likeliest)
    rows = list(range(logits.shape[0]))
    if len(rows) == draft.k + 1:
        try:
            return _verdict(request, draft, logits, rows)
        except Exception:
            rows = _sound_rows(request, draft, logits)
            if not 0 < len(rows) <= draft.k:
                raise
    return _cut(_verdict(request, draft, logits[rows], rows), draft, set(rows))


def _verdict(request: Request, draft: Draft, logits: Tensor, rows: Sequence[int]) -> Verdict:
    """The rule's verdict where only ``rows`` of the pass have a law, and ``logits`` are theirs."""
    law, noise = request.law, request.noise
    law.rewind()
    anchor, tree = len(request.ids), draft.parents is not None
    paths = [draft.path(row) for row in rows]
    if request.rule == "exact":
        tokens = [0] * (draft.k + 1)
        for row, token in zip(rows, law.argmax(logits, paths), strict=True):
            tokens[row] = token
        return _exact(draft, tokens)
    whole = len(rows) > draft.k
    if request.rule == "coupled":
        laws = law.laws(logits, paths) if whole else _stood_in(law.probs(logits, paths), draft, rows)
        noise_rows = noise.rows(anchor, draft.depth + 1, laws.shape[-1])
        return (verify.coupled_tree if tree else verify.coupled)(draft, laws, noise_rows)
    next_uniform = noise.uniform(Purpose.NEXT, anchor, anchor)
    if tree:
        p = _stood_in(law.probs(logits, paths), draft, rows)
        of_tree = verify.rejection_tree if request.rule == "rejection" else verify.traversal
        return of_tree(draft, p, noise.uniforms(Purpose.TREE_ACCEPT, 0, anchor, draft.k), next_uniform)
    rule = verify.rejection if request.rule == "rejection" else verify.block
    uniforms = noise.uniforms(Purpose.ACCEPT, anchor, anchor, draft.k)
    if whole:  # the rules need few numbers, and few rows
        return rule(draft, law.laws(logits, paths), uniforms, next_uniform)
    return rule(draft, _stood_in(law.probs(logits, paths), draft, rows), uniforms, next_uniform)


def _exact(draft: Draft, tokens: Sequence[int]) -> Verdict:
    return (verify.exact if draft.parents is None else verify.exact_tree)(draft, tokens)


def _stood_in(p: Tensor, draft: Draft, rows: Sequence[int]) -> Tensor:
    """``[k+1, V]``: the laws of ``rows``, and uniform ones for those that have none."""
    if len(rows) > draft.k:
        return p
    whole = p.new_full((draft.k + 1, p.shape[-1]), 1 / p.shape[-1])
    whole[rows] = p
    return whole


def _cut(verdict: Verdict, draft: Draft, sound: set[int]) -> Verdict:
    """Ends the accepted path before the first row that has no law; the token that leads there is the last one."""
    for depth, node in enumerate(verdict.path):
        if node + 1 not in sound:
            return Verdict(depth, draft.tokens[node], False, verdict.path[:depth])
    return verdict


def _sound_rows(request: Request, draft: Draft, logits: Tensor) -> list[int]:
    """The rows that have a law, and whose path leads through such rows only; none if the first has none."""
    above: list[list[int]] = []  # of each row, the rows of its path, itself last; empty if one of them has no law
    for row in range(len(logits)):
        before = [] if not row else above[row - 1 if draft.parents is None else draft.parents[row - 1] + 1]
        path = [*before, row] if before or not row else []
        try:
            request.law.rewind()
            request.law.argmax(logits[path], [draft.path(each) for each in path])
        except Exception:
            path = []
        above.append(path)
    return [row for row, path in enumerate(above) if path]
