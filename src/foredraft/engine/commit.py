"""Commits what a verdict accepted: ends, stops and budgets hold at every token, inside a block too."""

from __future__ import annotations

import torch
from torch import Tensor

from foredraft.engine.request import Request
from foredraft.engine.result import StreamToken, TokenLogprob
from foredraft.types import Draft, TokenKind, Verdict


def commit(request: Request, draft: Draft, verdict: Verdict, logits: Tensor) -> int:
    """Appends the accepted tokens and the next one, up to the first that ends the request.

    Args:
        logits: ``[k+1, V]`` the target's rows, for log-probabilities.

    Returns:
        How many *drafted* tokens were committed; the cache may keep no more.
    """
    rows = [0, *(node + 1 for node in verdict.path)]
    tokens = [*(draft.tokens[node] for node in verdict.path), verdict.next_token]
    written = 0
    for i, token in enumerate(tokens):
        _append(request, token, _kind(draft, verdict, i))
        if not request.finished and request.law.ended(tokens[: i + 1]):
            request.finish_reason = "stop"
        if request.params.logprobs is not None:
            request.logprobs.append(token_logprob(logits[rows[i]], token, request.params.logprobs))
        written += 1
        if request.finished:
            break
    accepted = min(written, verdict.accepted)
    request.law.commit(tokens[:written])
    request.law.settle(draft.path(rows[written - 1]))
    request.stats.add(draft.k, accepted, -1 if draft.parents is None else draft.depth)
    return accepted


def _kind(draft: Draft, verdict: Verdict, i: int) -> TokenKind:
    if i < verdict.accepted:
        return "accepted"
    if not draft.k:
        return "plain"
    return "bonus" if verdict.bonus else "correction"


def _append(request: Request, token: int, kind: TokenKind) -> None:
    request.ids.append(token)
    request.kinds.append(kind)
    ends = token in request.end_ids
    text = "" if ends else request.stream.push(token)
    request.events.append(StreamToken(token, kind, text))
    if ends or request.stream.stopped:
        request.finish_reason = "stop"
    elif request.remaining <= 0:
        request.finish_reason = "length"


def token_logprob(logits: Tensor, token: int, top: int) -> TokenLogprob:
    """Log-probability of ``token``, and the likeliest ``top``, under the unfiltered ``[V]`` row."""
    wide = logits if logits.dtype == torch.float64 else logits.float()
    logprobs = wide - wide.logsumexp(-1)
    best = torch.topk(logprobs, min(top, logprobs.shape[-1]))
    pairs = tuple((int(i), float(v)) for v, i in zip(best.values, best.indices, strict=True))
    return TokenLogprob(token, float(logprobs[token]), pairs)
