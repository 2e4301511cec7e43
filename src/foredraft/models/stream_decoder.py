"""Incremental detokenisation: text as soon as it is certain, never half a character."""

from __future__ import annotations

import codecs
from collections.abc import Callable
from typing import Protocol

_HELD = "\N{REPLACEMENT CHARACTER}"


class StreamDecoder(Protocol):
    """Turns token ids into text one at a time. All that it returns, joined, is ``Tokenizer.decode`` of all ids."""

    def push(self, token: int) -> str:
        """The text that this token completes; empty while a character is still in pieces."""

    def flush(self) -> str:
        """What is left at the end; a character that never became whole reads U+FFFD, as in ``decode``."""


class ByteStream:
    """For byte-level vocabularies, where each token is a known run of bytes.

    Args:
        token_bytes: Bytes of a token, empty for tokens that are not to be shown.
    """

    def __init__(self, token_bytes: Callable[[int], bytes]) -> None:
        self._bytes = token_bytes
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token: int) -> str:
        return self._utf8.decode(self._bytes(token))

    def flush(self) -> str:
        return self._utf8.decode(b"", final=True)


class WindowStream:
    """For every other vocabulary: decodes a short window again at each token and returns what is new.

    Args:
        decode: Decodes a list of ids, special tokens already left out by the caller.
        shown: Whether a token is to be shown.
        unfinished: Whether more tokens may still change how this one decodes (bytes of byte fallback).
    """

    def __init__(
        self, decode: Callable[[list[int]], str], shown: Callable[[int], bool], unfinished: Callable[[int], bool]
    ) -> None:
        self._decode, self._shown, self._unfinished = decode, shown, unfinished
        self._window: list[int] = []  # tokens of the last text returned, then those still held back
        self._returned = 0

    def push(self, token: int) -> str:
        if not self._shown(token):
            return ""
        self._window.append(token)
        return "" if self._unfinished(token) else self._take(final=False)

    def flush(self) -> str:
        return self._take(final=True)

    def _take(self, final: bool) -> str:
        text = self._decode(self._window)
        if text.endswith(_HELD) and not final:
            return ""
        new = text[len(self._decode(self._window[: self._returned])) :]
        self._window = self._window[self._returned :]
        self._returned = len(self._window)
        return new
