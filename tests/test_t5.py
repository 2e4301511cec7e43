"""Encoder–decoder models: source, start token and output in one slot; drafted by a smaller one or from the source."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers as tf
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from foredraft import Engine, SamplingParams
from foredraft.drafters import ModelDrafter
from foredraft.errors import ConfigError, UnsupportedModelError
from foredraft.models.base import Segment, Target
from foredraft.models.encoder_decoder import EncoderDecoderTarget

V, START = 61, 0
IDS: dict[str, Any] = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0, "decoder_start_token_id": START}


def build(kind: str = "t5", seed: int = 0) -> Any:
    torch.manual_seed(seed)
    if kind == "t5":
        config = tf.T5Config(vocab_size=V, d_model=32, d_ff=48, num_layers=2, num_heads=2, d_kv=16, **IDS)
        model = tf.T5ForConditionalGeneration(config)
    else:
        config = tf.BartConfig(
            vocab_size=V, d_model=32, encoder_layers=2, decoder_layers=2, encoder_attention_heads=2,
            decoder_attention_heads=2, encoder_ffn_dim=48, decoder_ffn_dim=48, max_position_embeddings=128, **IDS,
        )  # fmt: skip
        model = tf.BartForConditionalGeneration(config)
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() > 1:
                weight.copy_(torch.randn(weight.shape) * 1.5 * weight.shape[-1] ** -0.5)
    return model.double().eval()


@pytest.fixture(scope="module", params=["t5", "bart"])
def target(request: pytest.FixtureRequest) -> EncoderDecoderTarget:
    return EncoderDecoderTarget(build(request.param))


def whole(target: EncoderDecoderTarget, ids: list[int]) -> Tensor:
    """Logits of every position from the start token on."""
    at = ids.index(START)
    with torch.no_grad():
        source, output = torch.tensor([ids[:at]]), torch.tensor([ids[at:]])
        logits: Tensor = target.model(input_ids=source, decoder_input_ids=output, use_cache=False).logits[0]
    return logits


TOKENS = st.lists(st.integers(1, V - 1), min_size=1, max_size=5)


@settings(max_examples=15, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_any_walk_of_passes_gives_a_fresh_runs_logits(target: EncoderDecoderTarget, data: st.DataObject) -> None:
    assert isinstance(target, Target)
    slot = target.cache.allocate()
    source = data.draw(TOKENS)
    text: list[int] = []
    try:
        for chunk in (source[:1], source[1:]):
            if chunk:
                target.forward([Segment(slot, chunk, len(chunk))])
                target.cache.commit(slot, len(chunk))
                text += chunk
        for step in range(data.draw(st.integers(1, 5))):
            new = data.draw(TOKENS)
            if START not in text:
                new = [START, *new]
            logits = target.forward([Segment(slot, new)]).logits[0]
            right = whole(target, text + new)[-len(new) :]
            torch.testing.assert_close(logits, right, rtol=0, atol=1e-6 * float(right.std()))
            keep = data.draw(st.integers(0, len(new)))
            target.cache.commit(slot, keep)
            text += new[:keep]
            if step % 2:
                text = text[: data.draw(st.integers(1, len(text)))]
                target.cache.rollback(slot, len(text))
            assert target.cache.length(slot) == len(text)
    finally:
        target.cache.free(slot)
    assert target.cache.bytes_in_use == 0


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_text_is_plains_whoever_drafts(target: EncoderDecoderTarget, temperature: float) -> None:
    prompts = [[5, 6, 7, 8, 9, START], [11, 12, START]]
    params = SamplingParams(max_tokens=20, ignore_eos=True, temperature=temperature, seed=9, bad_token_ids=((START,),))
    plain = [r.token_ids for r in Engine(target=target).generate(prompts, params)]
    kind = target.config.model_type
    drafters = ["lookup:2,1", ModelDrafter(EncoderDecoderTarget(build(kind, 1)))]
    for drafter in drafters:
        results = Engine(target=target, drafter=drafter, k=3).generate(prompts, params)
        assert [r.token_ids for r in results] == plain
        assert sum(step.drafted for r in results for step in r.stats.trace) > 10
    same = Engine(target=target, drafter=ModelDrafter(EncoderDecoderTarget(build(kind, 0))), k=3)
    rates = [r.metrics["speculative_decoding"]["draft_acceptance_rate"] for r in same.generate(prompts, params)]
    assert rates == [1.0, 1.0]


def test_the_encoder_runs_once(target: EncoderDecoderTarget) -> None:
    calls: list[int] = []
    hook = target.model.get_encoder().register_forward_pre_hook(lambda *_: calls.append(1))
    engine = Engine(target=target, drafter="lookup:2,1", k=3, max_step_tokens=4)
    engine.generate([[5, 6, 7, 8, 9, 10, 11, START]], SamplingParams(max_tokens=12, ignore_eos=True))
    hook.remove()
    assert len(calls) == 1


def test_misuse_is_refused(target: EncoderDecoderTarget) -> None:
    with pytest.raises(Exception, match="ends without the decoder's start token 0; append 0"):
        Engine(target=target).generate([[5, 6]], SamplingParams(max_tokens=2))
    slot = target.cache.allocate()
    with pytest.raises(ConfigError, match="the source is empty"):
        target.forward([Segment(slot, [START])])
    target.cache.commit(slot, 0)
    with pytest.raises(UnsupportedModelError, match="not tapped"):
        target.forward([Segment(slot, [5], 1)], taps=[1])
    target.cache.free(slot)
    config = tf.GPT2Config(vocab_size=V, n_embd=32, n_layer=1, n_head=2)
    with pytest.raises(UnsupportedModelError, match="it has no encoder"):
        EncoderDecoderTarget(tf.GPT2LMHeadModel(config))


def test_sources_have_no_scores(target: EncoderDecoderTarget) -> None:
    with pytest.raises(ConfigError, match="an encoder reads its source whole") as caught:
        Engine(target=target).generate([[5, 6, START]], SamplingParams(max_tokens=2, prompt_logprobs=0))
    assert caught.value.field == "prompt_logprobs"
