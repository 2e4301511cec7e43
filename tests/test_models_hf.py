"""The transformers adapter on tiny random models: its logits are transformers' own, however the cache was used."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers as tf
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from foredraft.errors import CacheFullError, ConfigError, ContextLengthError, UnsupportedModelError
from foredraft.models import hf as hf_module
from foredraft.models.base import Segment, Target
from foredraft.models.hf import HfTarget

V, CONTEXT, WINDOW = 61, 64, 8
SMALL: dict[str, Any] = {
    "vocab_size": V,
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "max_position_embeddings": CONTEXT,
}
GATED: dict[str, Any] = SMALL | {"intermediate_size": 48, "num_key_value_heads": 2}
IDS: dict[str, Any] = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}

CONFIGS: dict[str, Callable[[], Any]] = {
    "gpt2": lambda: tf.GPT2Config(vocab_size=V, n_embd=32, n_layer=3, n_head=2, n_positions=CONTEXT, **IDS),
    "opt": lambda: tf.OPTConfig(**SMALL, ffn_dim=48, word_embed_proj_dim=32, **IDS),
    "gpt_neox": lambda: tf.GPTNeoXConfig(**SMALL, intermediate_size=48, **IDS),
    "phi": lambda: tf.PhiConfig(**SMALL, intermediate_size=48, **IDS),
    "falcon": lambda: tf.FalconConfig(**SMALL, **IDS),
    "bloom": lambda: tf.BloomConfig(vocab_size=V, hidden_size=32, n_layer=3, n_head=2, **IDS),
    "mpt": lambda: tf.MptConfig(vocab_size=V, d_model=32, n_layers=3, n_heads=2, max_seq_len=CONTEXT),
    "gpt_neo": lambda: tf.GPTNeoConfig(
        vocab_size=V, hidden_size=32, num_layers=2, num_heads=2, attention_types=[[["global", "local"], 1]],
        window_size=WINDOW, max_position_embeddings=CONTEXT, **IDS,
    ),
    "cohere": lambda: tf.CohereConfig(**GATED, **IDS),
    "deepseek_v3": lambda: tf.DeepseekV3Config(
        **GATED, moe_intermediate_size=32, n_routed_experts=4, n_group=1, topk_group=1, num_experts_per_tok=2,
        q_lora_rank=16, kv_lora_rank=16, qk_rope_head_dim=8, v_head_dim=16, qk_nope_head_dim=8,
        first_k_dense_replace=1, **IDS,
    ),
    "starcoder2, windows": lambda: tf.Starcoder2Config(**GATED, sliding_window=WINDOW, **IDS),
    "gpt_oss, windows": lambda: tf.GptOssConfig(
        **GATED, sliding_window=WINDOW, head_dim=16, num_local_experts=4, num_experts_per_tok=2, **IDS,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
    ),
    "llama4, chunks": lambda: tf.Llama4TextConfig(
        **GATED, intermediate_size_mlp=48, attention_chunk_size=WINDOW, head_dim=16, num_local_experts=2, **IDS
    ),
}  # fmt: skip
TREES = ["gpt2", "opt", "gpt_neox", "phi", "falcon", "cohere", "deepseek_v3"]


def build(config: Any, dtype: torch.dtype | None = None) -> Any:
    """A random model whose logits are spread enough for a wrong mask to show; float64 where torch can."""
    torch.manual_seed(0)
    config = copy.deepcopy(config)
    config.initializer_range = 0.3
    mixture = config.model_type in ("gpt_oss", "deepseek_v3")  # their grouped products have no float64
    return tf.AutoModelForCausalLM.from_config(config).to(dtype or (torch.float32 if mixture else torch.float64)).eval()


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Any:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module", params=CONFIGS)
def target(request: pytest.FixtureRequest) -> HfTarget:
    return HfTarget(build(CONFIGS[request.param]()))


@pytest.fixture(scope="module")
def gpt2() -> HfTarget:
    return HfTarget(build(CONFIGS["gpt2"]()))


def whole(target: HfTarget, ids: list[int]) -> Tensor:
    """Transformers' logits for a text read at once without a cache."""
    with torch.no_grad():
        logits: Tensor = target.model(input_ids=torch.tensor([ids]), use_cache=False).logits[0]
    return logits


def random_ids(n: int, seed: int = 1) -> list[int]:
    return torch.randint(V, (n,), generator=torch.Generator().manual_seed(seed)).tolist()


