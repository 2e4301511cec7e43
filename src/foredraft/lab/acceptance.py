"""Table A: how many drafted tokens are accepted; and the trials shown in the first picture."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from foredraft.lab.corpus import Corpus
from foredraft.lab.progress import Progress
from foredraft.lab.rounds import RULES, Tokens, judge, play_rounds
from foredraft.lab.schema import AcceptanceRow, Strip, TableA
from foredraft.lab.stats import expected_accepted, fit_alpha, mean_interval, share_interval
from foredraft.models.base import Target


def random_contexts(
    held_out: Sequence[Sequence[int]], n: int, length: int, generator: torch.Generator
) -> list[list[int]]:
    """``n`` windows of ``length`` characters that end at random held-out positions."""
    blocks = [block for block in held_out if len(block) >= length]
    room = torch.tensor([len(block) - length + 1 for block in blocks])
    picks = torch.randint(int(room.sum()), (n,), generator=generator)
    which = torch.searchsorted(room.cumsum(0), picks, right=True)
    starts = picks - (room.cumsum(0) - room)[which]
    return [list(blocks[b][s : s + length]) for b, s in zip(which.tolist(), starts.tolist(), strict=True)]


def table_a(
    target: Target,
    drafter: Target,
    held_out: Sequence[Tokens],
    *,
    ks: Sequence[int],
    trials: int,
    context: int,
    seed: int,
    progress: Progress,
) -> TableA:
    """Measures acceptance by the token-wise rule, and by block verification on the same drafts."""
    progress.stage("table A: acceptance", trials * len(ks))
    token_wise: dict[int, list[int]] = {}
    block_wise: dict[int, list[int]] = {}
    for k in ks:
        generator = torch.Generator().manual_seed(seed * 1_000 + k)
        contexts = random_contexts(held_out, trials, context, generator)
        rounds = play_rounds(target, drafter, contexts, k, RULES["rejection"], generator)
        token_wise[k] = [r.verdict.accepted for r in rounds]
        block_wise[k] = [judge(RULES["block"], r.draft, r.p, generator).accepted for r in rounds]
        progress.advance(trials, f"k={k}")
    accepted = [a for k in ks for a in token_wise[k]]
    alpha = fit_alpha(accepted, [k for k in ks for _ in token_wise[k]])
    return TableA(alpha=alpha, rows=tuple(_row(k, token_wise[k], block_wise[k], alpha) for k in ks))


def _row(k: int, accepted: Sequence[int], block: Sequence[int], alpha: float) -> AcceptanceRow:
    mean, interval = mean_interval(accepted)
    block_mean, block_interval = mean_interval(block)
    full = sum(a == k for a in accepted)
    return AcceptanceRow(
        k=k,
        trials=len(accepted),
        mean_accepted=mean,
        mean_interval=interval,
        all_accepted=full / len(accepted),
        all_interval=share_interval(full, len(accepted)),
        predicted=expected_accepted(alpha, k),
        block_mean_accepted=block_mean,
        block_interval=block_interval,
        by_accepted=tuple(accepted.count(n) for n in range(k + 1)),
    )


def strips(
    target: Target,
    drafter: Target,
    held_out: Sequence[Tokens],
    corpus: Corpus,
    *,
    k: int,
    n: int,
    context: int,
    seed: int,
) -> tuple[Strip, ...]:
    """``n`` trials in the order they were drawn, none picked by hand."""
    generator = torch.Generator().manual_seed(seed)
    contexts = random_contexts(held_out, n, context, generator)
    return tuple(
        Strip(
            context=corpus.decode(r.context),
            drafted=tuple(corpus.decode([t]) for t in r.draft.tokens),
            accepted=r.verdict.accepted,
            next=corpus.decode([r.verdict.next_token]),
        )
        for r in play_rounds(target, drafter, contexts, k, RULES["rejection"], generator)
    )
