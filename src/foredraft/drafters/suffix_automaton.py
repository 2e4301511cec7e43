"""What followed what: a suffix automaton over token ids, with counts, built online.

It answers, for any context of at most ``depth`` tokens, how often each token followed it, as the suffix tree of
SuffixDecoding (Oliaro 2024, arXiv 2411.04975) does, but in at most two states a token and without a limit on how far
a copy may run. A state stands for all strings that end at the same places. Adding a token takes amortised constant
time for the structure (Blumer 1985) and at most ``depth`` steps for the counts.
"""

from __future__ import annotations

import heapq
from array import array
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from sys import getsizeof
from typing import NamedTuple

ROOT = 0
NONE = -1
WIDE = 64  # a context that so many tokens followed foretells little
_FIELDS = ("length", "link", "count", "follows", "best", "token", "to")
_MAP_ENTRY = 100  # bytes of one entry of a dictionary of ints, room to grow included


@dataclass(slots=True)
class Place:
    """A string inside an automaton: the one of ``length`` tokens that state ``state`` stands for."""

    state: int = ROOT
    length: int = 0


class Found(NamedTuple):
    """A continuation of the end of a text.

    Attributes:
        worth: Sum of the products of shares: the tokens of it that are expected to be accepted.
        match: Length of the context that it continues.
        shares: Of its context's occurrences that each token followed.
        parents: Of each token, -1 for the context; None for a chain.
    """

    worth: float
    match: int
    tokens: tuple[int, ...]
    shares: tuple[float, ...]
    parents: tuple[int, ...] | None