def close(got: Tensor, right: Tensor) -> None:
    """Equal but for rounding: models compute softmax and norms in float32 here and there, even in float64."""
    off = 1e-5 if right.dtype == torch.float64 else 1e-4
    torch.testing.assert_close(got.double(), right.double(), rtol=0, atol=off * float(right.std()))


def test_ragged_batches_commits_and_roll_backs_give_a_fresh_runs_logits(target: HfTarget) -> None:
    assert isinstance(target, Target)
    assert target.vocab_size == V
    texts = [random_ids(24, seed) for seed in (1, 2, 3)]  # three windows long
    slots = [target.cache.allocate() for _ in texts]
    right = [whole(target, text) for text in texts]
    cuts = [10, 1, 17]
    out = target.forward([Segment(s, t[:cut]) for s, t, cut in zip(slots, texts, cuts, strict=True)])
    for slot, cut, logits, row in zip(slots, cuts, out.logits, right, strict=True):
        close(logits, row[:cut])
        target.cache.commit(slot, cut)
    junk = [[*t[cut : cut + 2], 0, 1, 2] for t, cut in zip(texts, cuts, strict=True)]
    out = target.forward([Segment(s, j) for s, j in zip(slots, junk, strict=True)])
    for slot, cut, logits, row in zip(slots, cuts, out.logits, right, strict=True):
        close(logits[:2], row[cut : cut + 2])
        target.cache.commit(slot, 2)  # three rejected
        assert target.cache.length(slot) == cut + 2
    target.cache.rollback(slots[0], 5)
    target.cache.rollback(slots[2], 0)
    starts = [5, 3, 0]
    order = [2, 0, 1]  # another order than before
    out = target.forward([Segment(slots[i], texts[i][starts[i] :], logits_from=1) for i in order])
    for i, logits in zip(order, out.logits, strict=True):
        close(logits, right[i][starts[i] + 1 :])
        target.cache.commit(slots[i], 0)
        target.cache.free(slots[i])
    assert target.cache.slots_in_use == 0
    assert target.cache.bytes_in_use == 0


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_any_walk_of_passes_leaves_exactly_the_committed_text(gpt2: HfTarget, data: st.DataObject) -> None:
    slot = gpt2.cache.allocate()
    try:
        walk(gpt2, slot, data)
    finally:  # the fixture is shared, and hypothesis may leave a walk half-way
        gpt2.cache.free(slot)
        assert gpt2.cache.bytes_in_use == 0


def walk(gpt2: HfTarget, slot: int, data: st.DataObject) -> None:
    text: list[int] = []
    for _ in range(data.draw(st.integers(1, 5))):
        new = data.draw(st.lists(st.integers(0, V - 1), min_size=1, max_size=5))
        logits = gpt2.forward([Segment(slot, new)]).logits[0]
        close(logits, whole(gpt2, text + new)[len(text) :])
        keep = data.draw(st.integers(0, len(new)))
        gpt2.cache.commit(slot, keep)
        text += new[:keep]
        if data.draw(st.booleans()):
            text = text[: data.draw(st.integers(0, len(text)))]
            gpt2.cache.rollback(slot, len(text))
        assert gpt2.cache.length(slot) == len(text)
        assert gpt2.cache.bytes_in_use == len(text) * gpt2.cache.bytes_per_token


@pytest.mark.parametrize("name", TREES)
def test_a_tree_gives_each_path_the_logits_of_its_chain(name: str) -> None:
    target = HfTarget(build(CONFIGS[name]()))
    assert target.tree_problem is None
    prefix, nodes = random_ids(7), random_ids(6, seed=2)
    parents = [-1, -1, 0, 0, 1, 3]
    slot = target.cache.allocate()
    target.forward([Segment(slot, prefix, logits_from=7)])
    target.cache.commit(slot, 7)
    other = target.cache.allocate()
    logits = target.forward([Segment(other, prefix), Segment(slot, nodes, parents=parents)]).logits[1]
    for node in range(6):
        path = [node]
        while parents[path[0]] >= 0:
            path.insert(0, parents[path[0]])
        close(logits[node], whole(target, prefix + [nodes[i] for i in path])[-1])
    target.cache.commit(slot, [0, 3, 5])
    text = prefix + [nodes[i] for i in (0, 3, 5)]
    assert target.cache.length(slot) == len(text)
    close(target.forward([Segment(slot, [4, 5])]).logits[0], whole(target, [*text, 4, 5])[-2:])


