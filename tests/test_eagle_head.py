"""The head that drafts computes what the head that was trained computes, in chains, trees and batches."""

from __future__ import annotations

import eagle_support as support
import pytest
import torch

from foredraft.drafters.eagle_head import EagleHead, HeadSegment, HeadState
from foredraft.drafters.eagle_step import CompiledStep
from foredraft.kernels import available

T = 9


@pytest.fixture(params=["compiled", "torch"], autouse=True)
def step(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each test with the step in one call of the kernels, where there are any, and with that of torch."""
    if request.param == "torch":
        monkeypatch.setattr(CompiledStep, "make", lambda *_: None)
    elif not available():
        pytest.skip("no compiled kernels")


@pytest.fixture
def text() -> tuple[list[int], torch.Tensor]:
    generator = torch.Generator().manual_seed(4)
    tokens = torch.randint(0, support.VOCAB, (T + 1,), generator=generator).tolist()
    return tokens, torch.randn(T, 3, support.WIDTH, generator=generator)


def read(
    head: EagleHead, tokens: list[int], taps: torch.Tensor, end: int
) -> tuple[HeadState, torch.Tensor, torch.Tensor]:
    """Reads rows 0 … end-1; the state, and logits and hidden of the last row."""
    state = head.new_state()
    logits, hidden = head.step([HeadSegment(state, tokens[1 : end + 1], head.fuse(taps[:end]), logits_from=end - 1)])
    state.commit(end)
    return state, logits[0][0], hidden[0][-1:]


@pytest.mark.parametrize("before", [False, True])
def test_a_chain_is_what_training_time_test_computes(text: tuple[list[int], torch.Tensor], before: bool) -> None:
    tokens, taps = text
    net = support.net(norm_before_residual=before)
    head = support.head(net)
    embeddings = support.embedding()[torch.tensor(tokens[1:])]
    trained = net(taps, embeddings, 2, 4)
    for start in range(2, T - 4):
        state, logits, hidden = read(head, tokens, taps, start + 1)
        assert torch.allclose(logits, trained[0][start - 2], atol=1e-4)
        for step in range(1, 4):
            rows, states = head.step([HeadSegment(state, [tokens[start + 1 + step]], hidden)])
            assert torch.allclose(rows[0][0], trained[step][start - 2], atol=1e-4), (start, step)
            hidden = states[0]


def test_reading_in_parts_changes_nothing(text: tuple[list[int], torch.Tensor]) -> None:
    tokens, taps = text
    head = support.head(support.net())
    _, whole, _ = read(head, tokens, taps, T)
    state = head.new_state()
    for start, end in [(0, 4), (4, 5), (5, T)]:
        logits, _ = head.step([HeadSegment(state, tokens[start + 1 : end + 1], head.fuse(taps[start:end]))])
        state.commit(end - start)
    assert torch.allclose(logits[0][-1], whole, atol=1e-5)


def test_a_branch_of_a_tree_is_the_chain_of_its_path(text: tuple[list[int], torch.Tensor]) -> None:
    tokens, taps = text
    head = support.head(support.net())
    state, _, root = read(head, tokens, taps, T)
    # two children of the root, then two grandchildren under the second child, level by level
    _, first = head.step([HeadSegment(state, [5, 7], root.repeat(2, 1), parents=[-1, -1])])
    logits, _ = head.step([HeadSegment(state, [9, 11], first[0][1:].repeat(2, 1), parents=[1, 1])])
    tree = logits[0]
    state.drop()
    for i, leaf in enumerate([9, 11]):
        _, above = head.step([HeadSegment(state, [7], root)])
        chain, _ = head.step([HeadSegment(state, [leaf], above[0])])
        state.drop()
        assert torch.allclose(tree[i], chain[0][0], atol=1e-5)
    assert not torch.allclose(tree[0], tree[1], atol=1e-3)


def test_texts_in_one_call_do_not_meet(text: tuple[list[int], torch.Tensor]) -> None:
    tokens, taps = text
    head = support.head(support.net())
    alone = [read(head, tokens, taps, end)[1] for end in (3, 7)]
    states = [head.new_state(), head.new_state()]
    together, _ = head.step(
        [
            HeadSegment(state, tokens[1 : end + 1], head.fuse(taps[:end]), logits_from=end - 1)
            for state, end in zip(states, (3, 7), strict=True)
        ]
    )
    for one, both in zip(alone, together, strict=True):
        assert torch.allclose(one, both[0], atol=1e-5)


def test_a_state_grows_past_its_first_size() -> None:
    head = support.head(support.net())
    rows = 700
    tokens = [3] * rows
    features = torch.randn(rows, support.WIDTH)
    whole, parts = head.new_state(), head.new_state()
    logits, _ = head.step([HeadSegment(whole, tokens, features, logits_from=rows - 1)])
    for start in range(0, rows, 300):
        part = features[start : start + 300]
        last, _ = head.step([HeadSegment(parts, tokens[: len(part)], part)])
        parts.commit(len(part))
    assert torch.allclose(logits[0][0], last[0][-1], atol=1e-4)


def test_a_copy_of_the_beginning_is_the_beginning(text: tuple[list[int], torch.Tensor]) -> None:
    tokens, taps = text
    head = support.head(support.net())
    state, _, _ = read(head, tokens, taps, T)
    copy = state.copy(4, head.shape)
    logits, _ = head.step([HeadSegment(copy, tokens[5:], head.fuse(taps[4:T]))])
    assert torch.allclose(logits[0][-1], read(head, tokens, taps, T)[1], atol=1e-5)
