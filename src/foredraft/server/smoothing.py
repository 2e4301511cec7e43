"""Pieces of a constant number of tokens, and events of a constant length, for ``--stream-smoothing``.

See :mod:`foredraft.engine.smoothing` for what this is good for and what it leaves visible.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator, AsyncIterator

from foredraft.engine.result import TokenLogprob
from foredraft.engine.smoothing import Chunks, Smoother
from foredraft.server.pieces import Piece


class PieceSmoother:
    """Smooths the pieces of one answer, log-probabilities included.

    Args:
        tokens: Tokens of every piece but the last, at least 1.
    """

    def __init__(self, tokens: int) -> None:
        self._texts = Smoother(tokens)
        self._logprobs: Chunks[TokenLogprob] = Chunks(tokens)

    def push(self, piece: Piece) -> list[Piece]:
        """Pieces that are full; after one with a result, all the rest."""
        last = piece.result is not None
        logprobs = iter(self._logprobs.push(piece.logprobs, last))
        pieces = [Piece(*each, next(logprobs, [])) for each in self._texts.push(piece.text, piece.tokens, last)]
        if last:
            pieces[-1].result = piece.result
        return pieces


async def smooth(pieces: AsyncIterator[tuple[int, Piece]], tokens: int) -> AsyncGenerator[tuple[int, Piece], None]:
    """Smooths the pieces of several answers, each for itself; ``tokens = 0`` changes nothing."""
    smoothers: dict[int, PieceSmoother] = {}
    async for choice, piece in pieces:
        if not tokens:
            yield choice, piece
            continue
        for smoothed in smoothers.setdefault(choice, PieceSmoother(tokens)).push(piece):
            yield choice, smoothed


async def padded(events: AsyncGenerator[bytes, None], multiple: int) -> AsyncGenerator[bytes, None]:
    """:func:`pad` for every event of a stream."""
    async with contextlib.aclosing(events):
        async for event in events:
            yield pad(event, multiple)


def pad(event: bytes, multiple: int) -> bytes:
    """Fills a server-sent event with a comment, which every client skips, to a multiple of ``multiple`` bytes.

    Texts of different lengths then look alike. ``multiple = 0`` changes nothing.
    """
    missing = -len(event) % multiple if multiple else 0
    if not missing:
        return event
    if missing < 2:  # a comment takes at least a colon and a line's end
        missing += multiple
    return event[:-1] + b":" + b"-" * (missing - 2) + b"\n" + event[-1:]