@pytest.mark.parametrize("name", sorted(set(CONFIGS) - set(TREES)))
def test_models_that_cannot_read_a_tree_say_why_and_change_nothing(name: str) -> None:
    target = HfTarget(build(CONFIGS[name]()))
    slot = target.cache.allocate()
    target.forward([Segment(slot, [1, 2])])
    target.cache.commit(slot, 2)
    with pytest.raises(UnsupportedModelError, match=r"parents: .* cannot read a tree of tokens: (its|it takes)"):
        target.forward([Segment(slot, [3, 4], parents=[-1, -1])])
    chain = target.forward([Segment(slot, [3, 4], parents=[-1, 0])]).logits[0]  # a chain spelled as a tree is fine
    close(chain, whole(target, [1, 2, 3, 4])[2:])


def test_taps_are_the_layers_own_outputs(target: HfTarget) -> None:
    ids = random_ids(9)
    layers = target.config.num_hidden_layers
    slot = target.cache.allocate()
    target.forward([Segment(slot, ids[:4], logits_from=4)])
    target.cache.commit(slot, 4)
    out = target.forward([Segment(slot, ids[4:], logits_from=5)], taps=[layers, 0, 1])
    target.cache.free(slot)
    assert out.logits[0].shape == (0, V)
    taps = out.taps[0]
    assert taps.shape == (5, 3, 32)
    assert taps.dtype == target.dtype
    with torch.no_grad():
        right = target.model(input_ids=torch.tensor([ids]), use_cache=False, output_hidden_states=True).hidden_states
        close(taps[:, 1], right[0][0, 4:])
        close(taps[:, 2], right[1][0, 4:])
        # transformers normalises the last one; ours is what the last layer itself puts out
        kept: list[Tensor] = []
        hook = target._layers[-1].register_forward_hook(lambda _, __, o: kept.append(o if torch.is_tensor(o) else o[0]))  # type: ignore[index]
        whole(target, ids)
        hook.remove()
    close(taps[:, 0], kept[0][0, 4:])
    hooks = [len(layer._forward_hooks) + len(layer._forward_pre_hooks) for layer in target._layers or ()]
    slot = target.cache.allocate()
    target.forward([Segment(slot, ids)], taps=[0, 1])
    target.cache.free(slot)
    assert [len(layer._forward_hooks) + len(layer._forward_pre_hooks) for layer in target._layers or ()] == hooks


def test_float32_and_bfloat16_give_float32_logits() -> None:
    for dtype in (torch.float32, torch.bfloat16):
        target = HfTarget(build(CONFIGS["gpt_neox"](), dtype))
        slot = target.cache.allocate()
        out = target.forward([Segment(slot, [1, 2, 3])], taps=[1])
        assert out.logits[0].dtype == torch.float32
        assert out.taps[0].dtype == dtype


def test_misuse_is_refused_before_anything_changes(gpt2: HfTarget) -> None:
    slot = gpt2.cache.allocate()
    gpt2.forward([Segment(slot, [1, 2, 3])])
    gpt2.cache.commit(slot, 3)
    good = gpt2.cache.allocate()
    for bad in (
        Segment(slot, []),
        Segment(slot, [V]),
        Segment(slot, [-1]),
        Segment(slot, [1], logits_from=2),
        Segment(slot, [1, 2], parents=[-1]),
        Segment(slot, [1, 2], parents=[-1, 1]),
        Segment(999, [1]),
        Segment(good, [2]),
    ):
        with pytest.raises(ValueError, match=r"\w"):
            gpt2.forward([Segment(good, [1]), bad])
    with pytest.raises(ValueError, match="taps"):
        gpt2.forward([Segment(slot, [1])], taps=[4])
    with pytest.raises(ValueError, match="at least one segment"):
        gpt2.forward([])
    with pytest.raises(ContextLengthError, match="65 tokens do not fit the context of 64"):
        gpt2.forward([Segment(good, [1]), Segment(slot, [1] * 62)])
    assert gpt2.cache.length(slot) == 3
    gpt2.forward([Segment(good, [1]), Segment(slot, [4])])  # nothing was left pending
    with pytest.raises(ValueError, match="uncommitted rows"):
        gpt2.forward([Segment(slot, [5])])
    for keep in (2, -1, [1], [0, 0]):
        with pytest.raises(ValueError, match="keep"):
            gpt2.cache.commit(slot, keep)
    for length in (4, -1):
        with pytest.raises(ValueError, match="length"):
            gpt2.cache.rollback(slot, length)
    gpt2.cache.rollback(slot, 3)  # drops the pending row
    close(gpt2.forward([Segment(slot, [5])]).logits[0], whole(gpt2, [1, 2, 3, 5])[3:])
    gpt2.cache.free(slot)
    gpt2.cache.free(good)
    with pytest.raises(ValueError, match="not allocated"):
        gpt2.cache.free(slot)


