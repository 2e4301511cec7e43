"""Models with running states: whatever is accepted and rejected, the text and logits are those of a fresh run."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as tf
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from foredraft import Engine, SamplingParams
from foredraft.config import SpeculationConfig
from foredraft.drafters import ModelDrafter
from foredraft.errors import CacheFullError, UnsupportedModelError
from foredraft.models.base import Segment, Target
from foredraft.models.hf_recurrent import LONGEST_REPLAY, RecurrentTarget, has_running_state
from foredraft.models.loading import load_model
from foredraft.testing import ScriptedDrafter

V = 61
SMALL: dict[str, Any] = {"vocab_size": V, "hidden_size": 32, "num_hidden_layers": 2}
HEADS: dict[str, Any] = {"num_attention_heads": 2, "num_key_value_heads": 2, "intermediate_size": 48}

CONFIGS: dict[str, Callable[[], Any]] = {
    "mamba": lambda: tf.MambaConfig(**SMALL, state_size=4),
    "mamba2": lambda: tf.Mamba2Config(**SMALL, num_heads=4, head_dim=16, state_size=4, n_groups=1, chunk_size=8),
    "jamba": lambda: tf.JambaConfig(
        **SMALL, **HEADS, attn_layer_period=2, attn_layer_offset=1, expert_layer_period=2, expert_layer_offset=1,
        num_experts=2, num_experts_per_tok=1, mamba_d_state=4, mamba_dt_rank=4, use_mamba_kernels=False,
    ),
    "qwen3_next": lambda: tf.Qwen3NextConfig(
        **SMALL, **HEADS, head_dim=16, layer_types=["linear_attention", "full_attention"], linear_num_key_heads=2,
        linear_num_value_heads=2, linear_key_head_dim=8, linear_value_head_dim=8, num_experts=2, num_experts_per_tok=1,
        moe_intermediate_size=16, shared_expert_intermediate_size=16, max_position_embeddings=256,
    ),
    "lfm2": lambda: tf.Lfm2Config(**SMALL, **HEADS, layer_types=["conv", "full_attention"]),
}  # fmt: skip
STEPWISE = {"mamba": True, "mamba2": False, "jamba": True, "qwen3_next": False, "lfm2": False}


def build(name: str, seed: int = 0) -> Any:
    torch.manual_seed(seed)
    config = copy.deepcopy(CONFIGS[name]())
    config.initializer_range = 0.3
    return tf.AutoModelForCausalLM.from_config(config).float().eval()


@pytest.fixture(scope="module", params=CONFIGS)
def target(request: pytest.FixtureRequest) -> RecurrentTarget:
    found = RecurrentTarget(build(request.param))
    found.name = request.param  # type: ignore[attr-defined]
    return found


def whole(target: RecurrentTarget, ids: list[int]) -> Tensor:
    with torch.no_grad():
        logits: Tensor = target.model(input_ids=torch.tensor([ids]), use_cache=False).logits[0]
    return logits


def close(got: Tensor, right: Tensor) -> None:
    torch.testing.assert_close(got, right, rtol=0, atol=2e-3 * float(right.std()))


def test_it_is_known_and_tried_out(target: RecurrentTarget) -> None:
    assert isinstance(target, Target)
    assert has_running_state(target.model)
    assert target.stepwise is STEPWISE[target.name]  # type: ignore[attr-defined]
    assert target.vocab_size == V
    assert target.cache.slots_in_use == 0
    slot = target.cache.allocate()
    with pytest.raises(UnsupportedModelError, match="running state follows one path"):
        target.forward([Segment(slot, [1, 2], parents=[-1, -1])])
    with pytest.raises(UnsupportedModelError, match="cannot be tapped"):
        target.forward([Segment(slot, [1])], taps=[1])
    target.cache.free(slot)


@settings(max_examples=6, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_any_walk_of_passes_leaves_exactly_the_committed_text(target: RecurrentTarget, data: st.DataObject) -> None:
    slots = [target.cache.allocate(), target.cache.allocate()]
    texts: list[list[int]] = [[], []]
    try:
        for _ in range(data.draw(st.integers(1, 7))):
            new = [data.draw(st.lists(st.integers(0, V - 1), min_size=1, max_size=6)) for _ in slots]
            first = [data.draw(st.integers(0, len(tokens))) for tokens in new]
            segments = [Segment(s, t, f) for s, t, f in zip(slots, new, first, strict=True)]
            for i, logits in enumerate(target.forward(segments).logits):
                if len(logits):
                    close(logits, whole(target, texts[i] + new[i])[len(texts[i]) + first[i] :])
                keep = data.draw(st.integers(0, len(new[i])))
                target.cache.commit(slots[i], keep)
                texts[i] += new[i][:keep]
                if data.draw(st.integers(0, 3)) == 0:
                    texts[i] = texts[i][: data.draw(st.integers(0, len(texts[i])))]
                    target.cache.rollback(slots[i], len(texts[i]))
                assert target.cache.length(slots[i]) == len(texts[i])
    finally:
        for slot in slots:
            target.cache.free(slot)
    assert target.cache.bytes_in_use == 0


@settings(max_examples=4, deadline=None, suppress_health_check=list(HealthCheck))
@given(pattern=st.lists(st.tuples(st.integers(0, 4), st.integers(0, 4)), min_size=1, max_size=6))
def test_text_is_plains_under_every_acceptance_pattern(target: RecurrentTarget, pattern: list[tuple[int, int]]) -> None:
    """Step i drafts ``k`` tokens of which exactly the first ``right`` are what plain decoding writes."""
    prompt, params = [3, 1, 4, 1, 5], SamplingParams(max_tokens=18, ignore_eos=True)
    plain = Engine(target=target, prefix_reuse=False).generate([prompt], params)[0].token_ids
    step = {"i": 0}

    def propose(prefix: tuple[int, ...], k: int) -> list[int]:
        _, right = pattern[step["i"] % len(pattern)]
        rest = plain[len(prefix) - len(prompt) :][:k]
        return [token if i < right else (token + 1) % V for i, token in enumerate(rest)]

    engine = Engine(target=target, drafter=ScriptedDrafter(propose), prefix_reuse=False)
    request = engine.submit(prompt, params)
    while not request.finished:
        request.speculation = SpeculationConfig(k=pattern[step["i"] % len(pattern)][0])
        engine.step()
        step["i"] += 1
    assert list(request.output) == plain
    assert target.cache.slots_in_use == 0


def test_seeded_text_model_drafts_and_a_second_turn(target: RecurrentTarget) -> None:
    name = target.name  # type: ignore[attr-defined]
    params = [SamplingParams(max_tokens=14, ignore_eos=True, temperature=t, seed=4) for t in (0.0, 1.0)]
    plain = [r.token_ids for r in Engine(target=target).generate([[1, 2, 3], [4, 5]], params)]
    drafter = ModelDrafter(RecurrentTarget(build(name, seed=0)))  # the target itself, with a cache of its own
    engine = Engine(target=target, drafter=drafter, k=3)
    results = engine.generate([[1, 2, 3], [4, 5]], params)
    assert [r.token_ids for r in results] == plain
    assert results[0].metrics["speculative_decoding"]["draft_acceptance_rate"] == 1.0
    turn = [1, 2, 3, *plain[0], 7]
    again = engine.generate([turn], params[0])[0]
    assert again.usage.cached_tokens > 0
    assert again.token_ids == Engine(target=target).generate([turn], params[0])[0].token_ids


def test_no_more_is_read_again_than_promised(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing accepted, step after step: two or three calls for two passes, never one that grows with the text."""
    target = RecurrentTarget(build("qwen3_next"))
    slot = target.cache.allocate()
    target.forward([Segment(slot, list(range(20)))])
    target.cache.commit(slot, 20)
    sizes: list[int] = []
    call = target.call
    monkeypatch.setattr(target, "call", lambda tokens, **kw: sizes.append(len(tokens)) or call(tokens, **kw))
    for _ in range(30):
        target.forward([Segment(slot, [1, 2, 3, 4])])
        target.cache.commit(slot, 1)
    assert max(sizes) <= LONGEST_REPLAY + 4
    assert len(sizes) <= 30 + 30 // LONGEST_REPLAY + 1
    assert len(target.cache.entry(slot).saved) == 1


