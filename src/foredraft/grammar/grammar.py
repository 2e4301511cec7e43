"""The grammar of one request: which tokens may follow the committed text and a drafted path after it.

Everything is asked by path, so target and drafter see the same masks at every draft position, of a chain or a tree, and
a rejected draft leaves no trace: the parser walks to a path by taking back tokens and reading others.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from llguidance import LLMatcher, LLParserLimits
from numpy.typing import NDArray

from foredraft.errors import ConfigError
from foredraft.grammar.forcing import Forcing
from foredraft.grammar.source import Structure
from foredraft.grammar.vocabulary import GrammarVocabulary

Path = tuple[int, ...]
NEVER = float("-inf")
LIMITS = LLParserLimits(max_items_in_row=20_000, step_max_items=200_000)
"""Ten and four times the library's own, which an object of 500 optional properties exceeds; 20,000 items take 1 ms."""


class Grammar:
    """What a grammar admits after the committed output.

    An end token may be written exactly where the text so far satisfies the grammar.

    Args:
        structure: The grammar's source.
        vocabulary: The bytes of the model's tokens.
        width: ``V``, the width of the logits; ids beyond the vocabulary are never admitted.
        end_ids: Tokens that end this request's text.

    Attributes:
        field: The field that asked for the grammar, for messages.

    Raises:
        ConfigError: The grammar is invalid, contradictory or too large; the field is named.
    """

    def __init__(
        self,
        structure: Structure,
        vocabulary: GrammarVocabulary,
        width: int,
        end_ids: frozenset[int] = frozenset(),
    ) -> None:
        self.field = structure.field
        self._matcher = LLMatcher(vocabulary.backend, structure.source, log_level=0, limits=LIMITS)
        if self._matcher.is_error():
            raise ConfigError(f"is refused: {_short(self._matcher.get_error())}", field=self.field)
        self._start = self._matcher.deep_copy()
        self._committed: list[int] = []
        self._width = width
        self._size = vocabulary.size
        self._ends = end_ids
        # Ordinary tokens among the ends (stop_token_ids) may be part of the text, so the grammar decides on them.
        self._end_only = np.array(sorted(end_ids & vocabulary.special), dtype=np.intp)
        self._walked: list[int] = []
        self._trouble = ""  # the parser's last complaint
        self._banned: dict[Path, NDArray[np.bool_] | None] = {}
        self._buffer = np.zeros(vocabulary.size // 32 + 1, dtype=np.int32)
        self._forcing = Forcing(structure.source, vocabulary)
        self.banned(())  # dear where the grammar is large; and what cannot even begin is refused here

    def apply(self, scores: NDArray[Any], paths: Sequence[Sequence[int]]) -> None:
        """Bans what the grammar does not admit, in ``scores [n, V]``, in place.

        A row whose path already leaves the grammar stays as it is: no rule can accept that path, whose first wrong
        token has no probability in the row before.
        """
        for row, path in zip(scores, paths, strict=True):
            banned = self.banned(path)
            if banned is not None:
                np.copyto(row, NEVER, where=banned)

    def banned(self, path: Sequence[int]) -> NDArray[np.bool_] | None:
        """``[V]`` bool: tokens that may not follow ``path``; None where the path itself is not admitted.

        Raises:
            ConfigError: The text has become too ambiguous for the parser's limits.
        """
        key = tuple(path)
        if key not in self._banned:
            self._banned[key] = self._compute() if self._walk(key) else None
        return self._banned[key]

    def admitted(self, tokens: Sequence[int]) -> int:
        """How many leading tokens of ``tokens`` may follow the committed text; those behind its end do not count."""
        n = 0
        while n < len(tokens) and not self.ended(tokens[:n]):
            banned = self.banned(tokens[:n])
            if banned is None or banned[tokens[n]]:
                break
            n += 1
            if tokens[n - 1] in self._ends:
                break
        return n

    def forced(self, path: Sequence[int], most: int) -> list[int]:
        """Tokens that spell what must follow ``path``, at most ``most``; empty where there is a choice.

        Other tokens may spell the same text, so these are a good draft, not the only law.
        """
        if most < 1 or not self._walk(tuple(path)):
            return []
        return self._forcing.tokens(path)[:most]

    def ended(self, path: Sequence[int] = ()) -> bool:
        """Whether the text is complete after ``path`` and nothing may follow."""
        return self._walk(tuple(path)) and self._matcher.is_stopped() and not self._matcher.is_error()

    def commit(self, tokens: Sequence[int]) -> None:
        """Makes tokens part of the committed text."""
        kept = tuple(tokens)
        if kept and kept[-1] in self._ends and not self._walk(kept):
            kept = kept[:-1]
        if not self._walk(kept):
            raise ConfigError(self._trouble or "a token was written that it does not admit", field=self.field)
        self._forcing.commit(kept)
        self._committed += kept
        self._walked = []
        self._banned = {}

    def _walk(self, path: Path) -> bool:
        """Moves the parser to ``path``; False if it is not admitted."""
        shared = 0
        while shared < min(len(path), len(self._walked)) and path[shared] == self._walked[shared]:
            shared += 1
        if back := len(self._walked) - shared:
            self._matcher.rollback(back)
            del self._walked[shared:]
        for token in path[shared:]:
            if token >= self._size or token in self._end_only or not self._matcher.try_consume_tokens([token]):
                if self._matcher.is_error():
                    self._begin_again()
                return False
            self._walked.append(token)
        return True

    def _compute(self) -> NDArray[np.bool_]:
        matcher, buffer = self._matcher, self._buffer
        if matcher.is_stopped() and not matcher.is_error():
            banned = np.ones(self._width, dtype=np.bool_)
        else:
            matcher.unsafe_compute_mask_ptr(buffer.ctypes.data, buffer.nbytes)
            bits = np.unpackbits(buffer.view(np.uint8), bitorder="little", count=self._size)[: self._width]
            banned = np.ones(self._width, dtype=np.bool_)
            np.equal(bits, 0, out=banned[: len(bits)])
        if matcher.is_error():
            self._begin_again()
            raise ConfigError(self._trouble, field=self.field)
        banned[self._end_only] = not matcher.is_accepting()
        return banned

    def _begin_again(self) -> None:
        """Away from an error, which would stay, though perhaps only a draft led there."""
        self._trouble = f"cannot go on: {_short(self._matcher.get_error())}"
        self._matcher = self._start.deep_copy()
        self._matcher.try_consume_tokens(self._committed)
        self._walked = []


def _short(text: str, most: int = 300) -> str:
    """On one line, without the parser's state, which holds the client's text."""
    return " ".join(text.partition("<state>")[0].split())[:most]
