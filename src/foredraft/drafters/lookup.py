"""Prompt lookup: the last few tokens stood in the text before, so propose what followed them there.

Saxena 2023 (github.com/apoorvumang/prompt-lookup-decoding); free of any model.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Self

from foredraft.drafters.base import DrafterContext, DraftRequest
from foredraft.drafters.copying import Copy, CopyDrafter
from foredraft.errors import ConfigError

LONGEST_MATCH = 32  # longer ones are not told apart


class _Index:
    """Where each n-gram of one request was last followed by something, kept up to date token by token."""

    def __init__(self, sizes: range) -> None:
        self.follows: dict[int, dict[tuple[int, ...], int]] = {n: {} for n in sizes}
        self.indexed = 0  # n-grams that end before this position are in the tables

    def extend(self, ids: Sequence[int]) -> None:
        """Adds the n-grams of ``ids`` that have a successor (all but those ending at the last token)."""
        for end in range(max(self.indexed, 1), len(ids)):
            for n, table in self.follows.items():
                if n <= end:
                    table[tuple(ids[end - n : end])] = end
        self.indexed = len(ids)

    def find(self, ids: Sequence[int]) -> int | None:
        """Position of the token that followed the longest, then latest, earlier match of the text's end."""
        for n, table in self.follows.items():
            if n < len(ids) and (position := table.get(tuple(ids[-n:]))) is not None:
                return position
        return None

    def copy(self, ids: Sequence[int], limit: int) -> Copy | None:
        """What followed the match, round and round if the match overlaps the end of the text."""
        self.extend(ids)
        source = self.find(ids)
        if source is None:
            return None
        period = len(ids) - source
        match = 1
        while match < min(source, LONGEST_MATCH) and ids[source - match - 1] == ids[-match - 1]:
            match += 1
        tokens = list(ids[source : source + limit])
        while len(tokens) < limit:
            tokens.append(tokens[len(tokens) - period])
        return Copy(tuple(tokens), match)


class LookupDrafter(CopyDrafter):
    """Copies what followed the latest earlier occurrence of the last n tokens, n from ``max_ngram`` down.

    A copy that reaches the end of the text goes on into its own proposal, so a loop is proposed whole.

    Args:
        max_ngram: Longest n-gram to match, >= 1.
        min_ngram: Shortest n-gram to match, ``1 <= min_ngram <= max_ngram``.
    """

    name = "lookup"

    def __init__(self, max_ngram: int = 4, min_ngram: int = 2) -> None:
        if not 1 <= min_ngram <= max_ngram:
            raise ConfigError(
                f"n-gram lengths must satisfy 1 <= MIN <= MAX (got MAX {max_ngram}, MIN {min_ngram})",
                field="drafter lookup",
                remedy="for example lookup:4,2",
            )
        super().__init__()
        self.sizes = range(max_ngram, min_ngram - 1, -1)

    @classmethod
    def from_spec(cls, argument: str | None, context: DrafterContext) -> Self:
        if argument is None:
            return cls()
        try:
            numbers = [int(part) for part in argument.split(",")]
        except ValueError:
            numbers = []
        if len(numbers) not in (1, 2):
            raise ConfigError(
                f"argument {argument!r} is not MAX or MAX,MIN", field="drafter lookup", remedy="for example lookup:4,2"
            )
        return cls(numbers[0], numbers[1] if len(numbers) == 2 else min(2, numbers[0]))

    def finder(self, request: DraftRequest) -> Callable[[Sequence[int], int], Copy | None]:
        return _Index(self.sizes).copy
