"""The committed text in another tokenizer's ids, kept up to date at a cost that does not grow with the text."""

from __future__ import annotations

import codecs
from collections.abc import Sequence

from foredraft.drafters.vocabulary_map import VocabularyMap
from foredraft.drafters.vocabulary_text import Piece, clean, encode_plain
from foredraft.models.tokenizer import Tokenizer

TAIL = 24
"""Tokens at the end of the text that are encoded again when it grows; earlier ones are settled."""


class Recoder:
    """One request's ids, read from the target's tokenizer into the drafter's.

    Text between special tokens is encoded as a whole; when it grows, its last tokens are encoded again, since new
    text may merge with them. Special tokens become the drafter's of the same name, or nothing. Bytes of a character
    that is not whole yet become byte tokens.

    Args:
        source: The target's tokenizer.
        goal: The drafter's.
        vocabularies: What they share.

    Attributes:
        ids: The text so far in the drafter's ids, beginning with what the drafter expects before a text, once.
        whole: False while it ends in half a character that the drafter has no tokens for.
    """

    def __init__(self, source: Tokenizer, goal: Tokenizer, vocabularies: VocabularyMap) -> None:
        self.ids: list[int] = goal.encode("")[:1] if goal.encode("")[:1] == [goal.bos_id] else []
        self.whole = True
        self._source, self._goal, self._map = source, goal, vocabularies
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._seen = 0
        self._half = 0  # byte tokens at the end of ``ids``
        self._opening = source.encode("")[:1]  # what the target expects before a text is not part of it
        self._strip, self._prefixed = _prefixes_space(source), _prefixes_space(goal)
        self._fresh_run = True  # nothing was read since the last special token
        self._open_run()

    def extend(self, ids: Sequence[int]) -> int:
        """Reads the ids beyond those already read; returns how many leading entries of ``ids`` have not changed."""
        del self.ids[len(self.ids) - self._half :]
        unchanged = len(self.ids)
        fresh = ids[self._seen :]
        text = ""
        for position, token in enumerate(fresh, self._seen):
            if not self._source.is_special(token):
                text += self._text(token)
                continue
            unchanged = min(unchanged, self._grow(text + self._utf8.decode(b"", final=True)))
            self._utf8.reset()
            text = ""
            if position > 0 or [token] != self._opening:
                self.ids += [self._map.specials[token]] if token in self._map.specials else []
                self._open_run()
        self._seen = len(ids)
        unchanged = min(unchanged, self._grow(text))
        self._append_half()
        return min(unchanged, len(self.ids))

    def _text(self, token: int) -> str:
        data = self._source.token_bytes(token)
        if data and self._fresh_run:
            self._fresh_run = False
            data = data.removeprefix(b" ") if self._strip else data
        return self._utf8.decode(data)

    def _open_run(self) -> None:
        self._base = len(self.ids)  # where in ``ids`` the pieces of the tail begin
        self._tail: list[Piece] = []
        self._run = ""  # the text of the tail
        self._cut = False
        self._fresh_run = True

    def _grow(self, text: str) -> int:
        """Appends text to the run; returns how many leading ids have not changed."""
        if not text:
            return len(self.ids)
        self._run += text
        pieces = self._encode()
        old = {(piece.start, piece.token): i for i, piece in enumerate(self._tail) if clean(self._tail, i)}
        keep, first = 0, 0
        if self._cut:  # the tail begins in the middle of a text: trust the new pieces from where both agree
            for j, piece in enumerate(pieces):
                if clean(pieces, j) and (i := old.get((piece.start, piece.token))) is not None:
                    keep, first = i, j
                    break
        before = self._tail
        self._tail = self._tail[:keep] + pieces[first:]
        same = 0
        while same < min(len(before), len(self._tail)) and before[same].token == self._tail[same].token:
            same += 1
        del self.ids[self._base + same :]
        self.ids += [piece.token for piece in self._tail[same:]]
        unchanged = self._base + same
        self._settle()
        return unchanged

    def _encode(self) -> list[Piece]:
        """The tail's text, without the space that a tokenizer adds before what it takes for the beginning of a text."""
        if not (self._cut and self._prefixed and self._run.startswith(" ")):
            return encode_plain(self._goal, self._run)
        pieces = encode_plain(self._goal, self._run[1:], offset=1)
        return [pieces[0]._replace(start=0), *pieces[1:]] if pieces else []

    def _settle(self) -> None:
        """Forgets the text of all but the last tokens, up to the beginning of a word if there is one."""
        if len(self._tail) <= 2 * TAIL:
            return
        cuts = [i for i in range(1, len(self._tail) - TAIL + 1) if clean(self._tail, i)]
        words = [i for i in cuts if self._begins_word(self._tail[i].start)]
        if not (words or cuts):
            return
        cut = (words or cuts)[-1]
        start = self._tail[cut].start
        self._tail = [Piece(token, first - start, last - start) for token, first, last in self._tail[cut:]]
        self._run = self._run[start:]
        self._base += cut
        self._cut = True

    def _begins_word(self, at: int) -> bool:
        return self._run[at] == " " and not self._run[at - 1].isspace()

    def _append_half(self) -> None:
        """Bytes that are no character yet, one byte token each."""
        held: bytes = self._utf8.getstate()[0]
        tokens = [self._map.byte_tokens.get(byte) for byte in held]
        known = [token for token in tokens if token is not None]
        self.whole = len(known) == len(held)
        self._half = len(held) if self.whole else 0
        self.ids += known if self.whole else []


def _prefixes_space(tokenizer: Tokenizer) -> bool:
    first = tokenizer.encode("a", special=False)[:1]
    return any(tokenizer.token_bytes(token).startswith(b" ") for token in first)
