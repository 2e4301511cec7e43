"""Prompt lookup of several continuations: what followed the last few tokens wherever they stood, as one tree."""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Self

from foredraft.drafters.base import Drafter, DrafterContext, DraftRequest, require_trees
from foredraft.drafters.copying import Calibration, Copy
from foredraft.drafters.outlook import Outlook, StepPrice
from foredraft.errors import ConfigError
from foredraft.types import NO_DRAFT, Draft, Verdict

PLACES = 8  # latest occurrences of an n-gram that are looked at
LONGER = 3.0  # a match one token longer weighs this much more,
OLDER = 0.7  # an older occurrence this much less


@dataclass(frozen=True, slots=True)
class _Source:
    """A place in the text whose continuation may come again."""

    start: int
    match: int
    weight: float


@dataclass(frozen=True, slots=True)
class _Found:
    """The tree behind a text, likeliest nodes first.

    Attributes:
        values: Chance that each node is accepted, not increasing.
        best: The path that looked likeliest, with each token's share among its siblings.
    """

    tokens: tuple[int, ...]
    parents: tuple[int, ...]
    values: tuple[float, ...]
    best: Copy


@dataclass(slots=True)
class _State:
    """One request: where each n-gram stood, and what was found behind the first ``base`` ids."""

    places: dict[int, dict[tuple[int, ...], deque[int]]]
    calibration: Calibration = field(default_factory=Calibration)
    indexed: int = 0
    found: _Found | None = None
    base: int = -1
    limit: int = 0


class LookupTreeDrafter(Drafter):
    """Merges what followed earlier occurrences of the last n tokens, n from ``max_ngram`` down, into one tree.

    Occurrences with longer matches and later ones weigh more. The tree holds the nodes likeliest to be accepted. Its
    tokens are not sampled, so it may be cut anywhere.

    Args:
        max_ngram: Longest n-gram to match, >= 1.
        min_ngram: Shortest n-gram to match, ``1 <= min_ngram <= max_ngram``.
    """

    name = "lookup-tree"

    def __init__(self, max_ngram: int = 4, min_ngram: int = 2) -> None:
        if not 1 <= min_ngram <= max_ngram:
            raise ConfigError(
                f"n-gram lengths must satisfy 1 <= MIN <= MAX (got MAX {max_ngram}, MIN {min_ngram})",
                field="drafter lookup-tree",
                remedy="for example lookup-tree:4,2",
            )
        self.sizes = range(max_ngram, min_ngram - 1, -1)
        self._states: dict[str, _State] = {}

    @classmethod
    def from_spec(cls, argument: str | None, context: DrafterContext) -> Self:
        if argument is None:
            return cls()
        longest, _, shortest = argument.partition(",")
        if not longest.isdecimal() or (shortest and not shortest.isdecimal()):
            raise ConfigError(
                f"argument {argument!r} is not MAX or MAX,MIN",
                field="drafter lookup-tree",
                remedy="for example lookup-tree:4,2",
            )
        return cls(int(longest), int(shortest) if shortest else min(2, int(longest)))

    def attach(self, context: DrafterContext) -> None:
        require_trees(context)

    def start(self, request: DraftRequest) -> None:
        self._states[request.id] = _State({n: {} for n in self.sizes})

    def outlook(self, request: DraftRequest, limit: int, price: StepPrice) -> Outlook:
        found = self._find(request, limit)
        return Outlook(() if found is None else found.values[:limit], seconds=0.0)

    def propose(self, request: DraftRequest, k: int) -> Draft:
        found = self._find(request, k)
        return NO_DRAFT if found is None else Draft(found.tokens[:k], None, found.parents[:k])

    def observe(self, request: DraftRequest, verdict: Verdict | None, taps: object) -> None:
        state = self._states[request.id]
        if state.found is not None and 0 < state.base < len(request.ids):
            state.calibration.learn(state.found.best, request.ids[state.base :])
            state.found, state.base = None, -1

    def stop(self, request: DraftRequest) -> None:
        self._states.pop(request.id, None)

    def _find(self, request: DraftRequest, limit: int) -> _Found | None:
        """What is behind the text now; searched once a step."""
        state, ids = self._states[request.id], request.ids
        if state.base != len(ids) or state.limit < limit:
            _index(state, ids)
            sources = _sources(state, ids)
            state.found = _merge(ids, sources, limit, state.calibration) if sources else None
            state.base, state.limit = len(ids), limit
        return state.found


def _index(state: _State, ids: Sequence[int]) -> None:
    """Adds the n-grams of ``ids`` that have a successor."""
    for end in range(max(state.indexed, 1), len(ids)):
        for n, table in state.places.items():
            if n <= end:
                table.setdefault(tuple(ids[end - n : end]), deque(maxlen=PLACES)).append(end)
    state.indexed = len(ids)


def _sources(state: _State, ids: Sequence[int]) -> list[_Source]:
    """Where the text's last n tokens stood before: longest n first, latest first, each place once."""
    sources: dict[int, _Source] = {}
    for n, table in state.places.items():
        for place in reversed(table.get(tuple(ids[-n:]), ()) if n < len(ids) else ()):
            if place not in sources and len(sources) < PLACES:
                sources[place] = _Source(place, n, LONGER**n * OLDER ** len(sources))
    return list(sources.values())


def _token(ids: Sequence[int], source: _Source, depth: int) -> int:
    """What stands ``depth`` tokens into a continuation; one that reaches the end of the text goes round and round."""
    return ids[source.start + depth % (len(ids) - source.start)]


def _groups(ids: Sequence[int], through: Sequence[_Source], depth: int) -> list[tuple[int, float, list[_Source]]]:
    """The tokens that stand ``depth`` tokens into the continuations, each with its share and those that have it."""
    groups: dict[int, list[_Source]] = {}
    for source in through:
        groups.setdefault(_token(ids, source, depth), []).append(source)
    total = sum(source.weight for source in through)
    return [(token, sum(source.weight for source in group) / total, group) for token, group in groups.items()]


def _merge(ids: Sequence[int], sources: Sequence[_Source], nodes: int, calibration: Calibration) -> _Found:
    """The ``nodes`` likeliest nodes of the tree of all continuations."""
    tokens: list[int] = []
    parents: list[int] = []
    values: list[float] = []
    waiting: list[tuple[float, int, int, int, list[_Source]]] = []  # minus value, parent, token, depth, who has it

    def branch(parent: int, depth: int, value: float, through: Sequence[_Source]) -> None:
        for token, share, group in _groups(ids, through, depth):
            rate = calibration.rate(max(source.match for source in group) + depth, share)
            heapq.heappush(waiting, (-value * rate, parent, token, depth, group))

    branch(-1, 0, 1.0, sources)
    while waiting and len(tokens) < nodes:
        minus_value, parent, token, depth, group = heapq.heappop(waiting)
        tokens.append(token)
        parents.append(parent)
        values.append(-minus_value)
        branch(len(tokens) - 1, depth + 1, -minus_value, group)
    return _Found(tuple(tokens), tuple(parents), tuple(values), _likeliest(ids, sources, nodes))


def _likeliest(ids: Sequence[int], sources: Sequence[_Source], length: int) -> Copy:
    """The path with the largest share at every token."""
    match, tokens, shares = max(source.match for source in sources), [], []
    for depth in range(length):
        token, share, sources = max(_groups(ids, sources, depth), key=lambda group: group[1])
        tokens.append(token)
        shares.append(share)
    return Copy(tuple(tokens), match, tuple(shares))
