"""The target's own first layers draft in the target's own slots, and leave no trace there."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from models_support import fresh, make_hf, random_tokens, read, save_and_load

from foredraft import Engine, SamplingParams
from foredraft.drafters.base import DrafterContext
from foredraft.drafters.early_exit import EarlyExitDrafter
from foredraft.drafters.early_exit_choice import LONGEST, _judge, choose_exit
from foredraft.errors import CacheFullError, ConfigError
from foredraft.models import catalog
from foredraft.models.base import Segment
from foredraft.models.decoder import Decoder
from foredraft.models.fused import FusedDecoder
from foredraft.models.linear import dense_linear
from foredraft.models.loading import load_model
from foredraft.testing import TableModel

FAMILIES = ["llama", "gemma3", "qwen2_window", "mixtral"]
PROMPTS = [random_tokens(9, 1), random_tokens(30, 2)]


@pytest.fixture(scope="module", params=["packed", "dense"])
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def targets(kind: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Decoder]:
    options: dict[str, Any] = {} if kind == "packed" else {"make_linear": dense_linear}
    found = {}
    for family in FAMILIES:
        folder = tmp_path_factory.mktemp(family)
        found[family] = save_and_load(make_hf(family), Path(folder), **options)
    return found


@pytest.mark.parametrize("family", FAMILIES)
def test_text_is_plains_greedy_and_seeded(targets: dict[str, Decoder], family: str) -> None:
    target = targets[family]
    greedy = SamplingParams(max_tokens=24, ignore_eos=True)
    seeded = SamplingParams(max_tokens=24, ignore_eos=True, temperature=0.8, seed=3)
    for params in (greedy, seeded):
        without = Engine(target=target)
        plain = [r.token_ids for r in without.generate(PROMPTS, params)]
        without.reset()
        for layers in (1, 3):
            engine = Engine(target=target, drafter=EarlyExitDrafter(layers), k=3)
            results = engine.generate(PROMPTS, params)
            assert [r.token_ids for r in results] == plain
            assert all(sum(step.drafted for step in r.stats.trace) > 10 for r in results)  # nobody lost its drafter
            assert target.cache.slots_in_use == engine.scheduler.pool.idle
            engine.reset()


@pytest.mark.parametrize("family", FAMILIES)
def test_all_layers_are_always_right(targets: dict[str, Decoder], family: str) -> None:
    engine = Engine(target=targets[family], drafter=EarlyExitDrafter(4), k=4)
    result = engine.generate([PROMPTS[0]], SamplingParams(max_tokens=30, ignore_eos=True))[0]
    assert result.metrics["speculative_decoding"]["draft_acceptance_rate"] == 1.0
    engine.reset()


@pytest.mark.parametrize("family", FAMILIES)
def test_drafted_rows_leave_no_trace(targets: dict[str, Decoder], family: str) -> None:
    """Logits after a draft in the slot are those of a slot that never saw one; those of the exit are its tap's."""
    target, ids = targets[family], random_tokens(20, 5)
    slot = target.cache.allocate()
    read(target, slot, ids[:12])
    early = target.first_layers(2)
    bytes_before, whole = target.cache.bytes_per_token, fresh(target, ids)
    out = early.forward([Segment(slot, ids[12:16])]).logits[0]
    early.cache.commit(slot, 4)
    target.cache.rollback(slot, 12)
    torch.testing.assert_close(read(target, slot, ids[12:]), whole[12:], rtol=0, atol=1e-4)
    target.cache.rollback(slot, 12)
    tap = target.forward([Segment(slot, ids[12:16])], taps=[2]).taps[0][:, 0]
    target.cache.commit(slot, 0)
    torch.testing.assert_close(out, target.logits(tap), rtol=0, atol=1e-4)
    assert early.cache is target.cache
    assert target.cache.bytes_per_token == bytes_before
    target.cache.free(slot)


