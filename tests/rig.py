"""The rig: small float64 table models whose next token depends on the whole recent prefix.

``chain`` mixes the last ``order`` tokens into a seed, so any misplaced token, position or cache row changes what
follows; top-2 gaps are kept above 1e-3 so that greedy decoding has one answer.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from functools import cache

from foredraft import Engine, SamplingParams
from foredraft.testing import ScriptedDrafter, TableModel

V = 8


def chain(
    seed: int = 0, vocab: int = V, order: int = 3, spread: float = 2.0
) -> Callable[[tuple[int, ...]], list[float]]:
    """A logits function of the last ``order`` tokens and of the length modulo 5."""

    @cache
    def of(tail: tuple[int, ...], phase: int) -> list[float]:
        rng = random.Random(f"{seed}/{tail}/{phase}")
        while True:
            logits = [rng.gauss(0, spread) for _ in range(vocab)]
            top = sorted(logits)[-2:]
            if top[1] - top[0] > 1e-3:
                return logits

    return lambda prefix: of(tuple(prefix[-order:]), len(prefix) % 5)


def model(seed: int = 0, vocab: int = V, **kwargs: object) -> TableModel:
    return TableModel(chain(seed, vocab), vocab, **kwargs)  # type: ignore[arg-type]


def plain(prompt: Sequence[int], params: SamplingParams, target: TableModel | None = None) -> list[int]:
    """What decoding without speculation writes."""
    return Engine(target=target or model()).generate([list(prompt)], params)[0].token_ids


def oracle(seed: int = 0, vocab: int = V, wrong: Callable[[int], bool] = lambda position: False) -> ScriptedDrafter:
    """Proposes what greedy decoding of ``chain(seed)`` would write, except at positions where ``wrong`` says so."""
    logits = chain(seed, vocab)

    def propose(prefix: tuple[int, ...], k: int) -> list[int]:
        ids = list(prefix)
        for _ in range(k):
            row = logits(tuple(ids))
            best = max(range(vocab), key=row.__getitem__)
            ids.append((best + 1) % vocab if wrong(len(ids)) else best)
        return ids[len(prefix) :]

    return ScriptedDrafter(propose)


def scheduled(drafter: ScriptedDrafter, lengths: Sequence[int]) -> ScriptedDrafter:
    """Cuts a drafter's proposals to the given lengths, one after the other, again and again."""
    state = {"step": 0}

    def propose(prefix: tuple[int, ...], k: int) -> Sequence[int]:
        n = min(k, lengths[state["step"] % len(lengths)])
        state["step"] += 1
        return list(drafter.propose_fn(prefix, n)) if n else []  # type: ignore[arg-type]

    return ScriptedDrafter(propose)
