"""The adapter inside the engine: a transformers model decodes with speculation what it decodes alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers as tf

from foredraft import Engine, SamplingParams
from foredraft.drafters.model import ModelDrafter
from foredraft.models.hf import HfTarget
from foredraft.testing import ScriptedDrafter

V = 61
PROMPTS = [[5, 9, 5, 9, 5], [7], [3, 1, 4, 1, 5, 9, 2, 6]]
TOKENS = 20
IDS: dict[str, Any] = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}


def build(seed: int = 0, layers: int = 2) -> Any:
    torch.manual_seed(seed)
    config = tf.OPTConfig(
        vocab_size=V, hidden_size=32, num_hidden_layers=layers, num_attention_heads=2, ffn_dim=48,
        word_embed_proj_dim=32, max_position_embeddings=64, init_std=0.3, **IDS,
    )  # fmt: skip
    return tf.OPTForCausalLM(config).to(torch.float64).eval()


@pytest.fixture(scope="module")
def model() -> Any:
    return build()


@pytest.fixture(scope="module")
def greedy(model: Any) -> list[list[int]]:
    """What transformers' own greedy decoding writes."""
    texts = []
    for prompt in PROMPTS:
        options = {"max_new_tokens": TOKENS, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
        out = model.generate(torch.tensor([prompt]), attention_mask=torch.ones(1, len(prompt)), **options)
        texts.append(out[0, len(prompt) :].tolist())
    return texts


def right_but_for_every_third(greedy: list[list[int]]) -> ScriptedDrafter:
    answers = {tuple(prompt): [*prompt, *text] for prompt, text in zip(PROMPTS, greedy, strict=True)}

    def propose(prefix: tuple[int, ...], k: int) -> list[int]:
        text = next(text for prompt, text in answers.items() if prefix[: len(prompt)] == prompt)
        new = text[len(prefix) : len(prefix) + k]
        return [(token + 1) % V if (len(prefix) + i) % 3 == 0 else token for i, token in enumerate(new)]

    return ScriptedDrafter(propose)


@pytest.mark.parametrize("k", [1, 4])
def test_greedy_text_is_transformers_own_with_any_drafter(model: Any, greedy: list[list[int]], k: int) -> None:
    params = SamplingParams(max_tokens=TOKENS, ignore_eos=True)
    drafters = [None, "lookup", ModelDrafter(HfTarget(build(1, layers=1))), right_but_for_every_third(greedy)]
    for drafter in drafters:
        target = HfTarget(model)
        engine = Engine(target=target, drafter=drafter, k=k, prefix_reuse=False)
        results = engine.generate(PROMPTS, params)
        assert [result.token_ids for result in results] == greedy
        assert target.cache.slots_in_use == 0
        assert target.cache.bytes_in_use == 0
    spec = [result.metrics["speculative_decoding"] for result in results]
    assert all(0.2 < entry["draft_acceptance_rate"] < 0.9 for entry in spec)  # both roads were taken


def test_a_seed_gives_one_text_with_and_without_speculation(model: Any, greedy: list[list[int]]) -> None:
    params = SamplingParams(max_tokens=TOKENS, temperature=1.0, seed=7, ignore_eos=True)
    plain = Engine(target=HfTarget(model)).generate(PROMPTS, params)
    drafted = Engine(target=HfTarget(model), drafter=ModelDrafter(HfTarget(build(1, layers=1))), k=3)
    assert [r.token_ids for r in drafted.generate(PROMPTS, params)] == [r.token_ids for r in plain]
    assert [r.token_ids for r in plain] != greedy
