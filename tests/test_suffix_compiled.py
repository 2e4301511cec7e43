"""The compiled automaton finds what the Python one does, which other tests compare with brute force."""

from __future__ import annotations

import gc
import random
import resource
import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from foredraft.drafters.suffix_automaton import SuffixAutomaton
from foredraft.drafters.suffix_compiled import CompiledAutomaton, automaton
from foredraft.kernels import available, why_unavailable

pytestmark = pytest.mark.skipif(not available(), reason=why_unavailable() or "kernels")

TOKENS = st.integers(0, 3)
TEXTS = st.lists(st.lists(TOKENS, max_size=40), min_size=1, max_size=4)


@settings(max_examples=300, deadline=None)
@given(
    texts=TEXTS,
    other=st.lists(st.integers(0, 4), max_size=30),
    depth=st.integers(1, 6),
    limit=st.integers(1, 12),
    factor=st.sampled_from([0.4, 1.0, 3.0]),
    min_prob=st.sampled_from([0.0, 0.1, 0.6]),
    tree=st.booleans(),
    step=st.integers(1, 7),
)
def test_both_find_the_same(
    texts: list[list[int]],
    other: list[int],
    depth: int,
    limit: int,
    factor: float,
    min_prob: float,
    tree: bool,
    step: int,
) -> None:
    """While they grow piece by piece: at the text's own end, and where another text stands."""
    ours, reference = CompiledAutomaton(depth), SuffixAutomaton(depth)
    place, other_place = ours.start(), reference.start()
    rules = (limit, factor, min_prob, tree)
    found = 0
    for text in texts:
        ours.begin()
        reference.begin()
        for at in range(0, len(text), step):
            ours.extend(text[at : at + step])
            reference.extend(text[at : at + step])
            ours.follow(place, other[:step])
            reference.follow(other_place, other[:step])
            other = other[step:]
            expected = reference.find(None, *rules)
            assert ours.find(None, *rules) == expected
            worth = 0.0 if expected is None else expected.worth
            assert ours.find(place, *rules, worth) == reference.find(other_place, *rules, worth)
            assert ours.size == reference.size
            found += expected is not None
    if len(texts) == 1 and len(set(texts[0])) == 1 and len(texts[0]) > 2 * step and factor >= 1:
        assert found  # one token again and again can be copied


@pytest.mark.parametrize("tree", [False, True])
@pytest.mark.parametrize("vocab", [2, 50, 3000])
def test_both_find_the_same_in_long_texts(vocab: int, tree: bool) -> None:
    """With the widths of real texts: contexts that many tokens followed, long copies, tables that grow."""
    rng = random.Random(vocab)
    ids = [min(int(1 / (rng.random() + 1e-4)), vocab) for _ in range(4000)]
    ids[2500:2500] = ids[700:1200]
    ours, reference = CompiledAutomaton(24), SuffixAutomaton(24)
    lengths = []
    for at in range(0, len(ids), 13):
        ours.extend(ids[at : at + 13])
        reference.extend(ids[at : at + 13])
        expected = reference.find(None, 16, 4.0, 0.001, tree)
        assert ours.find(None, 16, 4.0, 0.001, tree) == expected
        lengths.append(0 if expected is None else len(expected.tokens))
    assert max(lengths) == 16


def test_memory_is_what_it_says() -> None:
    """Against what the system counts, in a process of its own."""
    code = """
import random, sys
from foredraft.drafters.suffix_compiled import CompiledAutomaton
def held():
    return int(open("/proc/self/statm").read().split()[1]) * 4096
rng = random.Random(1)
ids = [min(int(1 / (rng.random() + 1e-4)), 9999) for _ in range(400_000)]
made = CompiledAutomaton(24)
made.extend(ids[:1000])
before = held()
made.extend(ids[1000:])
real, said = held() - before, made.bytes
assert said / 2 < real < 1.1 * said + 4e6, (real, said)
"""
    subprocess.run([sys.executable, "-c", code], check=True)


def test_automata_of_ended_requests_are_freed() -> None:
    def peak() -> int:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss

    ids = [random.Random(2).randrange(50_000) for _ in range(20_000)]
    for _ in range(5):
        automaton(24).extend(ids)
    gc.collect()
    before = peak()
    for _ in range(200):
        automaton(24).extend(ids)
    assert peak() - before < 20_000  # KiB; two hundred of them hold 500 MB


def test_ids_that_are_none_are_refused() -> None:
    with pytest.raises(OverflowError):
        CompiledAutomaton(4).extend([1 << 40])
