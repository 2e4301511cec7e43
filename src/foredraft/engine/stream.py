"""Text of a growing token sequence: whole characters only, and nothing that a stop string may yet take back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol


class Detokeniser(Protocol):
    """Incremental detokenisation: :class:`foredraft.models.tokenizer.StreamDecoder`."""

    def push(self, token_id: int) -> str: ...

    def flush(self) -> str: ...


@dataclass(slots=True)
class TextStream:
    """Turns tokens into text and watches for stop strings.

    Attributes:
        decoder: None where there is no tokenizer; the text is then empty.
        stops: Strings before which the text ends.
        include_stop: Keep the stop string itself.
        text: Text released so far.
        stopped: A stop string was met.
    """

    decoder: Detokeniser | None
    stops: Sequence[str] = ()
    include_stop: bool = False
    text: str = ""
    stopped: bool = False
    _held: str = ""

    def push(self, token_id: int) -> str:
        """Adds a token; returns the text that is now certain."""
        return self._release(self.decoder.push(token_id)) if self.decoder else ""

    def finish(self) -> str:
        """Ends the stream; returns what was held back."""
        if self.decoder is None or self.stopped:
            return ""
        rest = self._release(self.decoder.flush())
        held, self._held = self._held, ""
        self.text += held
        return rest + held

    def _release(self, piece: str) -> str:
        if not self.stops:
            self.text += piece
            return piece
        self._held += piece
        hit = min(
            ((at, stop) for stop in self.stops if (at := self._held.find(stop)) >= 0),
            key=lambda found: (found[0], -len(found[1])),
            default=None,
        )
        if hit is not None:
            at, stop = hit
            released = self._held[: at + len(stop)] if self.include_stop else self._held[:at]
            self._held, self.stopped = "", True
        else:
            keep = max((_overlap(self._held, stop) for stop in self.stops), default=0)
            cut = len(self._held) - keep
            released, self._held = self._held[:cut], self._held[cut:]
        self.text += released
        return released


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of ``text`` that begins ``stop``."""
    for n in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:n]):
            return n
    return 0
