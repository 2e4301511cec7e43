"""The automaton's counts are those of a brute-force count, in any order of growth and search."""

from __future__ import annotations

import random
import tracemalloc
from collections import Counter
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from foredraft.drafters.suffix_automaton import NONE, ROOT, Place, SuffixAutomaton

TEXTS = st.lists(st.lists(st.integers(0, 3), max_size=25), min_size=1, max_size=4)


def follow(texts: Sequence[Sequence[int]], depth: int) -> dict[tuple[int, ...], Counter[int]]:
    """How often each token followed each context of at most ``depth`` tokens."""
    found: dict[tuple[int, ...], Counter[int]] = {}
    for text in texts:
        for i, token in enumerate(text):
            for n in range(min(i, depth) + 1):
                found.setdefault(tuple(text[i - n : i]), Counter())[token] += 1
    return found


def state_of(automaton: SuffixAutomaton, context: Sequence[int]) -> int:
    state = ROOT
    for token in context:
        state = automaton.next(state, token)
        if state == NONE:
            break
    return state


@settings(max_examples=60, deadline=None)
@given(TEXTS, st.integers(1, 6))
def test_counts_are_exact(texts: list[list[int]], depth: int) -> None:
    automaton = SuffixAutomaton(depth)
    for text in texts:
        automaton.begin()
        automaton.extend(text)
    for context, counts in follow(texts, depth).items():
        state = state_of(automaton, context)
        assert {token: automaton.count[to] for token, to in automaton.ways(state)} == counts
        assert automaton.follows[state] == counts.total()
        assert counts[automaton.best[state]] == max(counts.values())
    assert len(automaton.length) <= max(2 * automaton.size, 1)


@settings(max_examples=40, deadline=None)
@given(TEXTS, st.lists(st.integers(0, 4), max_size=30), st.integers(1, 6))
def test_a_place_follows_a_text_while_the_automaton_grows(texts: list[list[int]], text: list[int], depth: int) -> None:
    """States are divided as the automaton grows; a place found before must still be right."""
    automaton, place, position = SuffixAutomaton(depth), Place(), 0
    seen: list[list[int]] = []
    for added in texts:
        automaton.begin()
        automaton.extend(added)
        seen.append(added)
        for token in text[position : position + 8]:
            automaton.advance(place, token)
            position += 1
            known = follow(seen, depth)
            assert tuple(text[position - place.length : position][:-1]) in known or not place.length
            for state, n in automaton.contexts(place):
                assert state == state_of(automaton, text[position - n : position])
                assert known[tuple(text[position - n : position])].total() == automaton.follows[state]


def test_the_end_of_the_text_is_found_with_what_followed_it() -> None:
    automaton = SuffixAutomaton(24)
    automaton.extend([1, 2, 3, 9, 4, 2, 3, 9, 5, 2, 3])
    [(state, match), *rest] = automaton.contexts(automaton.place)
    assert match == 2  # 2, 3; the suffix 3 always stood behind a 2
    assert rest == []
    assert automaton.likeliest(state, match, 2, 0.1) == ([9, 5], [1.0, 0.5])  # of 4 and 5 the later
    assert automaton.likeliest(state, match, 4, 0.6)[0] == [9]


def test_a_loop_is_copied_round_and_round() -> None:
    automaton = SuffixAutomaton(24)
    automaton.extend([5, 6, 7] * 3)
    state, match = next(iter(automaton.contexts(automaton.place)))
    assert automaton.likeliest(state, match, 20, 0.1)[0] == ([5, 6, 7] * 7)[:20]


@pytest.mark.parametrize(
    "ids",
    [
        pytest.param([0] * 3000, id="one token"),
        pytest.param([i % 2 for i in range(3000)], id="period two"),
        pytest.param([random.Random(1).randrange(50_000) for _ in range(3000)], id="all different"),
        pytest.param([random.Random(1).randrange(2) for _ in range(3000)], id="coin"),
        pytest.param([min(int(1 / (random.Random(i).random() + 1e-4)), 9999) for i in range(3000)], id="words"),
    ],
)
def test_memory_is_what_it_says_or_less(ids: list[int]) -> None:
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    automaton = SuffixAutomaton(24)
    automaton.extend(ids)
    real = tracemalloc.get_traced_memory()[0] - before
    tracemalloc.stop()
    assert real <= automaton.bytes + 2000
    assert automaton.bytes < 1.6 * real + 2000


@settings(max_examples=60, deadline=None)
@given(TEXTS, st.integers(1, 5), st.integers(1, 12))
def test_trees_hold_the_likeliest_continuations(texts: list[list[int]], depth: int, limit: int) -> None:
    """Against all continuations, counted and sorted."""
    automaton = SuffixAutomaton(depth)
    for text in texts:
        automaton.begin()
        automaton.extend(text)
    known = follow(texts, depth)
    for state, match in automaton.contexts(automaton.place):
        context = tuple(texts[-1][len(texts[-1]) - match :])
        tokens, shares, parents = automaton.likeliest_tree(state, match, limit, 0.05)
        products: list[float] = []
        paths: list[tuple[int, ...]] = []
        for token, share, parent in zip(tokens, shares, parents, strict=True):
            before = (context + (paths[parent] if parent >= 0 else ()))[-depth:]
            while before not in known:  # nothing followed: the context is shortened
                before = before[1:]
            assert share == pytest.approx(known[before][token] / known[before].total())
            products.append(share * (products[parent] if parent >= 0 else 1.0))
            paths.append(((*paths[parent], token)) if parent >= 0 else (token,))
        assert products == sorted(products, reverse=True)
        assert len(set(paths)) == len(paths)
        first = [product for product, parent in zip(products, parents, strict=True) if parent < 0]
        firsts = sorted((n / known[context].total() for n in known[context].values()), reverse=True)
        assert first == pytest.approx(firsts[: len(first)])
