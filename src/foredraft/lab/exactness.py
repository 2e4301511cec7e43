"""Table C: where the two models differ most, speculative samples have the target's law all the same.

Drafts of two tokens are judged by the production rules, one call a sample; only the laws that they read are
computed once per prefix instead of once per sample. What is tallied is the first token that a round emits.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from foredraft import verify
from foredraft.lab.acceptance import random_contexts
from foredraft.lab.corpus import Corpus
from foredraft.lab.progress import Progress
from foredraft.lab.rounds import RULES, Tokens, last_laws
from foredraft.lab.schema import LawRow, TableC
from foredraft.lab.stats import Law, mean_interval, sampling_noise, total_variation
from foredraft.models.base import Target
from foredraft.sampling.draw import draw, race
from foredraft.sampling.noise import RequestNoise
from foredraft.types import Draft, Verdict

DRAFT_LENGTH = 2
SIMULATIONS = 2_000
CHUNK = 5_000


@dataclass
class PrefixLaws:
    """Both models' laws after a context and any few tokens, each prefix computed once.

    Attributes:
        p, q: ``[V]`` float64 by the tokens that follow the context.
    """

    target: Target
    drafter: Target
    context: Tokens

    def __post_init__(self) -> None:
        self.p: dict[tuple[int, ...], Tensor] = {}
        self.q: dict[tuple[int, ...], Tensor] = {}
        self._judged: dict[tuple[int, ...], tuple[Draft, Tensor]] = {}

    def need(self, prefixes: set[tuple[int, ...]], drafts_go_on: bool) -> None:
        """Computes what is missing: p, and q too where the draft goes on from these prefixes."""
        for model, laws in ((self.target, self.p), (self.drafter, self.q)):
            missing = sorted(prefixes - laws.keys()) if model is self.target or drafts_go_on else []
            if missing:
                rows = last_laws(model, [[*self.context, *prefix] for prefix in missing])
                laws.update(zip(missing, rows, strict=True))

    def judged(self, tokens: tuple[int, ...]) -> tuple[Draft, Tensor]:
        """A draft of these tokens with its q, and the ``[k+1, V]`` rows that judge it."""
        if tokens not in self._judged:
            q = torch.stack([self.q[tokens[:i]] for i in range(len(tokens))])
            p = torch.stack([self.p[tokens[:i]] for i in range(len(tokens) + 1)])
            self._judged[tokens] = (Draft(tokens, q), p)
        return self._judged[tokens]


def table_c(
    target: Target,
    drafter: Target,
    held_out: Sequence[Tokens],
    corpus: Corpus,
    *,
    positions: int,
    samples: int,
    context: int,
    seed: int,
    progress: Progress,
) -> TableC:
    """Measures TV between the models, then the law of every rule at the position where it is largest."""
    contexts = random_contexts(held_out, positions, context, torch.Generator().manual_seed(seed))
    p = last_laws(target, contexts).numpy()
    q = last_laws(drafter, contexts).numpy()
    distances = total_variation(p, q)
    worst = int(distances.argmax())
    mean, interval = mean_interval(distances.tolist())
    noise_mean, band = sampling_noise(p[worst], samples, SIMULATIONS, seed)
    progress.stage("table C: the law at the worst position", 5 * samples)
    laws = PrefixLaws(target, drafter, contexts[worst])
    rows = [_row("drafter's own law", 0, float(distances[worst]), band[1])]
    for number, name in enumerate(("rejection", "block", "coupled", "direct", "naive")):
        generator = torch.Generator().manual_seed(seed * 100 + number)
        counts = _tally(name, laws, samples, generator, seed, progress)
        rows.append(_row(name, samples, float(total_variation(counts / samples, p[worst])), band[1]))
    return TableC(
        positions=positions,
        tv_mean=mean,
        tv_mean_interval=interval,
        tv_max=float(distances[worst]),
        worst_context=corpus.decode(contexts[worst]),
        draft_length=DRAFT_LENGTH,
        noise_mean=noise_mean,
        noise_band=band,
        rows=tuple(rows),
    )


def _row(name: str, samples: int, tv: float, limit: float) -> LawRow:
    return LawRow(name=name, samples=samples, tv=tv, within_noise=tv <= limit)


def _tally(name: str, laws: PrefixLaws, samples: int, generator: torch.Generator, seed: int, progress: Progress) -> Law:
    """``[V]`` counts of the first token emitted in ``samples`` rounds."""
    laws.need({()}, drafts_go_on=True)
    counts = np.zeros(len(laws.p[()]))
    for start in range(0, samples, CHUNK):
        n = min(CHUNK, samples - start)
        uniforms = torch.rand(n, 2 * DRAFT_LENGTH + 1, dtype=torch.float64, generator=generator).tolist()
        if name == "coupled":
            # A request a sample, hence a seed a sample; they are far apart for different studies.
            tokens = _coupled(laws, [RequestNoise(seed * 1_000_000 + start + i) for i in range(n)])
        elif name == "direct":
            tokens = (draw(laws.p[()], row[0]) for row in uniforms)
        else:
            tokens = _speculative(name, laws, uniforms)
        for token in tokens:
            counts[token] += 1
        progress.advance(n, name)
    return counts


def _speculative(name: str, laws: PrefixLaws, uniforms: Sequence[Sequence[float]]) -> Iterator[int]:
    """First tokens of rounds whose drafts are sampled: columns are draft, acceptance and next uniforms."""
    drafts: list[tuple[int, ...]] = [() for _ in uniforms]
    for depth in range(DRAFT_LENGTH):
        laws.need(set(drafts), drafts_go_on=True)
        drafts = [(*t, draw(laws.q[t], row[depth])) for t, row in zip(drafts, uniforms, strict=True)]
    laws.need(set(drafts), drafts_go_on=False)
    for tokens, row in zip(drafts, uniforms, strict=True):
        draft, p = laws.judged(tokens)
        accept, last = row[DRAFT_LENGTH:-1], row[-1]
        if name == "naive":
            yield _naive(draft, p[0], accept[0], last)
        else:
            yield _first(draft, RULES[name](draft, p, accept, last))


def _coupled(laws: PrefixLaws, noises: Sequence[RequestNoise]) -> Iterator[int]:
    """First tokens of rounds in which drafter and target share each position's noise."""
    vocab = len(laws.p[()])
    position = len(laws.context)
    drafts: list[tuple[int, ...]] = [() for _ in noises]
    for depth in range(DRAFT_LENGTH):
        laws.need(set(drafts), drafts_go_on=True)
        drafts = [
            (*t, race(laws.q[t], noise.exponentials(position + depth, vocab)))
            for t, noise in zip(drafts, noises, strict=True)
        ]
    laws.need(set(drafts), drafts_go_on=False)
    for tokens, noise in zip(drafts, noises, strict=True):
        draft, p = laws.judged(tokens)
        rows = [noise.exponentials(position + i, vocab) for i in range(DRAFT_LENGTH + 1)]
        yield _first(draft, verify.coupled(Draft(tokens), p, rows))


def _first(draft: Draft, verdict: Verdict) -> int:
    return draft.tokens[0] if verdict.accepted else verdict.next_token


def _naive(draft: Draft, p: Tensor, u: float, last: float) -> int:
    """Wrong on purpose: after a rejection it draws from p itself, not from the residual. The table must show it."""
    assert draft.q is not None
    token = draft.tokens[0]
    return token if u < float(p[token] / draft.q[0, token]) else draw(p, last)
