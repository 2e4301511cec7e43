"""The heart of the suite: every rule, under every control, emits exactly the target's law.

All drafts and all acceptance outcomes are summed in float64 (:mod:`foredraft.testing.law`), with the rules, the
filters and the processors that run in production. The law they are compared with comes from the naive reference.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from test_sampling_reference import reference_law
from torch import Tensor

from foredraft.config import SamplingParams
from foredraft.sampling import TokenLaw
from foredraft.testing.law import Prefix, Proposal, exact_law, plain_law

V = 4
PROMPT = (1, 2)
EOS = frozenset({3})
ATOL = 1e-12


def after_even(ids: list[int], logits: Tensor) -> Tensor:
    """A custom processor that depends on the whole prefix."""
    return logits + torch.arange(V) * (0.5 if sum(ids) % 2 else -0.5)


CONTROLS: dict[str, dict[str, Any]] = {
    "none": {},
    "temperature": {"temperature": 0.6},
    "top_k": {"top_k": 2},
    "top_p": {"top_p": 0.75},
    "min_p": {"min_p": 0.4},
    "typical_p": {"typical_p": 0.7},
    "repetition": {"repetition_penalty": 1.7},
    "presence": {"presence_penalty": 0.8},
    "frequency": {"frequency_penalty": 1.0},
    "bias": {"logit_bias": {0: 1.5, 2: -1.0}},
    "bad_words": {"bad_token_ids": ((1, 0), (2, 0, 2), (3, 3))},
    "allowed": {"allowed_token_ids": (0, 2, 3)},
    "min_tokens": {"min_tokens": 2},
    "custom": {"processors": (after_even,)},
    "all": {
        "temperature": 0.8,
        "top_k": 3,
        "top_p": 0.9,
        "min_p": 0.1,
        "repetition_penalty": 1.2,
        "frequency_penalty": 0.5,
        "logit_bias": {1: 0.7},
        "bad_token_ids": ((0, 0),),
        "min_tokens": 1,
        "processors": (after_even,),
    },
}
MODELS = ("target", "drafts", "low", "high")
SITUATIONS = ("generic", "same", "disjoint", "one_hot")


@cache
def logits(model: str, prefix: Prefix) -> Tensor:
    """``[V]`` of a random model; a disjoint pair has tokens {0, 1} and {2, 3}."""
    generator = torch.Generator().manual_seed(hash((MODELS.index(model), *prefix)) % 2**31)
    row = torch.randn(V, generator=generator, dtype=torch.float64) * 1.5
    if model == "low":
        row[2:] = float("-inf")
    if model == "high":
        row[:2] = float("-inf")
    return row


def token_law(params: SamplingParams, model: str) -> Callable[[Prefix], Tensor]:
    """The real thing: half of the prefix is committed, the other half is a drafted path."""

    def row(prefix: Prefix) -> Tensor:
        law = TokenLaw(params, PROMPT, V, eos_ids=EOS)
        half = len(prefix) // 2
        law.commit(prefix[:half])
        return law.probs(logits(model, prefix)[None], [prefix[half:]])[0]

    return cache(row)


def reference(params: SamplingParams, model: str) -> Callable[[Prefix], Tensor]:
    def row(prefix: Prefix) -> Tensor:
        values = logits(model, prefix).tolist()
        return torch.tensor(reference_law(params, PROMPT, prefix, values, EOS), dtype=torch.float64)

    return cache(row)


def pair(params: SamplingParams, situation: str) -> tuple[str, Callable[[Prefix], Tensor], Proposal]:
    """The target's model, its law, and what the drafter proposes."""
    target, drafter = {
        "generic": ("target", "drafts"),
        "same": ("target", "target"),
        "disjoint": ("low", "high"),
        "one_hot": ("target", "drafts"),
    }[situation]
    q = token_law(params, drafter)
    proposal = (lambda prefix: int(q(prefix).argmax())) if situation == "one_hot" else q
    return target, token_law(params, target), proposal


def test_the_situations_are_what_they_say() -> None:
    params = SamplingParams(temperature=1.0)
    overlap = {}
    for situation in SITUATIONS:
        _, p, q = pair(params, situation)
        row = q(())
        overlap[situation] = float(torch.minimum(p(()), row).sum()) if isinstance(row, Tensor) else -1.0
    assert 0.1 < overlap["generic"] < 0.9
    assert overlap == {"generic": overlap["generic"], "same": pytest.approx(1.0), "disjoint": 0.0, "one_hot": -1.0}


@pytest.mark.parametrize("situation", SITUATIONS)
@pytest.mark.parametrize("control", CONTROLS)
@pytest.mark.parametrize("rule", ["rejection", "block", "coupled"])
def test_emitted_law_is_the_targets(rule: Any, control: str, situation: str) -> None:
    params = SamplingParams(**{"temperature": 1.0, **CONTROLS[control]})
    target, p, q = pair(params, situation)
    wanted = plain_law(reference(params, target), 2)
    # The coupled rule is summed over every possible draft, which "generic" and "same" have in common.
    for k in range(4 if rule == "coupled" and situation == "same" else 5):
        # The step under test drafts k tokens; the steps that complete the text draft one.
        law = exact_law(rule, p, q, lambda prefix, k=k: 1 if prefix else k, 2)
        assert float((law - wanted).abs().max()) < ATOL, f"k={k}"


@pytest.mark.parametrize("rule", ["rejection", "block", "coupled"])
@pytest.mark.parametrize("k", [1, 2, 3])
def test_long_texts_over_many_steps(rule: Any, k: int) -> None:
    params = SamplingParams(temperature=0.9, top_k=3, repetition_penalty=1.3, min_tokens=3)
    target, p, q = pair(params, "generic")
    law = exact_law(rule, p, q, k, 4)
    assert float((law - plain_law(reference(params, target), 4)).abs().max()) < ATOL


@pytest.mark.parametrize("rule", ["rejection", "block", "coupled"])
def test_draft_lengths_that_change_with_the_text(rule: Any) -> None:
    params = SamplingParams(temperature=1.0, top_p=0.9)
    target, p, q = pair(params, "generic")
    law = exact_law(rule, p, q, lambda prefix: (3, 0, 2)[sum(prefix) % 3], 4)
    assert float((law - plain_law(reference(params, target), 4)).abs().max()) < ATOL


@pytest.mark.parametrize("control", CONTROLS)
@pytest.mark.parametrize("rule", ["exact", "rejection", "block", "coupled"])
def test_greedy_is_the_argmax_under_every_control(rule: Any, control: str) -> None:
    greedy = SamplingParams(**{**CONTROLS[control], "temperature": 0.0})
    for situation in SITUATIONS:
        target, p, q = pair(greedy, situation)
        # Sampled drafts too: what is drafted must not matter.
        sampled = token_law(SamplingParams(**{**CONTROLS[control], "temperature": 1.0}), "drafts")
        wanted = plain_law(reference(greedy, target), 3)
        for proposal in (q, sampled):
            for k in (0, 1, 3):
                law = exact_law(rule, p, proposal, lambda prefix, k=k: 1 if prefix else k, 3)
                assert float((law - wanted).abs().max()) < ATOL
