"""What travels from the engine's thread to a reader, and the bounded place where it waits."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field

from foredraft.engine.result import Result, StreamToken, TokenLogprob


@dataclass(slots=True)
class Piece:
    """What one or more steps added to one answer.

    Attributes:
        text: Text that became certain.
        tokens: Tokens that were written, in order.
        logprobs: An entry a token where they were asked for.
        result: Present in the last piece.
    """

    text: str = ""
    tokens: list[StreamToken] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    result: Result | None = None

    def extend(self, later: Piece) -> None:
        """Takes in the piece that follows."""
        self.text += later.text
        self.tokens += later.tokens
        self.logprobs += later.logprobs
        self.result = later.result


class Channel:
    """The pieces of one HTTP request's answers on their way to its reader, in the event loop's thread.

    Pieces that wait are merged, so a slow reader gets fewer and larger ones. The engine never waits: where more than
    ``limit`` tokens are waiting, ``overflow`` is called once and the answer ends there.

    Args:
        limit: Most tokens that may wait.
        overflow: Called when there are more.
    """

    def __init__(self, limit: int, overflow: Callable[[], None]) -> None:
        self._limit = limit
        self._overflow = overflow
        self._waiting: dict[int, Piece] = {}
        self._tokens = 0
        self._ready = asyncio.Event()
        self.overflowed = False

    def put(self, choice: int, piece: Piece) -> None:
        """Adds to answer number ``choice``."""
        self._tokens += len(piece.tokens)
        if choice in self._waiting:
            self._waiting[choice].extend(piece)
        else:
            self._waiting[choice] = piece
        self._ready.set()
        if self._tokens > self._limit and not self.overflowed:
            self.overflowed = True
            self._overflow()

    async def get(self) -> tuple[int, Piece]:
        """The answer that has waited longest, and all that waits of it."""
        while not self._waiting:
            self._ready.clear()
            await self._ready.wait()
        choice = next(iter(self._waiting))
        piece = self._waiting.pop(choice)
        self._tokens -= len(piece.tokens)
        return choice, piece
