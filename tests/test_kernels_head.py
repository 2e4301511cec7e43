"""The head's step in one call: torch's numbers, and bits that depend on a row's own path only."""

from __future__ import annotations

import operator
from array import array
from dataclasses import replace
from itertools import accumulate
from typing import Any

import eagle_support as support
import pytest
import torch
from torch import Tensor

from foredraft.config import SamplingParams
from foredraft.drafters import eagle_checkpoint
from foredraft.drafters.eagle_checkpoint import build_head
from foredraft.drafters.eagle_head import EagleHead, HeadSegment, HeadState
from foredraft.drafters.eagle_parts import HeadShape
from foredraft.drafters.eagle_step import CompiledStep
from foredraft.drafters.foresight import grade
from foredraft.errors import ConfigError
from foredraft.kernels import PackedLinear, available
from foredraft.kernels.head_pass import HeadDraft, HeadRows
from foredraft.kernels.law import Draws
from foredraft.kernels.race import race
from foredraft.models.rope import make_rope
from foredraft.sampling.drafting import RequestSampler
from foredraft.sampling.law import TokenLaw
from foredraft.sampling.noise import RequestNoise

pytestmark = pytest.mark.skipif(not available(), reason="no compiled kernels")

D, T = 64, 30
SHAPE = support.shape(
    target_hidden=D,
    hidden=D,
    intermediate=96,
    heads=4,
    kv_heads=2,
    head_dim=16,
    rope=make_rope({"rope_theta": 10000.0}, 16, 512),
)
TABLE = torch.randn(support.VOCAB, D, generator=torch.Generator().manual_seed(9))
TOKENS = torch.randint(0, support.VOCAB, (T,), generator=torch.Generator().manual_seed(4)).tolist()
TAPS = torch.randn(T, 3, D, generator=torch.Generator().manual_seed(5))


def make(bits: int = 8, table: bool = True, **changes: Any) -> EagleHead:
    shape = HeadShape(**{**{name: getattr(SHAPE, name) for name in SHAPE.__slots__}, **changes})
    random = torch.Generator().manual_seed(1)
    tensors = {
        name: torch.randn(size, generator=random) * (0.2 if len(size) == 2 else 0.3) + (len(size) == 1)
        for name, size in eagle_checkpoint.expected_sizes(shape).items()
    }
    packed = PackedLinear.from_float(TABLE / 2)
    embed = lambda tokens: packed.rows(tokens) * 2.0  # noqa: E731
    head = build_head(shape, tensors, support.ids(), embed, bits, (packed, 2.0) if table else None)
    assert head._compiled is not None
    return head


def by_torch(head: EagleHead) -> EagleHead:
    """The same products, called one by one."""
    made = EagleHead(head.shape, head.weights, head.embed)
    made._compiled = None
    return made


def read(head: EagleHead, n: int, parts: tuple[int, ...] = ()) -> HeadState:
    state, at = head.new_state(), 0
    for size in (*parts, n - sum(parts)):
        head.step([HeadSegment(state, TOKENS[at : at + size], TAPS[at : at + size], logits_from=size)])
        state.commit(size)
        at += size
    return state


def levels(head: EagleHead, state: HeadState) -> list[Tensor]:
    """Logits and hidden of two levels of a tree, the second under the second node of the first."""
    root = torch.randn(1, D, generator=torch.Generator().manual_seed(2))
    [first], [hidden] = head.step([HeadSegment(state, [5, 7], root.repeat(2, 1), parents=[-1, -1])])
    [second], [last] = head.step([HeadSegment(state, [9, 11], hidden[1:].repeat(2, 1), parents=[1, 1])])
    return [first, hidden, second, last]


@pytest.mark.parametrize("bits", [4, 8, 32])
@pytest.mark.parametrize("before", [False, True])
def test_the_numbers_are_torchs(bits: int, before: bool) -> None:
    """Within 1e-3 of the largest: the rounding of a product's inputs may fall the other way, the rest is float32."""
    head = make(bits, norm_before_residual=before)
    other = by_torch(head)
    results = []
    for each in (head, other):
        states = [read(each, 20), read(each, 7)]
        found = []
        for at, tokens in ((20, [3]), (21, [4, 5, 6])):  # the second time behind pending rows
            features = TAPS[at : at + len(tokens)]
            logits, hidden = each.step([HeadSegment(state, tokens, features) for state in states])
            found += [*logits, *hidden]
        for state in states:
            state.drop()
        results.append(found + levels(each, states[0]))
        assert [state.pending for state in states] == [4, 0]
    for mine, theirs in zip(*results, strict=True):
        assert (mine - theirs).abs().max() < (1e-5 if bits == 32 else 1e-3) * theirs.abs().max()


