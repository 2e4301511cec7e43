"""Text into ids where only a piece of it is at hand: without special tokens by accident, and from a given byte on."""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import NamedTuple

from foredraft.models.tokenizer import Tokenizer


class Piece(NamedTuple):
    """One token of an encoded text and the characters ``start … end-1`` that it covers.

    Tokens that share a character between them (bytes of an emoji) all cover the whole of it.
    """

    token: int
    start: int
    end: int


def encode_plain(tokenizer: Tokenizer, text: str, offset: int = 0) -> list[Piece]:
    """Tokens of ``text``, none of them special: a text that spells a special token's name stays ordinary text."""
    encoding = tokenizer.backend.encode(text, add_special_tokens=False)
    pieces: list[Piece] = []
    for token, (start, end) in zip(encoding.ids, encoding.offsets, strict=True):
        if not tokenizer.is_special(token):
            pieces.append(Piece(token, start + offset, end + offset))
        elif end - start > 1:  # cut in two, the name is no name any more
            pieces += encode_plain(tokenizer, text[start : start + 1], start + offset)
            pieces += encode_plain(tokenizer, text[start + 1 : end], start + 1 + offset)
    return pieces


def clean(pieces: Sequence[Piece], i: int) -> bool:
    """Whether piece i begins a character."""
    return i == 0 or pieces[i].start >= pieces[i - 1].end


def tokens_after(tokenizer: Tokenizer, before: bytes, text: bytes) -> list[int]:
    """The tokens that ``text`` becomes where it follows ``before``, if they begin at that very byte.

    Encoding both together keeps what a tokenizer does at the beginning of a text (a prefixed space) away from the
    draft. Where a token would straddle the border, ``text`` is encoded alone; where even that cannot be done without
    adding a space, the answer is empty. An unfinished character at the end of ``text`` is left out.
    """
    for context in (before, b""):
        try:
            whole = codecs.getincrementaldecoder("utf-8")().decode(context + text)
        except UnicodeDecodeError:
            continue
        ids = [piece.token for piece in encode_plain(tokenizer, whole)]
        data = [tokenizer.token_bytes(token) for token in ids]
        border = len(context) + sum(map(len, data)) - len(whole.encode())
        if b"".join(data)[border - len(context) :] != whole.encode() or border < len(context):
            continue  # normalised away
        length = 0
        for i, part in enumerate(data):
            if length == border:
                return ids[i:]
            length += len(part)
    return []
