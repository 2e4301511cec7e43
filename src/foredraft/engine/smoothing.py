"""Streams whose chunks say nothing about acceptance.

A stream that hands on what each step wrote shows, in the size of its chunks, how many drafted tokens were accepted, and
thereby something of the text, even where it is encrypted (Carlini and Nasr 2024, arXiv 2411.01076). Here every chunk
holds the same number of tokens, the last one what is left. A chunk waits for its last token, so the first
token is seen up to N - 1 tokens later. *When* chunks are sent still depends on how fast they are written.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
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


class Smoother:
    """Cuts what steps add to one text into pieces of a constant number of tokens; steps must come in order.

    Args:
        tokens: Tokens of every piece but the last, at least 1.
    """

    def __init__(self, tokens: int) -> None:
        self._chunks: Chunks[StreamToken] = Chunks(tokens)

    def push(self, text: str, tokens: Sequence[StreamToken], last: bool) -> list[tuple[str, list[StreamToken]]]:
        """Pieces that are full, as text and tokens; after the ``last`` step all the rest."""
        held = text[sum(len(token.text) for token in tokens) :]  # came with no token, at the end
        full = self._chunks.push(tokens, last)
        texts = ["".join(token.text for token in chunk) for chunk in full]
        if last:
            texts[-1] += held
        return list(zip(texts, full, strict=True))


def smooth(stream: Iterable[StreamDelta], tokens: int) -> Iterator[StreamDelta]:
    """The same stream with ``tokens`` tokens a delta, whatever each step wrote.

    Args:
        stream: What :meth:`~foredraft.engine.engine.Engine.stream` yields.
        tokens: Tokens of every delta but the last, at least 1.

    Raises:
        ConfigError: ``tokens`` is below 1.
    """
    smoother = Smoother(tokens)
    for delta in stream:
        pieces = smoother.push(delta.text, delta.tokens, delta.result is not None)
        for i, (text, chunk) in enumerate(pieces, 1):
            yield StreamDelta(text, chunk, delta.result if i == len(pieces) else None)
