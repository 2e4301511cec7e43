"""A real pair with two tokenizers: SmolLM2-135M drafts for Qwen2.5-Coder-0.5B."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from foredraft import Engine, SamplingParams, SpeculationConfig, verify
from foredraft.drafters.vocabulary import VocabularyDrafter
from foredraft.models import catalog
from foredraft.models.base import Segment
from foredraft.models.info import LoadedModel
from foredraft.models.loading import load_model
from foredraft.types import Draft, Verdict

TARGET, DRAFTER = "qwen2.5-coder-0.5b", "smollm2-135m"
MISSING = [name for name in (TARGET, DRAFTER) if catalog.resolve(name) is None]
pytestmark = [
    pytest.mark.real_model,
    pytest.mark.skipif(
        bool(MISSING), reason=f"not here: {', '.join(MISSING)} (foredraft models fetch {' '.join(MISSING)})"
    ),
]
METHODS = ["intersection", "text"]
CODE = "def area(width, height):\n    return width * height\n\n\ndef perimeter(width, height):\n    return"
PROSE = "Der Fluß fließt — naïve 狐狸 — through the café, and"
TOKENS = 12
ONE_IN_A_THOUSAND = 3.3
"""Standard deviations."""


@pytest.fixture(scope="module")
def pair() -> Iterator[tuple[LoadedModel, LoadedModel]]:
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    options: dict[str, Any] = {"dtype": "float32", "device": "cpu", "cache_bytes": 1 << 28}
    yield load_model(TARGET, **options), load_model(DRAFTER, only_drafts=True, **options)
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def engines(pair: tuple[LoadedModel, LoadedModel]) -> dict[str, Engine]:
    target, small = pair
    assert small.tokenizer is not None
    made = {
        method: VocabularyDrafter(small.target, small.tokenizer, method)  # type: ignore[arg-type]
        for method in METHODS
    }
    return {method: Engine(target, drafter, k=3, prefix_reuse=False) for method, drafter in made.items()}


@pytest.fixture(scope="module")
def plain(pair: tuple[LoadedModel, LoadedModel]) -> Engine:
    return Engine(pair[0], prefix_reuse=False)


def test_the_pair_has_two_vocabularies(engines: dict[str, Engine]) -> None:
    drafter = engines["text"].drafter
    assert isinstance(drafter, VocabularyDrafter)
    assert 0.5 < drafter.vocabularies.coverage < 1
    shared = drafter.vocabularies.to_target
    here, there = engines["text"].tokenizer, drafter.tokenizer
    assert here is not None
    assert there is not None
    assert 20_000 < len(shared) < there.vocab_size
    for small, large in list(shared.items())[:: len(shared) // 300]:
        assert there.token_bytes(small) == here.token_bytes(large)
    assert not any(here.is_special(large) for large in shared.values())


@pytest.mark.parametrize("method", METHODS)
def test_greedy_text_is_plain_decodings(method: str, engines: dict[str, Engine], plain: Engine) -> None:
    """Code and prose of several scripts together in one batch; drafts are accepted."""
    params = SamplingParams(max_tokens=TOKENS)
    want = plain.generate([CODE, PROSE], params)
    got = engines[method].generate([CODE, PROSE], params)
    assert [result.token_ids for result in got] == [result.token_ids for result in want]
    assert got[0].stats.num_accepted_draft_tokens >= 3


@pytest.mark.parametrize("method", METHODS)
def test_a_seed_gives_plain_decodings_text(method: str, engines: dict[str, Engine], plain: Engine) -> None:
    params = SamplingParams(max_tokens=TOKENS, temperature=0.8, top_p=0.95, seed=11)
    want, got = plain.generate(CODE, params)[0], engines[method].generate(CODE, params)[0]
    assert got.token_ids == want.token_ids
    assert got.stats.num_draft_tokens > 0


@pytest.mark.parametrize("rule", ["rejection", "block"])
@pytest.mark.parametrize("method", METHODS)
def test_the_law_is_the_targets(
    method: str, rule: str, pair: tuple[LoadedModel, LoadedModel], engines: dict[str, Engine]
) -> None:
    """Written tokens surprise the target as much as its own would, whatever was written before."""
    accepted, found = sampled(rule, pair[0], engines[method])
    assert accepted > 10
    assert abs(found) < ONE_IN_A_THOUSAND


def test_a_rule_that_accepts_everything_would_be_seen(
    pair: tuple[LoadedModel, LoadedModel], engines: dict[str, Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    right = verify.rejection

    def wrong(draft: Draft, p: torch.Tensor, uniforms: Any, next_uniform: float) -> Verdict:
        return right(draft, p, [0.0] * draft.k, next_uniform)

    monkeypatch.setattr(verify, "rejection", wrong)
    assert sampled("rejection", pair[0], engines["text"])[1] > ONE_IN_A_THOUSAND


def sampled(rule: str, target: LoadedModel, engine: Engine) -> tuple[int, float]:
    """Accepted tokens of eight sampled texts, and by how many standard deviations their surprise is off."""
    params = [SamplingParams(max_tokens=TOKENS, temperature=1.0, ignore_eos=True, seed=seed) for seed in range(8)]
    speculation = SpeculationConfig(k=3, verify=rule)  # type: ignore[arg-type]
    results = engine.generate([CODE] * 8, params, speculation=speculation)
    assert engine.tokenizer is not None
    prompt = engine.tokenizer.encode(CODE)
    off = variance = 0.0
    for result in results:
        excess, spread = surprise(target, prompt, result.token_ids)
        off, variance = off + excess, variance + spread
    return sum(result.stats.num_accepted_draft_tokens for result in results), off / math.sqrt(variance)


def surprise(target: LoadedModel, prompt: list[int], written: list[int]) -> tuple[float, float]:
    """Sum of -log p of the written tokens over its expectation, the entropies of p; and its variance."""
    cache = target.target.cache
    slot = cache.allocate()
    try:
        logits = target.target.forward([Segment(slot, [*prompt, *written[:-1]], len(prompt) - 1)]).logits[0]
    finally:
        cache.commit(slot, 0)
        cache.free(slot)
    log = logits.double().log_softmax(-1)
    entropy = -(log.exp() * log).sum(-1)
    excess = -log[range(len(written)), written] - entropy
    return float(excess.sum()), float((log.exp() * log**2).sum() - (entropy**2).sum())