class SuffixAutomaton:
    """All substrings of some texts, with counts of what followed those of at most ``depth`` tokens.

    The fields of states are arrays, indexed by state; most states have one way on, kept in ``token`` and ``to``,
    further ones in ``more``.

    Args:
        depth: Longest context whose counts are kept, >= 1.

    Attributes:
        length: Tokens of the longest string of a state.
        link: State of the longest proper suffix that ends at more places.
        count: Occurrences.
        follows: Occurrences that something follows; the sum of its successors' counts.
        best: Token that followed most often, the latest of equals; -1 where nothing did.
        size: Tokens added.
    """

    def __init__(self, depth: int) -> None:
        self.depth = depth
        self.length, self.link, self.count, self.follows, self.best, self.token, self.to = (array("i") for _ in _FIELDS)
        self.more: dict[int, dict[int, int]] = {}
        self.size = 0
        self._extra = 0  # entries of all the maps in ``more``
        self._last = ROOT  # state of the whole current text
        self.place = Place()  # of its last ``depth`` tokens
        self._new(0, NONE)

    @property
    def bytes(self) -> int:
        """Memory held, within a few per cent."""
        arrays = sum(getsizeof(getattr(self, name)) for name in _FIELDS)
        return arrays + getsizeof(self.more) + 248 * len(self.more) + _MAP_ENTRY * self._extra

    def begin(self) -> None:
        """Begins another text: nothing runs across the border."""
        self._last, self.place = ROOT, Place()

    def extend(self, tokens: Iterable[int]) -> None:
        """Adds tokens to the current text."""
        for token in tokens:
            self._grow(token)
            self._tally(token)
            self.size += 1

    def next(self, state: int, token: int) -> int:
        """The state after one more token, or -1."""
        if self.token[state] == token:
            return self.to[state]
        more = self.more.get(state)
        return NONE if more is None else more.get(token, NONE)

    def ways(self, state: int) -> Iterator[tuple[int, int]]:
        """All tokens that followed, each with the state that it leads to."""
        if self.token[state] != NONE:
            yield self.token[state], self.to[state]
            yield from self.more.get(state, {}).items()

    def settle(self, place: Place) -> Place:
        """Cuts a place to ``depth`` tokens, and finds its state again if that was divided since."""
        length, link, state = self.length, self.link, place.state
        if place.length > self.depth:
            place.length = self.depth
        while state != ROOT and length[link[state]] >= place.length:
            state = link[state]
        place.state = state
        return place

    def advance(self, place: Place, token: int) -> None:
        """Moves to the longest suffix of the place's string and ``token`` that occurs here."""
        self.settle(place)
        while (found := self.next(place.state, token)) == NONE:
            if place.state == ROOT:
                place.length = 0
                return
            place.state = self.link[place.state]
            place.length = self.length[place.state]
        place.state, place.length = found, place.length + 1
        self.settle(place)

    def start(self) -> Place:
        """A place for :meth:`follow`, at the empty string."""
        return Place()

    def follow(self, place: Place, tokens: Iterable[int]) -> None:
        """Moves a place along tokens of any text."""
        for token in tokens:
            self.advance(place, token)

    def find(
        self, place: Place | None, limit: int, factor: float, min_prob: float, tree: bool, worth: float = 0.0
    ) -> Found | None:
        """The continuation that is worth most of all that follow a place's string or one of its suffixes.

        Args:
            place: None for the end of the text that was added to last.
            limit: Most tokens.
            factor: Most tokens for each token of the context.
            min_prob: A continuation ends before the product of its shares sinks below this.
            tree: Whether it may branch.
            worth: What it must exceed.
        """
        best = None
        for state, match in self.contexts(self.place if place is None else place):
            budget = min(limit, int(factor * match))
            if budget <= worth:
                break
            parents: Iterable[int]
            if tree:
                tokens, shares, parents = self.likeliest_tree(state, match, budget, min_prob)
            else:
                tokens, shares = self.likeliest(state, match, budget, min_prob)
                parents = range(-1, len(tokens) - 1)
            products: list[float] = []
            value = 0.0  # added up one by one, as compiled code does: sum() is more exact in newer Pythons
            for share, parent in zip(shares, parents, strict=True):
                products.append(share * products[parent] if parent >= 0 else share)
                value += products[-1]
            if value > worth:
                worth = value
                best = Found(value, match, tuple(tokens), tuple(shares), tuple(parents) if tree else None)
        return best

    def contexts(self, place: Place) -> Iterator[tuple[int, int]]:
        """``(state, length)`` of the place's string and its suffixes that were followed by something, longest first.

        Of suffixes that always occur together only the longest is given; the empty one is not.
        """
        self.settle(place)
        state, length = place.state, place.length
        while state != ROOT:
            if self.best[state] != NONE:
                yield state, length
            state = self.link[state]
            length = self.length[state]

    def likeliest(self, state: int, match: int, limit: int, min_prob: float) -> tuple[list[int], list[float]]:
        """Follows the token that followed most often, again and again, from a context of ``match`` tokens.

        Where nothing followed, the context is shortened, so a copy that reaches the end of the text goes on.

        Returns:
            At most ``limit`` tokens, and the share ``C`` of its context's occurrences that each followed. They end
            before the product of the shares sinks below ``min_prob``.
        """
        tokens: list[int] = []
        shares: list[float] = []
        product = 1.0
        place = Place(state, match)
        while len(tokens) < limit:
            state, token = place.state, self.best[place.state]
            if token == NONE:
                place.state = self.link[state]
                place.length = self.length[place.state]
                if place.state == ROOT:
                    break
                continue
            to = self.next(state, token)
            share = self.count[to] / self.follows[state]
            product *= share
            if product < min_prob:
                break
            tokens.append(token)
            shares.append(share)
            place.state, place.length = to, place.length + 1
            self.settle(place)
        return tokens, shares

    def likeliest_tree(
        self, state: int, match: int, limit: int, min_prob: float
    ) -> tuple[list[int], list[float], list[int]]:
        """The ``limit`` continuations of a context with the largest product of shares, as a tree.

        Returns:
            Tokens, shares and parents, in the order in which they were chosen: parents come first.
        """
        tokens: list[int] = []
        shares: list[float] = []
        parents: list[int] = []
        waiting: list[tuple[float, int, int, float, int, int]] = []  # minus product, parent, token, share, place

        def branch(parent: int, product: float, place: Place) -> None:
            while self.best[place.state] == NONE and place.state != ROOT:
                place.state = self.link[place.state]
                place.length = self.length[place.state]
            if place.state == ROOT:
                return
            for token, to in self._ways_worth(place.state):
                share = self.count[to] / self.follows[place.state]
                if product * share >= min_prob:
                    heapq.heappush(waiting, (-product * share, parent, token, share, to, place.length + 1))

        branch(NONE, 1.0, Place(state, match))
        while waiting and len(tokens) < limit:
            minus_product, parent, token, share, to, length = heapq.heappop(waiting)
            tokens.append(token)
            shares.append(share)
            parents.append(parent)
            branch(len(tokens) - 1, -minus_product, self.settle(Place(to, length)))
        return tokens, shares, parents

    def _ways_worth(self, state: int) -> Iterator[tuple[int, int]]:
        """All ways on, or where there are very many the most frequent one."""
        if len(self.more.get(state, ())) > WIDE:
            favourite = self.best[state]
            return iter([(favourite, self.next(state, favourite))])
        return self.ways(state)

    # --- building

    def _new(self, length: int, link: int) -> int:
        self.length.append(length)
        self.link.append(link)
        self.count.append(0)
        self.follows.append(0)
        self.best.append(NONE)
        self.token.append(NONE)
        self.to.append(NONE)
        return len(self.length) - 1

    def _lead(self, state: int, token: int, to: int) -> None:
        if self.token[state] in (NONE, token):
            self.token[state], self.to[state] = token, to
        else:
            more = self.more.setdefault(state, {})
            self._extra += token not in more
            more[token] = to

    def _grow(self, token: int) -> None:
        """The automaton of the text and one more token (generalised: the state may be there already)."""
        found = self.next(self._last, token)
        if found != NONE:
            self._last = self._divided(self._last, token, found)
            return
        new = self._new(self.length[self._last] + 1, ROOT)
        state = self._last
        while state != NONE and (found := self.next(state, token)) == NONE:
            self._lead(state, token, new)
            state = self.link[state]
        if state != NONE:
            self.link[new] = self._divided(state, token, found)
        self._last = new

    def _divided(self, state: int, token: int, found: int) -> int:
        """The state of exactly ``state``'s strings and ``token``, cut out of ``found`` if need be."""
        length = self.length[state] + 1
        if self.length[found] == length:
            return found
        clone = self._new(length, self.link[found])
        for name in _FIELDS[2:]:
            field = getattr(self, name)
            field[clone] = field[found]
        if found in self.more:
            self.more[clone] = dict(self.more[found])
            self._extra += len(self.more[clone])
        self.link[found] = clone
        while state != NONE and self.next(state, token) == found:
            self._lead(state, token, clone)
            state = self.link[state]
        return clone

    def _tally(self, token: int) -> None:
        """Counts the token after every suffix of what stood before it, and moves the text's own place on."""
        state = self.settle(self.place).state
        count, follows, best, link = self.count, self.follows, self.best, self.link
        first, first_to = self.token, self.to
        seen = NONE
        while state != NONE:
            to = first_to[state] if first[state] == token else self.more[state][token]
            if to != seen:
                count[to] += 1
                seen = to
            follows[state] += 1
            favourite = best[state]
            if favourite != token and (favourite == NONE or count[to] >= count[self.next(state, favourite)]):
                best[state] = token
            state = link[state]
        place = self.place
        place.state, place.length = self.next(place.state, token), place.length + 1
        self.settle(place)
