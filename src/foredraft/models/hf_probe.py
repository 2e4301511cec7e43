"""Tries a model out before it is trusted: cached passes, roll backs and trees must give the logits of a fresh run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from foredraft.errors import ForedraftError, NumericalError, UnsupportedModelError
from foredraft.models.base import Segment

if TYPE_CHECKING:
    from foredraft.models.hf import HfTarget

LENGTH = 10
"""Tokens of the test text; more if the model has a window short enough to be passed."""
LONGEST_WINDOW = 64
"""Windows up to here are passed in the test. Longer ones would make it slow."""
TOLERANCE = 1e-3
"""Largest difference between logits that should be equal, root mean square over the spread of the logits, in float32
or float64. Wrong logits differ by about 1."""
TOLERANCE_HALF = 0.1
"""The same for 16-bit models, where sums of another order differ in the third digit of every layer."""


def check(target: HfTarget) -> int:
    """Tests cache and roll back on random tokens.

    Returns:
        Width of the logits.

    Raises:
        UnsupportedModelError: The model fails, is not causal, or leaves traces of tokens that were rolled back.
    """
    ids = _random_ids(target)
    cut = len(ids) // 2
    try:
        with torch.no_grad():
            whole = target.call(ids, use_cache=False).logits[0].double()
            fresh = _cached(target, ids, cut, junk=())
            again = _cached(target, ids, cut, junk=[(token + 1) % target.vocab_size for token in ids[cut : cut + 3]])
    except (ForedraftError, MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:  # anything that foreign model code may throw
        raise UnsupportedModelError(
            f"the forward pass of {type(target.model).__name__} fails on a test text "
            f"({type(error).__name__}: {str(error).strip()[:200]})",
            field="model",
            remedy="check that the model runs in transformers alone",
        ) from error
    if not (whole.isfinite().all() and fresh.isfinite().all()):
        raise NumericalError(
            f"{type(target.model).__name__} gives logits that are not numbers on a test text",
            field="dtype",
            remedy="try float32, or check the weights",
        )
    _require(target, distance(fresh, whole), "reading a text in two parts gives other logits than reading it at once")
    _require(target, distance(again, fresh), "tokens that were rolled back still change the logits")
    return int(whole.shape[-1])


def tree_problem(target: HfTarget) -> str | None:
    """Why the model cannot read a tree, found by comparing each of its paths with a chain; None if it can."""
    ids = _random_ids(target)
    if len(ids) < LENGTH:
        return "its context is too short to try one"
    prefix, (a, b, c, d, e) = ids[:4], ids[4:9]
    tokens, parents = [a, b, c, d], [-1, 0, 0, 1]
    slot = target.cache.allocate()
    try:
        _advance(target, slot, prefix)
        with torch.no_grad():
            rows = target._run(Segment(slot, tokens, parents=parents), [0, 1, 1, 2]).double()
        target.cache.set_pending(slot, [0, 1, 1, 2])
        target.cache.commit(slot, [0, 2])
        after = _advance(target, slot, [e])
        chains = [_cached(target, [*prefix, *path], len(prefix)) for path in ([a, b, d], [a, c, e])]
    except Exception as error:  # anything that foreign model code may throw at a mask of four dimensions
        return f"its forward pass fails on one ({type(error).__name__}: {str(error).strip()[:120]})"
    finally:
        target.cache.free(slot)
    pairs = [(rows[[0, 1, 3]], chains[0][4:]), (rows[[0, 2]], chains[1][4:6]), (after, chains[1][6:])]
    off = max(distance(got, right) for got, right in pairs)
    return None if off <= tolerance(target) else f"the logits of its paths differ from those of chains by {off:.2g}"


def distance(got: Tensor, right: Tensor) -> float:
    """Root mean square of the difference over the spread of the right logits: 0 if equal, about 1.4 if unrelated."""
    spread = right.std(-1).square().mean().sqrt().clamp_min(1e-12)
    return float((got - right).square().mean().sqrt() / spread)


def tolerance(target: HfTarget) -> float:
    return TOLERANCE if target.dtype in (torch.float32, torch.float64) else TOLERANCE_HALF


def _require(target: HfTarget, off: float, problem: str) -> None:
    limit = tolerance(target)
    if not off <= limit:
        raise UnsupportedModelError(
            f"{type(target.model).__name__}: {problem} (by {off:.2g} of their spread; {limit:g} is allowed)",
            field="model",
            remedy="use a causal model whose layers all attend to stored keys and values",
        )


def _random_ids(target: HfTarget) -> list[int]:
    length = max([LENGTH, *(window + 6 for window in target._windows if window <= LONGEST_WINDOW)])
    length = length if target.max_context is None else min(length, target.max_context)
    return torch.randint(target.vocab_size, (length,), generator=torch.Generator().manual_seed(0)).tolist()


def _cached(target: HfTarget, ids: Sequence[int], cut: int, junk: Sequence[int] = ()) -> Tensor:
    """Logits of a text read in two parts, ``[T, V]`` float64; ``junk`` is read between them and rolled back."""
    slot = target.cache.allocate()
    try:
        parts = [_advance(target, slot, ids[:cut])] if cut else []
        if junk:
            _advance(target, slot, junk)
            target.cache.rollback(slot, cut)
        parts.append(_advance(target, slot, ids[cut:]))
        return torch.cat(parts)
    finally:
        target.cache.free(slot)


def _advance(target: HfTarget, slot: int, tokens: Sequence[int]) -> Tensor:
    logits = target.forward([Segment(slot, tokens)]).logits[0].double()
    target.cache.commit(slot, len(tokens))
    return logits