@pytest.fixture(params=[0, 1, 2], ids=["portable", "avx2", "avx512"])
def isa(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    from foredraft.kernels import library

    if library.library().fd_isa() < request.param:
        pytest.skip("this CPU does not have it")
    monkeypatch.setattr(library, "isa", lambda: request.param)
    return int(request.param)


@pytest.mark.parametrize("bits", [4, 8, 32])
def test_all_instruction_sets_and_threads_give_the_same_bits(bits: int, isa: int) -> None:
    def run(threads: int) -> list[Tensor]:
        head = make(bits)
        step = head._compiled
        assert step is not None
        with torch.inference_mode():
            state, other = read(head, 20), read(head, 9)
            segments = [HeadSegment(each, TOKENS[20:], TAPS[20:]) for each in (state, other)]
            logits, hidden = step.step(segments, head.embed, threads)
            drafted = step.draft([HeadSegment(other, [3], TAPS[:1])], [Draws(6)], threads)[0].tokens
        return [*logits, *hidden, torch.tensor(drafted)]

    torch.set_num_threads(2)
    try:
        both = run(1), run(2)
    finally:
        torch.set_num_threads(1)
    head = make(bits)
    assert head._compiled is not None
    head._compiled._head._isa = 0
    assert all(torch.equal(a, b) for a, b in zip(*both, strict=True))
    plain = read(head, 20)
    [logits], [hidden] = head.step([HeadSegment(plain, TOKENS[20:], TAPS[20:])])
    assert torch.equal(both[0][0], logits)
    assert torch.equal(both[0][2], hidden)


@pytest.mark.parametrize("bits", [4, 8, 32])
def test_a_row_does_not_depend_on_its_company(bits: int) -> None:
    head = make(bits)
    [alone], _ = head.step([HeadSegment(read(head, 20), [3], TAPS[20:21])])
    parts = read(head, 20, (1, 6, 2))
    logits, _ = head.step([HeadSegment(read(head, 11), [8, 9], TAPS[:2]), HeadSegment(parts, [3], TAPS[20:21])])
    assert torch.equal(logits[1], alone)


@pytest.mark.parametrize("compiled", [True, False])
def test_a_wanted_row_does_not_depend_on_whether_others_are_wanted(compiled: bool) -> None:
    """Texts of a call want none, some and all of their rows, behind pending ones; keys are there all the same."""

    def run(wanted: tuple[int, int, int]) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
        head = make()
        head = head if compiled else by_torch(head)
        states = [read(head, n) for n in (11, 7, 20)]
        head.step([HeadSegment(state, TOKENS[20:22], TAPS[20:22], logits_from=1) for state in states])
        segments = [
            HeadSegment(state, TOKENS[22:27], TAPS[22:27], logits_from=n)
            for state, n in zip(states, wanted, strict=True)
        ]
        logits, hidden = head.step(segments)
        for state in states:
            state.commit(7)
        after, _ = head.step([HeadSegment(state, [3], TAPS[27:28]) for state in states])
        return logits, hidden, after

    every, some = run((0, 0, 0)), run((5, 3, 0))
    assert [len(rows) for rows in some[0]] == [len(rows) for rows in some[1]] == [0, 2, 5]
    for kind in (0, 1):
        for rows, mine, first in zip(every[kind], some[kind], (5, 3, 0), strict=True):
            assert torch.equal(rows[first:], mine) if compiled else torch.allclose(rows[first:], mine, atol=1e-5)
    for rows, mine in zip(every[2], some[2], strict=True):
        assert torch.equal(rows, mine) if compiled else torch.allclose(rows, mine, atol=1e-5)


@pytest.mark.parametrize("bits", [4, 8, 32])
def test_a_branch_of_a_tree_has_the_bits_of_its_path(bits: int) -> None:
    head = make(bits)
    state = read(head, 20)
    *_, tree, _ = levels(head, state)
    state.drop()
    root = torch.randn(1, D, generator=torch.Generator().manual_seed(2))
    for i, leaf in enumerate([9, 11]):
        _, [above] = head.step([HeadSegment(state, [7], root)])
        [chain], _ = head.step([HeadSegment(state, [leaf], above)])
        state.drop()
        assert torch.equal(tree[i], chain[0])


@pytest.mark.parametrize("table", [True, False])
@pytest.mark.parametrize("bits", [8, 32])
def test_a_draft_is_its_steps_one_after_another(bits: int, table: bool) -> None:
    """Two texts of different lengths; and it leaves the state as a single step would."""
    head = make(bits, table)
    assert head._compiled is not None
    assert head._compiled.drafts is table
    states = [read(head, 20), read(head, 7)]
    segments = [
        HeadSegment(states[0], TOKENS[20:23], TAPS[20:23], logits_from=2),
        HeadSegment(states[1], TOKENS[7:8], TAPS[7:8]),
    ]
    drafted = [draft.tokens for draft in head.draft(segments, [Draws(3), Draws(6)])]
    assert [state.pending for state in states] == [3, 1]
    assert [len(tokens) for tokens in drafted] == [3, 6]
    for state in states:
        state.drop()
    for segment, tokens in zip(segments, drafted, strict=True):
        for i, token in enumerate(tokens):
            [logits], [hidden] = head.step([segment])
            assert token == int(head.weights.token_ids[int(logits[-1].argmax())]), i
            segment = HeadSegment(segment.state, [token], hidden[-1:])
    assert len({token for tokens in drafted for token in tokens}) > 3


@pytest.mark.parametrize("compiled", [True, False])
def test_a_draft_ends_with_the_token_that_makes_it_unlikely(compiled: bool) -> None:
    """By the trust in tokens of each class of probability, not by the probabilities; each text for itself."""
    head = make() if compiled else by_torch(make())
    trust = array("d", [0.9, 0.8, 0.99, 0.7, 0.95, 0.6, 0.97, 0.98, 0.5, 1.0])
    states = [read(head, 20), read(head, 7)]
    segments = [HeadSegment(states[0], TOKENS[20:21], TAPS[20:21]), HeadSegment(states[1], TOKENS[7:8], TAPS[7:8])]

    def drafts(*least: float) -> list[HeadDraft]:
        found = head.draft(segments, [Draws(9, trust=trust, least=each) for each in least])
        for state in states:
            state.drop()
        return found

    whole = drafts(0.0, 0.0)
    assert [len(draft.tokens) for draft in whole] == [9, 9]
    for segment, draft in zip(segments, whole, strict=True):
        for token, chance in zip(draft.tokens, draft.chances, strict=True):
            [logits], [hidden] = head.step([segment])
            assert chance == pytest.approx(float(logits[-1].softmax(-1).max()), rel=1e-5)
            segment = HeadSegment(segment.state, [token], hidden[-1:])
        segment.state.drop()
    reach = [list(accumulate((trust[grade(chance)] for chance in draft.chances), operator.mul)) for draft in whole]
    assert len({grade(chance) for draft in whole for chance in draft.chances}) > 1
    for least in ((0.85, 0.5), (0.3, 0.999), (0.5, 0.5), (0.0, 0.7)):
        ended = drafts(*least)
        for early, draft, known, bound in zip(ended, whole, reach, least, strict=True):
            n = next((i for i, chance in enumerate(known, 1) if chance < bound), len(known))
            assert (early.tokens, list(early.chances)) == (draft.tokens[:n], list(draft.chances[:n]))
    states[0].commit(0)
    assert drafts(1.0, 1.0)[0].tokens == whole[0].tokens[: 1 + (reach[0][0] == 1.0)]


def test_a_draft_tells_the_likeliest_siblings_of_its_tokens() -> None:
    head = make()
    state, other = read(head, 20), read(head, 7)
    segments = [HeadSegment(state, TOKENS[20:22], TAPS[20:22], logits_from=1), HeadSegment(other, [5], TAPS[7:8])]
    plain = head.draft(segments, [Draws(4), Draws(2)])
    for each in (state, other):
        each.drop()
    drafted = head.draft(segments, [Draws(4), Draws(2)], branch=3)
    for each in (state, other):
        each.drop()
    assert [draft.tokens for draft in drafted] == [draft.tokens for draft in plain]
    assert not any(draft.siblings for draft in plain)
    for segment, draft in zip(segments, drafted, strict=True):
        assert len(draft.siblings) == len(draft.tokens)
        for token, (ids, weights) in zip(draft.tokens, draft.siblings, strict=True):
            [logits], [hidden] = head.step([segment])
            best = logits[-1].softmax(-1).topk(3)
            assert ids[0] == token
            assert ids == head.weights.token_ids[best.indices].tolist()
            assert weights == pytest.approx(best.values.tolist(), rel=1e-4)
            segment = HeadSegment(segment.state, [token], hidden[-1:])


def sampler(rule: str, seed: int, anchor: int, **params: Any) -> RequestSampler:
    law = TokenLaw(SamplingParams(**({"temperature": 0.8} | params)), [1], support.VOCAB)
    made = RequestSampler(law, RequestNoise(seed, race), rule)  # type: ignore[arg-type]
    made.anchor = anchor
    return made


@pytest.mark.parametrize("controls", [{}, {"top_k": 5}, {"top_p": 0.7}, {"min_p": 0.1, "temperature": 1.3}])
@pytest.mark.parametrize("rule", ["rejection", "block", "coupled"])
def test_a_drawn_draft_is_its_draws_one_after_another(rule: str, controls: dict[str, Any]) -> None:
    """Two texts in one call, and the likeliest tokens of a third; the laws are those that were drawn from."""
    head = make()
    assert head.draws
    samplers = [sampler(rule, 5, 24, **controls), sampler(rule, 6, 9, **controls)]
    states = [read(head, 20), read(head, 7), read(head, 9)]
    segments = [
        HeadSegment(states[0], TOKENS[20:23], TAPS[20:23], logits_from=2),
        HeadSegment(states[1], TOKENS[7:8], TAPS[7:8]),
        HeadSegment(states[2], TOKENS[9:10], TAPS[9:10]),
    ]
    plans = [samplers[0].ahead(4), samplers[1].ahead(7), Draws(3)]
    assert all(plan is not None for plan in plans)
    drafted = head.draft(segments, plans)  # type: ignore[arg-type]
    assert [len(draft.tokens) for draft in drafted] == [4, 7, 3]
    assert drafted[2].laws is None
    for state in states:
        state.drop()
    different = 0
    for segment, draft, own in zip(segments, drafted, samplers, strict=False):
        for i, token in enumerate(draft.tokens):
            [logits], [hidden] = head.step([segment])
            drawn, law = own.draw(logits[-1], draft.tokens[:i], head.weights.token_ids)
            assert drawn == token
            assert (law is None) == (rule == "coupled")
            if law is not None:
                assert draft.laws is not None
                assert torch.allclose(draft.laws[i], law, rtol=1e-5, atol=0)
                assert draft.laws[i].sum() == pytest.approx(1, abs=1e-5)
            different += token != int(head.weights.token_ids[int(logits[-1].argmax())])
            segment = HeadSegment(segment.state, [token], hidden[-1:])
    assert different


def test_a_sampler_is_asked_for_each_token_where_more_than_filters_decide() -> None:
    """Penalties, bans and the like change with what was drafted, and greedy laws with them are no plain argmax."""
    assert sampler("block", 1, 0).ahead(3) is not None
    assert sampler("exact", 1, 0, temperature=0.0).ahead(3) is not None
    for more in (
        {"frequency_penalty": 1.0},
        {"logit_bias": {1: 2.0}},
        {"allowed_token_ids": (1, 2)},
        {"typical_p": 0.9},
    ):
        assert sampler("block", 1, 0, **more).ahead(3) is None
        assert "typical_p" in more or sampler("exact", 1, 0, temperature=0.0, **more).ahead(3) is None


def test_a_head_with_a_table_of_another_length_draws_step_by_step() -> None:
    """Laws are as long as the target's vocabulary."""
    head = make()
    longer = PackedLinear.from_float(torch.cat([TABLE, TABLE[:8]]))
    assert not EagleHead(head.shape, head.weights, head.embed, (longer, 2.0)).draws


def test_rows_after_a_draft_see_none_of_it() -> None:
    head = make()
    state, fresh = read(head, 20), read(head, 20)
    head.draft([HeadSegment(state, [3], TAPS[20:21])], [Draws(5)])
    state.commit(1)
    head.step([HeadSegment(fresh, [3], TAPS[20:21])])
    fresh.commit(1)
    [mine], _ = head.step([HeadSegment(state, [4], TAPS[21:22])])
    [theirs], _ = head.step([HeadSegment(fresh, [4], TAPS[21:22])])
    assert torch.equal(mine, theirs)


def test_a_draft_grows_its_states_buffer() -> None:
    head = make()
    drafts = []
    for capacity in (20, 64):
        state = HeadState(head.shape, capacity)
        head.step([HeadSegment(state, TOKENS[:20], TAPS[:20], logits_from=20)])
        state.commit(20)
        drafts.append(head.draft([HeadSegment(state, [3], TAPS[20:21])], [Draws(9)])[0].tokens)
    assert drafts[0] == drafts[1]
    long = read(head, 20)
    long.skip(1000)  # beyond the first table of angles
    assert len(head.draft([HeadSegment(long, [3], TAPS[20:21])], [Draws(4)])[0].tokens) == 4


@pytest.mark.parametrize("compiled", [True, False])
def test_a_draft_ends_where_logits_are_no_numbers(compiled: bool) -> None:
    head = make(32) if compiled else by_torch(make(32))
    state = head.new_state()
    broken = torch.full((1, 3, D), torch.nan)
    assert head.draft([HeadSegment(state, [3], broken)], [Draws(4)])[0].tokens == []
    state.drop()
    both = [HeadSegment(state, [3], TAPS[:1]), HeadSegment(head.new_state(), [3], broken)]
    assert [len(draft.tokens) for draft in head.draft(both, [Draws(4), Draws(4)])] == [4, 0]


def test_what_does_not_fit_is_refused_by_name() -> None:
    head = make()
    assert head._compiled is not None
    step, angles = head._compiled._head, head._compiled._angles
    cache = torch.zeros(2, 2, 8, 16)

    def refused(field: str, features: Tensor = TAPS[:1], **changes: Any) -> None:
        rows = HeadRows(**{"tokens": [3], "committed": 0, "pending": 0, "position": 0, "cache": cache, **changes})
        with pytest.raises(ConfigError) as error:
            step.draft([rows], features, angles) if rows.drafts else step([rows], features, angles)
        assert error.value.field == field

    refused("tokens", tokens=[support.VOCAB])
    refused("tokens", tokens=[-1])
    refused("features", features=TAPS[:2])
    refused("features", features=TAPS[:1].double())
    refused("cache", committed=8)
    refused("cache", committed=4, draws=Draws(5))
    refused("cache", cache=cache[:, :1])
    refused("cache", tokens=[])
    refused("angles", position=10_000)
    refused("parents", parents=[0])
    refused("parents", parents=[-1, -1])
    refused("drafts", draws=Draws(2), parents=[-1])
    refused("drafts", draws=Draws(2), logits_from=1)
    bare = make(table=False)._compiled
    assert bare is not None
    with pytest.raises(ConfigError, match="embedding"):
        bare._head.draft([HeadRows([3], 0, 0, 0, cache, draws=Draws(2))], TAPS[:1], angles)
    drawn = sampler("block", 1, 0).ahead(2)
    with pytest.raises(ConfigError, match="branch: siblings are told of the likeliest"):
        step.draft([HeadRows([3], 0, 0, 0, cache, draws=drawn)], TAPS[:1], angles, branch=3)
    with pytest.raises(ConfigError, match="uniforms: 2 draws need as many"):
        step.draft([HeadRows([3], 0, 0, 0, cache, draws=replace(drawn, uniforms=[0.5]))], TAPS[:1], angles)  # type: ignore[type-var]


def test_heads_that_the_kernels_do_not_have_go_step_by_step() -> None:
    head = make()
    w = head.weights
    assert CompiledStep.make(SHAPE, replace(w, final_norm=None), None) is None
    assert CompiledStep.make(SHAPE, replace(w, down=make(32).weights.down), None) is None
    assert CompiledStep.make(support.shape(head_dim=12), w, None) is None