def test_no_weight_is_held_twice(targets: dict[str, Decoder], kind: str) -> None:
    target = targets["llama"]
    early = target.first_layers(2, rounded=True)
    assert isinstance(target, FusedDecoder) is (kind == "packed")
    if isinstance(early, FusedDecoder) and isinstance(target, FusedDecoder):
        for mine, theirs in zip(early._pass.layers, target._pass.layers[:2], strict=True):
            for name in ("qkv", "out", "gate_up", "down"):
                pairs = zip(getattr(mine, name).matrices, getattr(theirs, name).matrices, strict=True)
                assert all(a.data.data_ptr() == b.data.data_ptr() for a, b in pairs)
    assert early.layers == target.layers[:2]
    assert early.embedding is target.embedding


def test_a_full_cache_only_ends_the_draft(targets: dict[str, Decoder]) -> None:
    target = targets["llama"]
    drafter = EarlyExitDrafter(2)
    drafter.attach(DrafterContext(target, None))
    slot = target.cache.allocate()
    read(target, slot, PROMPTS[0][:-1])

    class Asking:
        id, ids, prompt_length, tenant, sampler = "r", PROMPTS[0], 9, "", None

    asking: Any = Asking()
    asking.slot = slot
    reserve = target.cache.reserve

    def full(rows: Any) -> None:
        raise CacheFullError("no room")

    target.cache.reserve = full  # type: ignore[method-assign]
    assert drafter.propose(asking, 3).tokens == ()
    target.cache.reserve = reserve  # type: ignore[method-assign]
    assert target.cache.length(slot) == 8
    target.cache.free(slot)


def test_what_cannot_be_served_is_refused(targets: dict[str, Decoder]) -> None:
    with pytest.raises(ConfigError, match="must be between 1 and 4"):
        Engine(target=targets["llama"], drafter="early-exit:5")
    with pytest.raises(ConfigError, match="must be between 1 and 4"):
        Engine(target=targets["llama"], drafter="early-exit:0")
    with pytest.raises(ConfigError, match="'half' is no number of layers"):
        Engine(target=targets["llama"], drafter="early-exit:half")
    with pytest.raises(ConfigError, match="name a number of layers"):
        Engine(target=targets["llama"], drafter="early-exit")
    with pytest.raises(ConfigError, match="a TableModel cannot stop"):
        Engine(target=TableModel(lambda _: [0.0], 1), drafter="early-exit:1")


def test_the_choice_weighs_agreement_and_cost() -> None:
    flat = {2: 1.0, LONGEST + 1: 1.0}
    good = _judge(8, 0.8, 0.3, flat)
    assert good.speed == pytest.approx(sum(0.8**i for i in range(good.k + 1)) / (good.k * 0.3 + 1))
    assert good.speed > 1.2
    assert _judge(4, 0.05, 0.15, flat).speed < 1
    assert _judge(8, 0.8, 0.3, {2: 2.0, LONGEST + 1: 9.0}).speed < 1  # verification that pays for each row


@pytest.mark.real_model
@pytest.mark.skipif(catalog.resolve("smollm2-135m") is None, reason="the small real model is not here")
def test_smollm2_drafts_for_itself() -> None:
    loaded = load_model("smollm2-135m", dtype="float32", device="cpu", cache_bytes=1 << 27)
    params = SamplingParams(max_tokens=16)
    plain = Engine(target=loaded).generate("The capital of France is", params)[0].token_ids
    engine = Engine(target=loaded, drafter="early-exit:24", k=3)
    result = engine.generate("The capital of France is", params)[0]
    assert result.token_ids == plain
    assert result.metrics["speculative_decoding"]["num_accepted_draft_tokens"] > 0
    assert isinstance(loaded.target, Decoder)
    tried = choose_exit(loaded.target, loaded.tokenizer)
    assert [exit.layers for exit in tried] == sorted(exit.layers for exit in tried)
    assert tried[-1].agreement > tried[0].agreement
    assert 0 < tried[0].cost < tried[-1].cost