def test_a_pass_that_dies_half_way_leaves_every_slot_as_it_was(gpt2: HfTarget, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = gpt2.cache.allocate(), gpt2.cache.allocate()
    gpt2.forward([Segment(first, [1, 2]), Segment(second, [3])])
    gpt2.cache.commit(first, 2)
    gpt2.cache.commit(second, 1)
    layer = gpt2._layers[-1]  # type: ignore[index]
    calls = []

    def fail(*_: Any) -> None:
        calls.append(1)
        if len(calls) == 2:
            raise RuntimeError("cosmic ray")

    hook = layer.register_forward_pre_hook(fail)
    with pytest.raises(RuntimeError, match="cosmic ray"):
        gpt2.forward([Segment(first, [7, 8]), Segment(second, [9])])
    hook.remove()
    out = gpt2.forward([Segment(first, [5]), Segment(second, [6])])
    close(out.logits[0], whole(gpt2, [1, 2, 5])[2:])
    close(out.logits[1], whole(gpt2, [3, 6])[1:])
    gpt2.cache.free(first)
    gpt2.cache.free(second)


def test_the_budget_is_kept_and_nothing_changes_when_it_is_full() -> None:
    probe = HfTarget(build(CONFIGS["gpt2"]()))
    assert probe.cache.bytes_per_token == 2 * 3 * 32 * 8  # keys and values, layers, width, float64
    target = HfTarget(build(CONFIGS["gpt2"]()), cache_bytes=20 * probe.cache.bytes_per_token)
    a, b = target.cache.allocate(), target.cache.allocate()
    target.forward([Segment(a, [1] * 12)])
    target.cache.commit(a, 12)
    with pytest.raises(CacheFullError, match="no room for 9 more tokens"):
        target.forward([Segment(b, [1] * 8), Segment(a, [1])])
    target.forward([Segment(b, [1] * 8)])
    with pytest.raises(CacheFullError):
        target.cache.allocate()
    target.cache.commit(b, 0)
    target.cache.allocate()
    with pytest.raises(ConfigError, match="cache_bytes"):
        HfTarget(build(CONFIGS["gpt2"]()), cache_bytes=0)


def test_context_is_the_models_or_less() -> None:
    model = build(CONFIGS["gpt2"]())
    assert HfTarget(model).max_context == CONTEXT
    assert HfTarget(model, max_context=12).max_context == 12
    for tiny in (1, 2, 3):
        assert HfTarget(model, max_context=tiny).max_context == tiny
    for bad in (0, -1, CONTEXT + 1):
        with pytest.raises(ConfigError, match=r"max_context: must be between 1 and 64"):
            HfTarget(model, max_context=bad)
    assert HfTarget(build(CONFIGS["bloom"]())).max_context is None


def test_a_rope_that_changes_with_the_texts_length_bounds_the_context() -> None:
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
    config = tf.GPTNeoXConfig(
        **{**SMALL, "max_position_embeddings": 16}, intermediate_size=48, rope_parameters=rope, **IDS
    )
    assert HfTarget(build(config)).max_context == 16
    long = {"rope_type": "longrope", "short_factor": [1.0] * 8, "long_factor": [4.0] * 8, "rope_theta": 10000.0}
    config = tf.Phi3Config(**GATED, original_max_position_embeddings=16, rope_parameters=long, **IDS)
    model = build(config)
    assert HfTarget(model).max_context == 16
    with pytest.raises(ConfigError, match="rotary embedding depends on the size of a pass"):
        HfTarget(model, max_context=17)


def test_the_module_names_its_public_parts() -> None:
    assert set(hf_module.__all__) == {"HfTarget", "load_hf"}
