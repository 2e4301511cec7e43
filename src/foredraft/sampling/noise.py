"""The random numbers of one request: a counter-based generator, asked by name and never advanced.

Every number is a pure function of (seed, purpose, position, anchor), so that it depends neither on the slot,
the batch or the step number, nor on what else was drawn before.

*Positions* are absolute (prompt included). The *anchor* is the position of the first token of the step. Numbers
of a draft and of its acceptance are keyed by both, and this is not a nicety: block verification decides how
much to accept after looking at **all** k drafted tokens, also at those past the accepted prefix. A position
that was drafted, looked at and not accepted is drafted again in the next step. If it were drafted again from
the same number, that number would no longer be uniform given what the first step emitted, and the law of the
output would be wrong (tests/test_law_noise.py shows by how much). Every step commits at least one token, hence no two
steps share an anchor and no number is used twice. In a tree several nodes share a position: their acceptance is keyed
by the number of the node, and what is drawn behind a node by a digest of its path. A step's one next token
(correction, bonus or plain token) needs one number, that of the anchor, whichever position it lands on.
"""

from __future__ import annotations

import secrets
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from hashlib import blake2b
from typing import TypeAlias, overload

import numpy as np
import torch
from torch import Tensor

from foredraft import kernels
from foredraft.sampling.draw import NoiseRow

Racer: TypeAlias = Callable[[Tensor, int, int], int]
"""``(p [V], seed, position) -> token``: the coupled rule's draw at once, equal to a race with :meth:`exponentials`."""

_CACHED_ROWS = 18
"""Rows of coupled noise kept: those of one step with the default ``max_k``."""


class Purpose(IntEnum):
    """What a random number is for. The values are part of the stream: never renumber them."""

    DRAFT = 0
    ACCEPT = 1
    NEXT = 2
    COUPLED = 3
    TREE_DRAFT = 4
    TREE_ACCEPT = 5


def fresh_seed() -> int:
    """A seed in ``[0, 2**63)`` from the system's entropy, for a request that gave none."""
    return secrets.randbits(63)


class RequestNoise:
    """The random numbers of one request.

    The generator is Philox4x64-10 (Salmon 2011), of which only the raw 64-bit words are used: these are fixed by
    the algorithm, whereas numpy's derived distributions may change with its versions.

    Args:
        seed: ``0 <= seed < 2**63``.
        racer: Runs the races of the coupled rule, on rows of the CPU; None makes the noise and compares.
    """

    def __init__(self, seed: int, racer: Racer | None = None) -> None:
        self.seed = seed
        self.racer = racer
        self._rows: OrderedDict[int, Tensor] = OrderedDict()

    def uniform(self, purpose: Purpose, position: int, anchor: int) -> float:
        """A number in ``[0, 1)`` with 53 random bits.

        For ``Purpose.NEXT`` the position is the anchor; for ``Purpose.TREE_ACCEPT`` it is the number of the node.
        """
        return self.uniforms(purpose, position, anchor, 1)[0]

    def uniforms(self, purpose: Purpose, first: int, anchor: int, n: int) -> list[float]:
        """:meth:`uniform` at ``n`` positions from ``first`` on."""
        if kernels.available():
            return kernels.uniforms(self.seed, purpose, first, anchor, n)
        words = [self._words(purpose, position, anchor, 1)[0] for position in range(first, first + n)]
        return [float((int(word) >> 11) * 2.0**-53) for word in words]

    def siblings(self, path: Sequence[int], anchor: int, n: int) -> list[float]:
        """``n`` numbers in ``[0, 1)`` for drawing the children of one node of a tree, the eldest first.

        Args:
            path: Drafted tokens up to the node. The 63-bit digest of two paths of one tree agrees with a chance of
                about 1e-15 even in a tree of 128 nodes; the two nodes' children would then be drawn alike.
        """
        digest = blake2b(np.array(path, dtype=np.int64).tobytes(), digest_size=8).digest()
        words = self._words(Purpose.TREE_DRAFT, int.from_bytes(digest, "little") >> 1, anchor, n)
        return [float((int(word) >> 11) * 2.0**-53) for word in words]

    def exponentials(self, position: int, n: int) -> Tensor:
        """The noise of the coupled rule at one position: standard exponentials, one a token id.

        Token id x always has the x-th number, whatever ``n``. The rows of a step are asked twice, while drafting
        and while verifying, so the last few are kept.

        Returns:
            ``[n]`` float64, finite and above 0. Shared: do not write to it.
        """
        row = self._rows.get(position)
        if row is None or row.shape[0] < n:
            words = self._words(Purpose.COUPLED, position, position, n)
            # 52 bits and a half: never 0, never 1, and exact in float64.
            uniform = ((words >> np.uint64(12)).astype(np.float64) + 0.5) * 2.0**-52
            row = torch.from_numpy(-np.log(uniform))
            self._rows[position] = row
        self._rows.move_to_end(position)
        while len(self._rows) > _CACHED_ROWS:
            self._rows.popitem(last=False)
        return row[:n]

    def row(self, position: int, n: int) -> Tensor | NoiseRow:
        """The noise of one position: something to run a race with."""
        return self.exponentials(position, n) if self.racer is None else _Row(self.racer, self.seed, position)

    def rows(self, first: int, count: int, n: int) -> Sequence[Tensor | NoiseRow]:
        """:meth:`row` of ``count`` positions from ``first`` on, each made only when it is asked for."""
        return _Rows(self, range(first, first + count), n)

    def _words(
        self, purpose: Purpose, position: int, anchor: int, n: int
    ) -> np.ndarray[tuple[int], np.dtype[np.uint64]]:
        # Counter word 0 counts blocks of one stream; the other three name the stream.
        generator = np.random.Philox(key=[self.seed, 0], counter=[0, purpose, position, anchor])
        words: np.ndarray[tuple[int], np.dtype[np.uint64]] = generator.random_raw(n)
        return words


@dataclass(frozen=True, slots=True)
class _Row:
    racer: Racer
    seed: int
    position: int

    def race(self, p_row: Tensor) -> int:
        return self.racer(p_row, self.seed, self.position)


class _Rows(Sequence[Tensor | NoiseRow]):
    def __init__(self, noise: RequestNoise, positions: range, n: int) -> None:
        self._noise, self._positions, self._n = noise, positions, n

    def __len__(self) -> int:
        return len(self._positions)

    @overload
    def __getitem__(self, i: int) -> Tensor | NoiseRow: ...
    @overload
    def __getitem__(self, i: slice) -> Sequence[Tensor | NoiseRow]: ...
    def __getitem__(self, i: int | slice) -> Tensor | NoiseRow | Sequence[Tensor | NoiseRow]:
        if isinstance(i, slice):
            return _Rows(self._noise, self._positions[i], self._n)
        return self._noise.row(self._positions[i], self._n)
