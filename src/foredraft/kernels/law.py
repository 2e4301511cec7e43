"""Laws of rows of scores, and draws from rows of probabilities, each in one call of the compiled kernels.

They compute what sampling/ and verify/ say in Python, which stays the reference and does the work where there are no
kernels. Each function takes float32 or float64 rows on the CPU that lie one after the other (:func:`suits`).
"""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Sequence
from ctypes import Array, byref, c_double, c_int64, c_void_p
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from foredraft.kernels import library

_TYPES = frozenset((torch.float32, torch.float64))


def suits(rows: Tensor) -> bool:
    """Whether the kernels are in use and can read these rows."""
    return rows.is_cpu and rows.dtype in _TYPES and rows.is_contiguous() and library.available()


class Controls(ctypes.Structure):
    """Temperature, filters, penalties and bias of one request; the fields are those of ``sampling.law``'s parts.

    Ids and counts are read where they lie, so that what is noted there later is seen.
    """

    _fields_ = (
        ("temperature", c_double),
        ("top_k", c_int64),
        ("top_p", c_double),
        ("min_p", c_double),
        ("repetition", c_double),
        ("presence", c_double),
        ("frequency", c_double),
        ("count", c_void_p),
        ("seen", c_void_p),
        ("seen_n", c_int64),
        ("biased", c_void_p),
        ("bias", c_void_p),
        ("biased_n", c_int64),
    )


@dataclass(frozen=True, slots=True, eq=False)
class Draws:
    """How the tokens of one draft are chosen, for a drafter whose kernels draft by themselves.

    Attributes:
        count: At most so many, at least one.
        controls: Temperature and filters; None takes the likeliest token, the lowest id on ties.
        uniforms: ``count`` numbers in ``[0, 1)``: draws by the inverse of the cumulative distribution, whose laws are
            wanted. None runs the races of the coupled rule.
        seed: Of the races' noise.
        position: Where the first of the tokens stands, for which there is noise.
        trust: The chance of each token to be accepted behind those before it, by ten classes of the drafter's
            probability of it, in the law that it was drawn from; None drafts as many as were asked for.
        least: With ``trust``, a draft ends with the token that makes the chance of all its tokens less than this.
    """

    count: int
    controls: Controls | None = None
    uniforms: Sequence[float] | None = None
    seed: int = 0
    position: int = 0
    trust: array[float] | None = None
    least: float = 0.0


def law(controls: Controls, logits: Tensor, paths: Sequence[Sequence[int]] | None) -> Tensor | None:
    """The law of each row.

    Args:
        logits: ``[n, V]``; not changed.
        paths: The drafted tokens before each row; None where there are no penalties.

    Returns:
        ``[n, V]`` of the same dtype; None if the reference must be asked: a row has no law (NaN, +inf, no token), or
        rounding decides what a filter keeps.
    """
    out = torch.empty_like(logits)
    return out if _law(controls, logits, logits.shape[0], paths, out.data_ptr(), None, None) else None


def chances(
    controls: Controls, logits: Tensor, paths: Sequence[Sequence[int]] | None, tokens: Sequence[int]
) -> list[float] | None:
    """The probability of one token in each of the first rows, which is what :func:`law` has there; None as there."""
    n = len(tokens)
    out = (c_double * n)()
    return list(out) if _law(controls, logits, n, paths, None, (c_int64 * n)(*tokens), out) else None


def _law(
    controls: Controls,
    logits: Tensor,
    n: int,
    paths: Sequence[Sequence[int]] | None,
    out: int | None,
    wanted: Array[c_int64] | None,
    chances: Array[c_double] | None,
) -> bool:
    tokens = starts = None
    if paths is not None:
        drafted = [token for path in paths for token in path]
        tokens = (c_int64 * len(drafted))(*drafted)
        starts = (c_int64 * (n + 1))(0, *accumulate(map(len, paths)))
    sound: int = library.library().fd_law(
        byref(controls),
        logits.data_ptr(),
        logits.dtype == torch.float64,
        n,
        logits.shape[1],
        tokens,
        starts,
        out,
        wanted,
        chances,
        torch.get_num_threads(),
        library.isa(),
    )
    return sound == n


def argmax(scores: Tensor) -> list[int] | None:
    """The first index of the largest score of each of the ``[n, V]`` rows; None if one holds NaN or nothing finite."""
    n, width = scores.shape
    tokens = (c_int64 * n)()
    wide = scores.dtype == torch.float64
    threads = torch.get_num_threads()
    sound = library.library().fd_argmax(scores.data_ptr(), wide, n, width, tokens, threads, library.isa())
    return list(tokens) if sound == n else None


def masses(rows: Tensor, tokens: Sequence[int] = ()) -> tuple[list[float], list[float], list[float]]:
    """Of ``[n, V]`` rows: their sums, their least entries, and those of the first rows at one token each."""
    n, width = rows.shape
    wanted = (c_int64 * n)(*tokens, *[-1] * (n - len(tokens)))
    sums, least, picked = (c_double * n)(), (c_double * n)(), (c_double * n)()
    wide = rows.dtype == torch.float64
    threads = torch.get_num_threads()
    library.library().fd_masses(rows.data_ptr(), wide, n, width, wanted, sums, least, picked, threads, library.isa())
    return list(sums), list(least), list(picked)[: len(tokens)]


def draw(
    p: Tensor, u: float, weight: float = 1.0, q: Tensor | None = None, q_weight: float = 0.0, without: int = -1
) -> tuple[int, float]:
    """Draws from ``max(weight * p - q_weight * q, 0)`` by the inverse of the cumulative distribution, in float64.

    Args:
        p: ``[V]``.
        u: In ``[0, 1)``; below 0 to be told the mass alone.
        q: ``[V]`` of p's dtype, or None for none.
        without: A token that is left out; -1 for none.

    Returns:
        The token and the mass; -1 for the token if the mass is 0, or not finite.
    """
    mass = c_double()
    token = library.library().fd_draw(
        p.data_ptr(),
        None if q is None else q.data_ptr(),
        p.dtype == torch.float64,
        p.shape[0],
        weight,
        q_weight,
        without,
        u,
        byref(mass),
        library.isa(),
    )
    return token, mass.value


def law_draw(
    controls: Controls, logits: Tensor, row: int, path: Sequence[int], u: float, weight: float, without: int
) -> tuple[int, float] | None:
    """:func:`draw` from ``weight`` times the :func:`law` of a row of ``[n, V]``, which is not kept; None as there."""
    mass = c_double()
    token = library.library().fd_law_draw(
        byref(controls), *_row(logits, row, path), weight, without, u, byref(mass), library.isa()
    )
    return None if token == -2 else (token, mass.value)


def law_race(controls: Controls, logits: Tensor, row: int, path: Sequence[int], seed: int, position: int) -> int | None:
    """:func:`foredraft.kernels.race.race` over that law; None as there."""
    threads, isa = torch.get_num_threads(), library.isa()
    token = library.library().fd_law_race(byref(controls), *_row(logits, row, path), seed, position, threads, isa)
    return None if token == -2 else int(token)


def _row(logits: Tensor, row: int, path: Sequence[int]) -> tuple[int, bool, int, Array[c_int64], int]:
    """One of the rows, and the path before it, as the library takes them."""
    wide, width = logits.dtype == torch.float64, logits.shape[1]
    return logits.data_ptr() + row * width * (8 if wide else 4), wide, width, (c_int64 * len(path))(*path), len(path)


__all__ = ["Controls", "Draws", "argmax", "chances", "draw", "law", "law_draw", "law_race", "masses", "suits"]
