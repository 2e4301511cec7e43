"""Why the numbers of a draft are keyed by the step's anchor too, shown exactly.

Two tokens are written. Step 1 drafts positions 0 and 1; if it emits one token only, step 2 drafts position 1 again.
"""

from __future__ import annotations

from collections import defaultdict

import pytest
import torch
from torch import Tensor

from foredraft.config import SamplingParams
from foredraft.sampling import Purpose, RequestNoise, RequestSampler, TokenLaw, draw
from foredraft.testing.fork import Fork, Uniform, outcomes
from foredraft.testing.law import Prefix, plain_law
from foredraft.testing.stats import goodness_of_fit
from foredraft.types import Draft
from foredraft.verify import block, rejection

V = 3


def p(prefix: Prefix) -> Tensor:
    return torch.tensor([0.6, 0.3, 0.1], dtype=torch.float64).roll(sum(prefix) % V)


def q(prefix: Prefix) -> Tensor:
    return torch.tensor([0.2, 0.3, 0.5], dtype=torch.float64).roll(sum(prefix) % V)


def two_token_law(rule: object, *, anchored: tuple[Purpose, ...]) -> Tensor:
    def run(fork: Fork) -> Prefix:
        numbers: defaultdict[object, Uniform] = defaultdict(lambda: Uniform(fork))

        def number(purpose: Purpose, position: int, anchor: int) -> Uniform:
            return numbers[purpose, position, anchor if purpose in anchored else None]

        text: Prefix = ()
        while len(text) < 2:
            anchor, k = len(text), 2 - len(text)
            drafted: Prefix = ()
            for i in range(k):
                drafted += (draw(q(text + drafted), number(Purpose.DRAFT, anchor + i, anchor)),)
            draft = Draft(drafted, torch.stack([q(text + drafted[:i]) for i in range(k)]))
            rows = torch.stack([p(text + drafted[:i]) for i in range(k + 1)])
            accept = [number(Purpose.ACCEPT, anchor + i, anchor) for i in range(k)]
            verdict = rule(draft, rows, accept, Uniform(fork))
            text += (*drafted[: verdict.accepted], verdict.next_token)
        return text[:2]

    law = torch.zeros(V, V, dtype=torch.float64)
    for text, weight in outcomes(run):
        law[text] += weight
    return law


def error(law: Tensor) -> float:
    assert float(law.sum()) == pytest.approx(1.0, abs=1e-12)
    return float((law - plain_law(p, 2)).abs().max())


@pytest.mark.parametrize("rule", [rejection, block])
def test_numbers_keyed_by_anchor_and_position_give_the_law(rule: object) -> None:
    assert error(two_token_law(rule, anchored=(Purpose.DRAFT, Purpose.ACCEPT))) < 1e-12


@pytest.mark.parametrize("anchored", [(), (Purpose.ACCEPT,), (Purpose.DRAFT,)])
def test_numbers_keyed_by_position_alone_break_block_verification(anchored: tuple[Purpose, ...]) -> None:
    assert error(two_token_law(block, anchored=anchored)) > 1e-3


def test_token_wise_rejection_would_survive_it() -> None:
    """It never looks at a draft past the first rejection, so that number is still fresh."""
    assert error(two_token_law(rejection, anchored=())) < 1e-12


@pytest.mark.parametrize("rule_name", ["rejection", "block"])
def test_the_real_stream_has_the_law_over_seeds(rule_name: str) -> None:
    """The whole path with RequestNoise, TokenLaw and RequestSampler, one text of three tokens a seed."""
    rule = {"rejection": rejection, "block": block}[rule_name]
    params = SamplingParams(temperature=1.0, top_k=2, frequency_penalty=0.5)
    counts = torch.zeros((V,) * 3)
    for seed in range(800):
        noise, law = RequestNoise(seed), TokenLaw(params, (0,), V)
        sampler = RequestSampler(law, noise, rule_name)
        text: Prefix = ()
        while len(text) < 3:
            anchor = sampler.anchor = 1 + len(text)
            tokens: Prefix = ()
            rows = []
            for _ in range(2):
                token, row = sampler.draw(q(text + tokens).log(), tokens)
                tokens += (token,)
                rows.append(row)
            draft = Draft(tokens, torch.stack(rows))
            logits = torch.stack([p(text + tokens[:i]).log() for i in range(3)])
            verdict = rule(
                draft,
                law.probs(logits, [draft.path(i) for i in range(3)]),
                [noise.uniform(Purpose.ACCEPT, anchor + i, anchor) for i in range(2)],
                noise.uniform(Purpose.NEXT, anchor, anchor),
            )
            emitted = (*tokens[: verdict.accepted], verdict.next_token)
            law.commit(emitted)
            text += emitted
        counts[text[:3]] += 1

    def filtered(prefix: Prefix) -> Tensor:
        law = TokenLaw(params, (0,), V)
        law.commit(prefix)
        return law.probs(p(prefix).log()[None], [()])[0]

    assert goodness_of_fit(counts.flatten(), plain_law(filtered, 3).flatten()).p_value > 1e-4
