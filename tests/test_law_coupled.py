"""Coupled sampling: one seed, one text, whatever drafts it; and how often drafter and target agree."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from foredraft.config import SamplingParams
from foredraft.sampling import RequestNoise, RequestSampler, TokenLaw, race
from foredraft.testing.law import Prefix, plain_law
from foredraft.testing.stats import goodness_of_fit, total_variation
from foredraft.types import Draft
from foredraft.verify import coupled

V = 5
PARAMS = SamplingParams(temperature=0.9, top_p=0.95, repetition_penalty=1.2, presence_penalty=0.3)
Model = Callable[[Prefix], Tensor]


def model(seed: int) -> Model:
    def row(prefix: Prefix) -> Tensor:
        generator = torch.Generator().manual_seed(hash((seed, *prefix[-3:])) % 2**31)
        return torch.randn(V, generator=generator, dtype=torch.float64) * 1.5

    return row


def write(seed: int, drafter: Model | None, ks: tuple[int, ...], length: int, target: Model) -> tuple[Prefix, int]:
    """The engine's step in small; returns the text and the number of accepted drafts."""
    noise, law = RequestNoise(seed), TokenLaw(PARAMS, (0,), V)
    sampler = RequestSampler(law, noise, "coupled")
    text: Prefix = ()
    accepted = step = 0
    while len(text) < length:
        k = ks[step % len(ks)] if drafter else 0
        step += 1
        anchor = sampler.anchor = 1 + len(text)
        tokens: Prefix = ()
        for _ in range(k):
            token, q = sampler.draw(drafter(text + tokens), tokens)
            assert q is None
            tokens += (token,)
        draft = Draft(tokens)
        logits = torch.stack([target(text + tokens[:i]) for i in range(k + 1)])
        p = law.probs(logits, [draft.path(i) for i in range(k + 1)])
        verdict = coupled(draft, p, [noise.exponentials(anchor + i, V) for i in range(k + 1)])
        emitted = (*tokens[: verdict.accepted], verdict.next_token)
        accepted += verdict.accepted
        law.commit(emitted)
        text += emitted
    return text[:length], accepted


@pytest.mark.parametrize("seed", range(5))
def test_one_seed_gives_one_text(seed: int) -> None:
    target = model(100)
    plain, _ = write(seed, None, (0,), 30, target)
    rates = []
    for drafter in (target, model(1), model(2), lambda prefix: torch.arange(V, dtype=torch.float64)):
        for ks in ((1,), (2,), (3,), (5,), (8,), (3, 0, 0, 1), (0, 4)):
            text, accepted = write(seed, drafter, ks, 30, target)
            assert text == plain
            rates.append(accepted)
    assert write(seed + 1000, None, (0,), 30, target)[0] != plain
    assert max(rates) >= 26  # the perfect drafter was accepted throughout
    assert min(rates) < 20


def test_the_text_has_the_targets_law_over_seeds() -> None:
    target = model(7)

    def law(prefix: Prefix) -> Tensor:
        made = TokenLaw(PARAMS, (0,), V)
        made.commit(prefix)
        return made.probs(target(prefix)[None], [()])[0]

    counts = torch.zeros(V, V)
    for seed in range(1200):
        counts[write(seed, model(8), (2,), 2, target)[0]] += 1
    assert goodness_of_fit(counts.flatten(), plain_law(law, 2).flatten()).p_value > 1e-4


@pytest.mark.parametrize("pair", range(4))
def test_agreement_is_at_least_the_bound(pair: int) -> None:
    """Pr[match] = Σ_i 1 / Σ_x max(p_x / p_i, q_x / q_i) >= (1 - TV) / (1 + TV)."""
    generator = torch.Generator().manual_seed(pair)
    p, q = (torch.randn(2, 6, generator=generator, dtype=torch.float64) * (0.5 + pair)).softmax(-1)
    exact = sum(float(1 / torch.maximum(p / p[i], q / q[i]).sum()) for i in range(6))
    tv = total_variation(p, q)
    assert exact >= (1 - tv) / (1 + tv) - 1e-12
    noise, n = RequestNoise(pair), 4000
    matches = sum(race(p, noise.exponentials(t, 6)) == race(q, noise.exponentials(t, 6)) for t in range(n))
    assert abs(matches / n - exact) < 4.5 * (exact * (1 - exact) / n) ** 0.5
    # Independent draws agree far less often.
    independent = float((p * q).sum())
    assert exact > independent