def test_a_failed_pass_and_a_full_cache_change_nothing(target: RecurrentTarget) -> None:
    slot = target.cache.allocate()
    target.forward([Segment(slot, [1, 2, 3])])
    target.cache.commit(slot, 3)
    hook = target._layers[-1].register_forward_pre_hook(_explode)  # type: ignore[index]
    with pytest.raises(RuntimeError, match="cosmic ray"):
        target.forward([Segment(slot, [7, 8])])
    hook.remove()
    close(target.forward([Segment(slot, [4, 5])]).logits[0], whole(target, [1, 2, 3, 4, 5])[3:])
    target.cache.commit(slot, 2)
    budget, target.cache.budget = target.cache.budget, target.cache.bytes_in_use
    with pytest.raises(CacheFullError):
        target.cache.allocate()
    target.cache.budget = budget
    close(target.forward([Segment(slot, [6])]).logits[0], whole(target, [1, 2, 3, 4, 5, 6])[5:])
    target.cache.free(slot)


def _explode(*_: Any) -> None:
    raise RuntimeError("cosmic ray")


def test_a_folder_loads_by_itself(tmp_path: Path) -> None:
    build("qwen3_next").save_pretrained(tmp_path)
    loaded = load_model(tmp_path, dtype="float32", device="cpu")
    assert isinstance(loaded.target, RecurrentTarget)
    params = SamplingParams(max_tokens=8, ignore_eos=True)
    drafted = Engine(target=loaded, drafter="lookup:2,1", k=3).generate([[1, 2, 1, 2]], params)[0]
    assert drafted.token_ids == Engine(target=loaded).generate([[1, 2, 1, 2]], params)[0].token_ids
