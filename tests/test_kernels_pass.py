"""The whole pass in one call: against transformers, and bits that depend on a row's own path only."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from models_support import FAMILIES, SMOLLM2, fresh, make_hf, random_tokens, read, reference, save_and_load

from foredraft.errors import ConfigError, UnsupportedModelError
from foredraft.kernels import Activations, available
from foredraft.kernels.decoder_pass import PassSegment
from foredraft.models.base import Segment
from foredraft.models.fused import FusedDecoder
from foredraft.models.linear import dense_linear
from foredraft.models.loading import load_model
from foredraft.models.packed import packed_linear

pytestmark = pytest.mark.skipif(not available(), reason="no compiled kernels")

DENSE = [name for name in FAMILIES if "moe" not in name and "mixtral" not in name and not name.endswith("_gguf")]
BITS = ["llama_bias_untied", "qwen3", "gemma2", "gemma3", "mistral_window"]


def fuse(name: str, folder: Path, **options: Any) -> tuple[Any, FusedDecoder]:
    model = make_hf(name)
    return model, FusedDecoder(save_and_load(model, folder, make_linear=packed_linear(), **options))


def close(mine: torch.Tensor, theirs: torch.Tensor) -> None:
    torch.testing.assert_close(mine, theirs, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("name", DENSE)
def test_against_transformers(name: str, tmp_path: Path) -> None:
    hf, ours = fuse(name, tmp_path)
    tokens = random_tokens(40)
    expected = reference(hf, tokens)
    close(fresh(ours, tokens), expected)
    slot = ours.cache.allocate()
    for i, token in enumerate(tokens):
        close(read(ours, slot, [token])[0], expected[i])


@pytest.mark.parametrize("name", BITS)
def test_a_row_does_not_depend_on_its_company(name: str, tmp_path: Path) -> None:
    _, ours = fuse(name, tmp_path)
    tokens, other = random_tokens(40), random_tokens(30, seed=9)
    slot = ours.cache.allocate()
    alone = torch.stack([read(ours, slot, [token])[0] for token in tokens])
    for k in (2, 5, 17, 40):
        slot = ours.cache.allocate()
        parts = [read(ours, slot, tokens[at : at + k]) for at in range(0, 40, k)]
        assert torch.equal(torch.cat(parts), alone), k
    torch.set_num_threads(2)
    try:
        a, b = ours.cache.allocate(), ours.cache.allocate()
        first = ours.forward([Segment(b, other[:7]), Segment(a, tokens[:21])])
        ours.cache.commit(a, 21), ours.cache.commit(b, 7)
        second = ours.forward([Segment(a, tokens[21:]), Segment(b, other[7:])])
    finally:
        torch.set_num_threads(1)
    assert torch.equal(torch.cat([first.logits[1], second.logits[0]]), alone)


BUSHY = (-1, -1, 0, 0, 1, 2, 5, 4, -1)
DEEP = (-1, 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 3, 11, -1)  # deeper than the windows are wide


@pytest.mark.parametrize("parents", [BUSHY, DEEP], ids=["bushy", "deep"])
@pytest.mark.parametrize("name", BITS)
def test_a_tree_has_the_bits_of_its_paths(name: str, parents: tuple[int, ...], tmp_path: Path) -> None:
    _, ours = fuse(name, tmp_path)
    prompt, nodes = random_tokens(13), random_tokens(len(parents), seed=4)
    slot = ours.cache.allocate()
    read(ours, slot, prompt)
    logits = ours.forward([Segment(slot, nodes, 0, parents)]).logits[0]
    for node in range(len(parents)):
        path, at = [], node
        while at >= 0:
            path.insert(0, nodes[at])
            at = parents[at]
        plain = ours.cache.allocate()
        read(ours, plain, prompt)
        assert torch.equal(torch.cat([read(ours, plain, [token]) for token in path])[-1], logits[node]), node
    best = (0, 2, 5, 6) if parents is BUSHY else (0, 1, 2, 3, 11, 12)
    ours.cache.commit(slot, best)
    plain = ours.cache.allocate()
    read(ours, plain, [*prompt, *(nodes[i] for i in best)])
    assert torch.equal(read(ours, slot, [3]), read(ours, plain, [3]))


@pytest.mark.parametrize("name", BITS)
def test_every_instruction_set_gives_the_same_bits(name: str, tmp_path: Path) -> None:
    _, ours = fuse(name, tmp_path)
    tokens = random_tokens(25)
    fast = fresh(ours, tokens)
    for lesser in range(ours._pass._isa):
        ours._pass._isa = lesser
        assert torch.equal(fresh(ours, tokens), fast), lesser


def test_bfloat16_weights_and_cache(tmp_path: Path) -> None:
    hf, ours = fuse("llama", tmp_path, dtype="bfloat16")
    tokens = random_tokens(30)
    expected = reference(hf, tokens)
    mine = fresh(ours, tokens)
    assert ours.cache.rows(ours.cache.allocate()).dtype == torch.bfloat16
    assert (mine - expected).abs().max() < 0.05 * expected.abs().max()
    slot = ours.cache.allocate()
    assert torch.equal(torch.cat([read(ours, slot, [token]) for token in tokens]), mine)


@pytest.mark.parametrize("activations", ["int16", "int8"])
@pytest.mark.parametrize("name", ["llama_bias_untied", "llama"])
def test_rounded_inputs_whether_tied_or_not(name: str, activations: Activations, tmp_path: Path) -> None:
    model = make_hf(name)
    ours = save_and_load(model, tmp_path, activations=activations)
    assert isinstance(ours, FusedDecoder)
    tokens = random_tokens(20)
    close(fresh(ours, tokens), reference(model, tokens))  # float weights: nothing is rounded


def test_taps_and_chosen_logits(tmp_path: Path) -> None:
    _, ours = fuse("gemma3", tmp_path)
    plain = save_and_load(make_hf("gemma3"), tmp_path / "again", make_linear=dense_linear)
    tokens = random_tokens(20)
    mine, theirs = (model.forward([Segment(model.cache.allocate(), tokens, 18)], (0, 2, 4)) for model in (ours, plain))
    close(mine.logits[0], theirs.logits[0])
    assert mine.logits[0].shape[0] == 2
    close(mine.taps[0], theirs.taps[0])
    none = ours.forward([Segment(ours.cache.allocate(), tokens, 20)])
    assert none.logits[0].shape[0] == 0
    close(ours.embed(torch.tensor(tokens)), plain.embed(torch.tensor(tokens)))


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_a_pass_tells_the_likeliest_token_of_each_row(threads: int, tmp_path: Path) -> None:
    """The first of equals; none where a logit is no number."""
    _, ours = fuse("gemma2", tmp_path)  # caps its logits
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        for isa in range(ours._pass._isa + 1):
            ours._pass._isa = isa
            segments = [Segment(ours.cache.allocate(), random_tokens(n), n // 2) for n in (9, 4)]
            output = ours.forward(segments)
            assert [len(each) for each in output.likeliest] == [5, 2]
            assert output.likeliest == [logits.argmax(-1).tolist() for logits in output.logits]
        for weight, expected in ((0.0, 0), (float("nan"), -1)):
            ours.final_norm.weight.fill_(weight)
            output = ours.forward([Segment(ours.cache.allocate(), random_tokens(3))])
            assert output.likeliest == [[expected] * 3]
    finally:
        torch.set_num_threads(before)


def test_what_cannot_be_fused_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModelError, match="mixture-of-experts"):
        fuse("mixtral", tmp_path / "moe")
    with pytest.raises(UnsupportedModelError, match="not packed"):
        FusedDecoder(save_and_load(make_hf("llama"), tmp_path / "dense", make_linear=dense_linear))


def test_a_pass_out_of_bounds_is_refused(tmp_path: Path) -> None:
    _, ours = fuse("llama", tmp_path)
    run, cache, two = ours._pass, torch.zeros(4, 2, 2, 8, 16), [0, 1]
    angles = [(torch.zeros(9, 8), torch.zeros(9, 8))]

    def refused(field: str, tokens: list[int], at: list[int], segment: PassSegment, rows: list[int]) -> None:
        with pytest.raises(ConfigError, match=field):
            run(tokens, at, angles, [segment], rows)

    good = PassSegment(2, 0, cache)
    assert run(two, two, angles, [good], two)[0].shape == (2, 101)
    refused("tokens: an id", [0, 101], two, good, two)
    refused("tokens: an id", [-1, 0], two, good, two)
    refused("positions", two, [-1, 0], good, two)
    refused("positions", two, [0], good, two)
    refused("logit_rows", two, two, good, [1, 2])
    refused("angles", two, [8, 9], good, two)
    with pytest.raises(ConfigError, match="angles"):
        run(two, two, [(torch.zeros(9, 7), torch.zeros(9, 7))], [good], two)
    refused("segments", two, two, PassSegment(3, 0, cache), two)
    refused("segments", two, two, PassSegment(2, 7, cache), two)
    refused("cache", two, two, PassSegment(2, 0, cache.bfloat16()), two)
    refused("cache", two, two, PassSegment(2, 0, cache[:3]), two)
    refused("parents", two, two, PassSegment(2, 0, cache, (0, -1)), two)


@pytest.mark.real_model
@pytest.mark.skipif(not SMOLLM2.exists(), reason="needs the small real model (make fetch)")
@pytest.mark.parametrize("activations", ["float32", "int16", "int8"])
def test_real_model_verifies_with_the_bits_of_plain_decoding(activations: Activations) -> None:
    target = FusedDecoder(load_model(SMOLLM2, dtype="float32", make_linear=packed_linear(activations)).target)  # type: ignore[arg-type]
    slot = target.cache.allocate()
    prompt = random_tokens(20)
    last = read(target, slot, prompt)[-1]
    tokens, rows = [], []
    for _ in range(9):
        tokens.append(int(last.argmax()))
        last = read(target, slot, tokens[-1:])[0]
        rows.append(last)
    for k in (1, 3, 8):
        again = target.cache.allocate()
        read(target, again, prompt)
        verified = target.forward([Segment(again, tokens[: k + 1])]).logits[0]
        assert torch.equal(verified, torch.stack(rows[: k + 1])), k


@pytest.mark.real_model
@pytest.mark.skipif(not SMOLLM2.exists(), reason="needs the small real model (make fetch)")
def test_real_model_agrees_with_the_dequantised_one() -> None:
    dense = load_model(SMOLLM2, dtype="float32", make_linear=dense_linear).target
    exact = fresh(dense, random_tokens(30)).log_softmax(-1)
    for activations, most in (("float32", 1e-7), ("int16", 1e-6), ("int8", 2e-2)):
        packed = load_model(SMOLLM2, dtype="float32", make_linear=packed_linear(activations)).target  # type: ignore[arg-type]
        mine = fresh(FusedDecoder(packed), random_tokens(30)).log_softmax(-1)  # type: ignore[arg-type]
        divergence = (exact.exp() * (exact - mine)).sum(-1).mean()
        assert divergence < most, activations
