"""Streams whose chunks say nothing about acceptance.

A stream that hands on what each step wrote shows, in the size of its chunks, how many drafted tokens were accepted, and
thereby something of the text, even where it is encrypted (Carlini and Nasr 2024, arXiv 2411.01076). Here every chunk
holds the same number of tokens, the last one what is left. A chunk waits for its last token, so the first
token is seen up to N - 1 tokens later. *When* chunks are sent still depends on how fast they are written.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Generic, TypeVar

from foredraft.engine.result import StreamDelta, StreamToken
from foredraft.errors import ConfigError

T = TypeVar("T")


class Chunks(Generic[T]):
    """Cuts a growing sequence into pieces of ``size``."""

    def __init__(self, size: int) -> None:
        if size < 1:
            raise ConfigError(f"must be at least 1 (got {size})", field="stream_smoothing")
        self.size = size
        self._waiting: list[T] = []

    def push(self, items: Iterable[T], last: bool) -> list[list[T]]:
        """Chunks that are full; with ``last`` also the rest, which is then at least one chunk, empty if need be."""
        self._waiting += items
        chunks = []
        while len(self._waiting) > self.size or (len(self._waiting) == self.size and not last):
            chunks.append(self._waiting[: self.size])
            del self._waiting[: self.size]
        if last:
            chunks.append(self._waiting)
            self._waiting = []
        return chunks


def smooth(stream: Iterable[StreamDelta], tokens: int) -> Iterator[StreamDelta]:
    """The same stream with ``tokens`` tokens a delta, whatever each step wrote.

    Args:
        stream: What :meth:`~foredraft.engine.engine.Engine.stream` yields.
        tokens: Tokens of every delta but the last, at least 1.

    Raises:
        ConfigError: ``tokens`` is below 1.
    """
    chunks: Chunks[StreamToken] = Chunks(tokens)
    for delta in stream:
        last = delta.result is not None
        held = delta.text[sum(len(token.text) for token in delta.tokens) :]  # came with no token, at the end
        full = chunks.push(delta.tokens, last)
        for i, chunk in enumerate(full, 1):
            text = "".join(token.text for token in chunk)
            end = last and i == len(full)
            yield StreamDelta(text + held if end else text, chunk, delta.result if end else None)
