"""The slot cache: whatever happens to it, the next logits are those of the committed text read afresh."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule
from models_support import fresh, make_hf, random_tokens, read, save_and_load

from foredraft.errors import CacheFullError, ContextLengthError
from foredraft.models.base import Segment, SlotCache, Target
from foredraft.models.cache import KVCache
from foredraft.models.prefix import PrefixPool

_MODELS: dict[str, Any] = {}


@pytest.fixture(scope="module", autouse=True)
def models(tmp_path_factory: pytest.TempPathFactory) -> None:
    for family in ("llama", "mistral_window", "gemma3"):
        _MODELS[family] = save_and_load(make_hf(family), tmp_path_factory.mktemp(family))


def small_cache(budget_tokens: int) -> KVCache:
    cache = KVCache(2, 1, 4, torch.float32, torch.device("cpu"), 10**9)
    cache.budget = budget_tokens * cache.bytes_per_token
    return cache


class CacheMachine(RuleBasedStateMachine):
    """Random passes, commits, roll backs and frees over several slots against a list of tokens for each."""

    slots = Bundle("slots")
    family = "llama"

    def __init__(self) -> None:
        super().__init__()
        self.target = _MODELS[self.family]
        self.texts: dict[int, list[int]] = {}
        self.slots_before, self.bytes_before = self.target.cache.slots_in_use, self.target.cache.bytes_in_use

    @rule(target=slots)
    def allocate(self) -> int:
        slot = self.target.cache.allocate()
        self.texts[slot] = []
        return slot

    @rule(target=slots, slot=slots, data=st.data())
    def copy(self, slot: int, data: st.DataObject) -> int:
        length = data.draw(st.integers(0, len(self.texts[slot])))
        other = self.target.cache.copy(slot, length)
        self.texts[other] = self.texts[slot][:length]
        return other

    @rule(slot=consumes(slots))
    def free(self, slot: int) -> None:
        self.target.cache.free(slot)
        del self.texts[slot]

    @rule(slot=slots, data=st.data(), count=st.integers(1, 40), seed=st.integers(0, 999))
    def chain(self, slot: int, data: st.DataObject, count: int, seed: int) -> None:
        tokens = random_tokens(min(count, 200 - len(self.texts[slot])) or 1, seed)
        keep = data.draw(st.integers(0, len(tokens)))
        self.target.forward([Segment(slot, tokens, logits_from=len(tokens))])
        self.target.cache.commit(slot, keep)
        self.texts[slot] += tokens[:keep]

    @rule(slot=slots, data=st.data(), seed=st.integers(0, 999))
    def tree(self, slot: int, data: st.DataObject, seed: int) -> None:
        tokens = random_tokens(8, seed)
        parents = [data.draw(st.integers(-1, i - 1)) for i in range(8)]
        self.target.forward([Segment(slot, tokens, 8, parents)])
        node = data.draw(st.integers(-1, 7))
        path: list[int] = []
        while node >= 0:
            path.insert(0, node)
            node = parents[node]
        self.target.cache.commit(slot, path)
        self.texts[slot] += [tokens[i] for i in path]

    @rule(slot=slots, share=st.floats(0, 1))
    def roll_back(self, slot: int, share: float) -> None:
        length = int(share * len(self.texts[slot]))
        self.target.cache.rollback(slot, length)
        del self.texts[slot][length:]

    @rule(slot=slots, probe=st.integers(3, 100))
    def next_logits_are_those_of_the_text(self, slot: int, probe: int) -> None:
        logits = self.target.forward([Segment(slot, [probe])]).logits[0][0]
        self.target.cache.commit(slot, 0)
        expected = fresh(self.target, [*self.texts[slot], probe])[-1]
        torch.testing.assert_close(logits, expected, atol=1e-4, rtol=1e-4)

    @invariant()
    def books_balance(self) -> None:
        cache = self.target.cache
        assert cache.slots_in_use - self.slots_before == len(self.texts)
        for slot, text in self.texts.items():
            assert cache.length(slot) == len(text)

    def teardown(self) -> None:
        for slot, text in self.texts.items():
            probe = read(self.target, slot, [7])[0]
            torch.testing.assert_close(probe, fresh(self.target, [*text, 7])[-1], atol=1e-4, rtol=1e-4)
            self.target.cache.free(slot)
        cache = self.target.cache
        assert (cache.slots_in_use, cache.bytes_in_use) == (self.slots_before, self.bytes_before)


_settings = settings(
    max_examples=25, stateful_step_count=15, deadline=None, suppress_health_check=list(HealthCheck), database=None
)
TestLlama = CacheMachine.TestCase
TestLlama.settings = _settings
TestWindow = type("W", (CacheMachine,), {"family": "mistral_window"}).TestCase  # type: ignore[attr-defined]
TestWindow.settings = _settings
TestAlternating = type("G", (CacheMachine,), {"family": "gemma3"}).TestCase  # type: ignore[attr-defined]
TestAlternating.settings = _settings


def test_window_16_prompt_10_every_draft_rejected() -> None:
    """Fault 13: 64 tokens past a window of 16 with four rejected drafts a step equal plain decoding."""
    target = _MODELS["mistral_window"]
    assert set(target.shape.windows) == {16}
    prompt = random_tokens(10)
    plain, slot = [], target.cache.allocate()
    logits = read(target, slot, prompt)[-1]
    for _ in range(64):
        plain.append(int(logits.argmax()))
        logits = read(target, slot, [plain[-1]])[-1]
    target.cache.rollback(slot, 0)
    speculative = []
    logits = read(target, slot, prompt)[-1]
    for step in range(64):
        speculative.append(int(logits.argmax()))
        rejected = random_tokens(4, seed=step)
        logits = target.forward([Segment(slot, [speculative[-1], *rejected])]).logits[0][0]
        target.cache.commit(slot, 1)
    target.cache.free(slot)
    assert speculative == plain
    assert len(set(plain)) > 3


def test_contract(tmp_path: Path) -> None:
    target = save_and_load(make_hf("llama"), tmp_path)
    assert isinstance(target, Target)
    cache: SlotCache = target.cache
    assert cache.slots_in_use == 0
    assert cache.bytes_in_use == 0


def test_budget_refuses_before_anything_changes() -> None:
    cache = small_cache(100)
    a, b = cache.allocate(), cache.allocate()
    cache.reserve({a: 40})
    cache.set_pending(a, range(40))
    cache.commit(a, 40)
    before, lengths = cache.bytes_in_use, (cache.length(a), cache.length(b))
    with pytest.raises(CacheFullError, match=r"cache_bytes: no room for 90 more tokens.*raise cache_bytes"):
        cache.reserve({a: 30, b: 60})
    assert (cache.bytes_in_use, (cache.length(a), cache.length(b))) == (before, lengths)
    cache.reserve({b: 36})  # what is left, exactly
    assert cache.bytes_in_use == cache.budget
    with pytest.raises(CacheFullError):
        cache.allocate()
    cache.free(a)
    cache.allocate()
    assert cache.slots_in_use == 2


def test_a_short_answer_does_not_move_its_prompt() -> None:
    cache = small_cache(10**4)
    slot = cache.allocate()
    cache.reserve({slot: 1000})
    cache.set_pending(slot, range(1000))
    cache.commit(slot, 1000)
    before = cache.rows(slot).data_ptr()
    cache.reserve({slot: 250})
    assert cache.rows(slot).data_ptr() == before


def test_growth_copies_seldom() -> None:
    cache = small_cache(10**6)
    slot, buffers = cache.allocate(), set()
    for _ in range(5000):
        cache.reserve({slot: 1})
        cache.set_pending(slot, (0,))
        cache.commit(slot, 1)
        buffers.add(cache.rows(slot).shape)
    assert len(buffers) <= 8
    assert cache.bytes_in_use <= 2 * 5000 * cache.bytes_per_token


def test_context_limit_refuses_before_anything_changes(tmp_path: Path) -> None:
    target = save_and_load(make_hf("llama"), tmp_path, max_context=20)
    a, b = target.cache.allocate(), target.cache.allocate()
    read(target, a, random_tokens(18))
    with pytest.raises(ContextLengthError, match="max_context: 21 tokens do not fit the context of 20"):
        target.forward([Segment(b, [5]), Segment(a, [5, 6, 7])])
    assert (target.cache.length(a), target.cache.length(b), target.cache.pending(b)) == (18, 0, 0)
    target.forward([Segment(a, [5, 6, 7], parents=[-1, 0, 0])])  # three rows, but no path is longer than two


@pytest.mark.parametrize(
    ("keep", "message"),
    [
        (4, "more rows than the 3 pending"),
        (-1, "more rows than"),
        ([1], "not a path"),
        ([0, 0], "not a path"),
        ([0, 3], "not a path"),
        ([0, 1, 2, 3], "more rows than"),
    ],
)
def test_commit_refuses_what_is_no_path(keep: Any, message: str) -> None:
    cache = small_cache(100)
    slot = cache.allocate()
    cache.reserve({slot: 3})
    cache.set_pending(slot, (0, 1, 1))
    with pytest.raises(ValueError, match=message):
        cache.commit(slot, keep)
    assert cache.pending(slot) == 3
    cache.commit(slot, [0, 2])
    assert cache.length(slot) == 2


@pytest.mark.parametrize(
    ("segment", "message"),
    [
        (Segment(0, []), "does not fit a segment of 0"),
        (Segment(0, [5], logits_from=2), "logits_from: 2"),
        (Segment(0, [101]), "between 0 and 100"),
        (Segment(0, [-1]), "between 0 and 100"),
        (Segment(0, [5, 6], parents=[0, -1]), r"parents\[0\] is 0"),
        (Segment(0, [5, 6], parents=[-1]), "parents has 1 entries for 2"),
        (Segment(99, [5]), "slot 99 is not allocated"),
    ],
)
def test_bad_segments_change_nothing(segment: Segment, message: str) -> None:
    target = _MODELS["llama"]
    slot = target.cache.allocate()
    bad = Segment(slot if segment.slot == 0 else segment.slot, segment.tokens, segment.logits_from, segment.parents)
    with pytest.raises(ValueError, match=message):
        target.forward([bad])
    with pytest.raises(ValueError, match="at most one a slot"):
        target.forward([Segment(slot, [5]), Segment(slot, [6])])
    with pytest.raises(ValueError, match="taps"):
        target.forward([Segment(slot, [5])], taps=(5,))
    assert target.cache.pending(slot) == 0
    read(target, slot, [5])
    target.forward([Segment(slot, [5])])
    with pytest.raises(ValueError, match="uncommitted rows"):
        target.forward([Segment(slot, [5])])
    target.cache.free(slot)


def test_a_copy_needs_room_and_committed_rows() -> None:
    cache = small_cache(110)
    slot = cache.allocate()
    cache.reserve({slot: 60})
    cache.set_pending(slot, range(60))
    cache.commit(slot, 60)
    with pytest.raises(ValueError, match="between 0 and the 60 committed"):
        cache.copy(slot, 61)
    before = cache.bytes_in_use
    with pytest.raises(CacheFullError):
        cache.copy(slot, 50)
    assert (cache.slots_in_use, cache.bytes_in_use) == (1, before)
    assert cache.length(cache.copy(slot, 30)) == 30


def test_a_pool_copies_only_what_knows_how() -> None:
    """A cache that inherits ``copy`` may keep more than its parent copies; then the prompt is read again."""

    class More(KVCache):
        pass

    for kind, shared in ((KVCache, 9), (More, 0)):
        cache = kind(2, 1, 4, torch.float32, torch.device("cpu"), 10**6)
        slot = cache.allocate()
        cache.reserve({slot: 10})
        cache.set_pending(slot, range(10))
        cache.commit(slot, 10)
        assert PrefixPool(cache, 4).copy(slot, [1] * 20, [1] * 10, "")[1] == shared
