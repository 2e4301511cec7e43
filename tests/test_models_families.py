"""Our decoder against transformers on tiny random models of every family."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from models_support import FAMILIES, fresh, make_hf, random_tokens, read, reference, save_and_load

from foredraft.models.base import Segment
from foredraft.models.linear import dense_linear
from foredraft.models.packed import packed_linear

TOLERANCE = 1e-4


@pytest.fixture(scope="module", params=[name for name in FAMILIES if not name.endswith("_gguf")])
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Any]:
    """(transformers' model, ours), the same weights."""
    model = make_hf(request.param)
    linear = packed_linear() if request.param in {"llama_bias_untied", "gemma2", "qwen2_moe"} else dense_linear
    return model, save_and_load(model, tmp_path_factory.mktemp(request.param), make_linear=linear)


def close(mine: torch.Tensor, theirs: torch.Tensor) -> None:
    torch.testing.assert_close(mine, theirs, atol=TOLERANCE, rtol=TOLERANCE)


def test_prefill_and_single_tokens_cross_the_window(pair: tuple[Any, Any]) -> None:
    hf, ours = pair
    tokens = random_tokens(40)
    expected = reference(hf, tokens)
    assert expected.std() > 0.1  # a comparison of zeros would prove nothing
    close(fresh(ours, tokens), expected)
    slot = ours.cache.allocate()
    for i, token in enumerate(tokens):
        close(read(ours, slot, [token])[0], expected[i])
    ours.cache.free(slot)


def test_packed_segments_chunks_and_roll_back(pair: tuple[Any, Any]) -> None:
    hf, ours = pair
    texts = [random_tokens(n, seed=n) for n in (37, 5, 50)]
    expected = [reference(hf, text) for text in texts]
    slots = [ours.cache.allocate() for _ in texts]
    at, chunks = [0, 0, 0], (11, 2, 36)
    step = 0
    while any(at[i] < len(texts[i]) for i in range(3)):
        live = [i for i in range(3) if at[i] < len(texts[i])]
        # Every second pass reads rubbish after the true tokens and keeps only the true ones.
        rubbish = random_tokens(4, seed=step) if step % 2 else []
        parts = [texts[i][at[i] : at[i] + chunks[i]] for i in live]
        segments = [Segment(slots[i], [*part, *rubbish]) for i, part in zip(live, parts, strict=True)]
        output = ours.forward(segments)
        for i, part, logits in zip(live, parts, output.logits, strict=True):
            close(logits[: len(part)], expected[i][at[i] : at[i] + len(part)])
            ours.cache.commit(slots[i], len(part))
            at[i] += len(part)
        step += 1
    ours.cache.rollback(slots[0], 9)
    close(read(ours, slots[0], texts[0][9:]), expected[0][9:])
    for slot in slots:
        ours.cache.free(slot)


def test_each_path_of_a_tree_is_a_chain(pair: tuple[Any, Any]) -> None:
    hf, ours = pair
    prompt, tree = random_tokens(19, seed=3), random_tokens(9, seed=4)
    parents = [-1, -1, 0, 0, 1, 2, 4, 5, 7]
    slot = ours.cache.allocate()
    read(ours, slot, prompt)
    logits = ours.forward([Segment(slot, tree, parents=parents)]).logits[0]
    for node in range(len(tree)):
        path = [node]
        while parents[path[0]] >= 0:
            path.insert(0, parents[path[0]])
        close(logits[node], reference(hf, prompt + [tree[i] for i in path])[-1])
    # Keep the path 0, 2, 5, 7 and go on: the cache must look as if only it had been read.
    ours.cache.commit(slot, [0, 2, 5, 7])
    assert ours.cache.length(slot) == len(prompt) + 4
    after = random_tokens(3, seed=5)
    close(read(ours, slot, after), reference(hf, prompt + [tree[i] for i in (0, 2, 5, 7)] + after)[-3:])
    ours.cache.free(slot)


def test_taps_are_hidden_states(pair: tuple[Any, Any]) -> None:
    hf, ours = pair
    tokens = random_tokens(21, seed=6)
    with torch.no_grad():
        states = hf(input_ids=torch.tensor([tokens]), output_hidden_states=True).hidden_states
    slot = ours.cache.allocate()
    output = ours.forward([Segment(slot, tokens, logits_from=21)], taps=(3, 0, 4))
    assert output.logits[0].shape == (0, 101)
    taps = output.taps[0]
    assert taps.shape == (21, 3, 64)
    close(taps[:, 0], states[3][0])
    close(taps[:, 1], states[0][0])
    close(ours.final_norm(taps[:, 2]), states[4][0])  # transformers norms the last one
    ours.cache.free(slot)


def test_whole_sequences_agree_and_differentiate(pair: tuple[Any, Any]) -> None:
    hf, ours = pair
    batch = torch.tensor([random_tokens(23, seed=7), random_tokens(23, seed=8)])
    logits, taps = ours.full(batch, taps=(1,))
    with torch.no_grad():
        close(logits, hf(input_ids=batch).logits)
    assert taps is not None
    assert taps.shape == (2, 23, 1, 64)
    if not ours.head.parameters():
        return  # packed weights are not trained
    weight = ours.layers[0].qkv.weight
    weight.requires_grad_(True)
    try:
        ours.full(batch)[0].logsumexp(-1).sum().backward()
        assert weight.grad is not None
        assert weight.grad.abs().max() > 0
    finally:
        weight.requires_grad_(False)
        weight.grad = None


@pytest.mark.parametrize("family", ["llama", "gemma2", "qwen3"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float64"])
def test_other_dtypes(family: str, dtype: str, tmp_path: Path) -> None:
    hf = make_hf(family)
    ours = save_and_load(hf, tmp_path, dtype, make_linear=dense_linear)
    tokens = random_tokens(30)
    logits = fresh(ours, tokens)
    if dtype == "float64":
        assert logits.dtype == torch.float64
        with torch.no_grad():
            close(logits, hf.double()(input_ids=torch.tensor([tokens])).logits[0])
        return
    assert logits.dtype == torch.float32
    expected = reference(hf, tokens)
    theirs = reference(hf.to(getattr(torch, dtype)), tokens)
    # Rounding noise: ours may not be further from the float32 logits than transformers' own.
    assert (logits - expected).abs().mean() <= 1.3 * (theirs - expected).abs().mean() + 1e-4


@pytest.mark.parametrize("layers", [1, 3])
def test_first_layers_alone(layers: int, tmp_path: Path) -> None:
    hf = make_hf("llama")
    ours = save_and_load(hf, tmp_path, layers=layers)
    hf.model.layers = hf.model.layers[:layers]
    hf.config.num_hidden_layers = layers
    tokens = random_tokens(12)
    close(fresh(ours, tokens), reference(hf, tokens))
