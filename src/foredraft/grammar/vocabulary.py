"""A vocabulary as grammars see it: the bytes of every token."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from llguidance import LLTokenizer, TokenizerWrapper

_SPECIAL = b"\xff"
"""Marks the bytes of a special token, which no text can spell."""


class GrammarVocabulary:
    """Made once per model (about half a second for 50,000 tokens) and shared by all grammars; it never changes.

    The library's own end token is a virtual one behind the last id. Which real tokens may end a text is each request's
    affair (:class:`~foredraft.grammar.grammar.Grammar`).

    Args:
        tokens: Bytes of every token by id; empty for ids that are never to be written. Those of a special token are
            its name.
        special: Ids of special tokens, end tokens among them. A grammar admits one only where it names it (``<|name|>``
            in Lark).
        encode: Tokenises text as the model writes it, so that what a grammar forces can be drafted. None: it is not.
    """

    def __init__(
        self,
        tokens: Sequence[bytes],
        special: Sequence[int] = (),
        encode: Callable[[str], Sequence[int]] | None = None,
    ) -> None:
        self.size = len(tokens)
        self.special = frozenset(special)
        self.names = {tokens[id].decode("utf-8", "replace"): id for id in self.special if tokens[id]}
        self.canonical = encode is not None
        marked = [_SPECIAL + token if id in self.special and token else token for id, token in enumerate(tokens)]
        wrapper = TokenizerWrapper(_Backend([*marked, _SPECIAL + b"<|end of text|>"], self.size, encode))
        self.backend = LLTokenizer(wrapper, n_vocab=self.size + 1, eos_token=self.size)


class _Backend:
    """The shape in which the library wants a tokenizer."""

    bos_token_id = None

    def __init__(self, tokens: Sequence[bytes], end: int, encode: Callable[[str], Sequence[int]] | None) -> None:
        self.tokens = tokens
        self.eos_token_id = end
        self.special_token_ids = [id for id, token in enumerate(tokens) if token.startswith(_SPECIAL) and token[1:]]
        self._encode = encode

    def __call__(self, text: str | bytes) -> list[int]:
        if isinstance(text, bytes):
            raise TypeError("text, please")  # asked once, whether bytes are taken
        return list(self._encode(text)) if self._encode else []
