"""What must come next under a grammar: text that leaves no choice can be drafted for nothing."""

from __future__ import annotations

from collections.abc import Sequence

from llguidance import LLMatcher, LLParserLimits

from foredraft.grammar.vocabulary import GrammarVocabulary

_FARTHEST = 2048
"""Bytes that must come next, up to which they are drafted. Finding them takes time in proportion to their number, in
every step and while other requests wait, so after a longer run nobody asks again."""
_FUEL = 200_000
"""What the lexer may spend on a whole text. The library finds runs whole, so this alone bounds how long that takes:
some 50 ms, where its own limit of a million let a run of 300,000 bytes take half a second or more."""


class Forcing:
    """Follows a request's text with a parser of its own, which gives up early: it costs speed, never text.

    Args:
        source: The grammar.
        vocabulary: The bytes of the model's tokens, and how the model spells text.
    """

    def __init__(self, source: str, vocabulary: GrammarVocabulary) -> None:
        self._size = vocabulary.size
        self._walked: list[int] = []
        limits = LLParserLimits(initial_lexer_fuel=_FUEL)
        self._matcher: LLMatcher | None = None
        if vocabulary.canonical:
            self._matcher = LLMatcher(vocabulary.backend, source, log_level=0, limits=limits)

    def commit(self, tokens: Sequence[int]) -> None:
        """Makes tokens part of the committed text."""
        if self._at(tokens) is not None:
            self._walked = []
        else:
            self._matcher = None

    def tokens(self, path: Sequence[int]) -> list[int]:
        """Tokens that spell what must follow the committed text and ``path``; empty where there is a choice."""
        matcher = self._at(path)
        ahead = 0 if matcher is None else len(matcher.compute_ff_bytes())
        if matcher is None or matcher.is_error() or ahead > _FARTHEST:
            self._matcher = None
            return []
        return [token for token in matcher.compute_ff_tokens() if token < self._size] if ahead else []

    def _at(self, path: Sequence[int]) -> LLMatcher | None:
        """The parser after ``path``; None if it has given up, or does now."""
        matcher = self._matcher
        if matcher is None or matcher.is_error():
            return None
        shared = 0
        while shared < min(len(path), len(self._walked)) and path[shared] == self._walked[shared]:
            shared += 1
        if back := len(self._walked) - shared:
            matcher.rollback(back)
            del self._walked[shared:]
        for token in path[shared:]:
            if not matcher.try_consume_tokens([token]):
                return None
            self._walked.append(token)
        return matcher
