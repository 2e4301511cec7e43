"""The exact law of what a verification rule emits: every draft and every acceptance outcome, summed in float64.

For people who write a rule or a drafter, and for our own tests. The rule that runs is the one that will run in
production, see :mod:`foredraft.testing.fork`. Keep V at four or five, k at most four.

Example: a rule of your own, against a target and a drafter that depend on the prefix::

    import torch
    from foredraft.testing.law import exact_law, plain_law
    from foredraft.verify import rejection


    def p(prefix):  # the law that the output must have
        return torch.tensor([0.5, 0.3, 0.2] if sum(prefix) % 2 else [0.1, 0.1, 0.8], dtype=torch.float64)


    def q(prefix):  # what the drafter draws from; or return an int: a token that it did not draw
        return torch.tensor([0.2, 0.5, 0.3], dtype=torch.float64)


    law = exact_law(rejection, p, q, k=2, length=3)
    assert torch.allclose(law, plain_law(p, length=3), rtol=0, atol=1e-12)
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

from foredraft.errors import ConfigError
from foredraft.testing.fork import Fork, Uniform, outcomes
from foredraft.types import NO_DRAFT, Draft, RuleName, Verdict
from foredraft.verify import block, coupled, coupled_tree, exact, exact_tree, rejection, rejection_tree, traversal

Prefix = tuple[int, ...]
Law = Callable[[Prefix], Tensor]
"""Prefix -> ``[V]`` float64 probabilities of the next token."""
Proposal = Callable[[Prefix], "Tensor | int"]
"""Prefix -> the ``[V]`` law that the drafter draws from, or the token that it proposes without drawing."""
Rule = Callable[[Draft, Tensor, Sequence[float], float], Verdict]
"""A rule for chains or trees: draft, ``p [k+1, V]``, k uniforms, one more uniform -> verdict."""
Drafts = Callable[[Prefix], Iterable[tuple[Draft, float]]]
"""Prefix -> every draft that a step may make there, with its probability."""


def exact_law(
    rule: Rule | RuleName,
    p: Law,
    q: Proposal,
    k: int | Callable[[Prefix], int],
    length: int = 1,
    *,
    claimed_q: Law | None = None,
) -> Tensor:
    """The joint law of the next ``length`` tokens, over as many steps as they take.

    Args:
        rule: A function with the signature of :func:`~foredraft.verify.rejection.rejection` that does nothing with
            its uniforms but compare and scale them; or the name of one of ours (for trees its counterpart:
            ``"block"`` is :func:`~foredraft.verify.traversal.traversal`). ``"exact"`` needs a one-hot p.
            ``"coupled"`` is summed over the winners of the target's races and over every draft with positive
            probability, so that it holds however draft and noise depend on one another.
        p: The target's law.
        q: The drafter.
        k: Draft length of every step, or a function of the prefix at which a step begins.
        length: Number of tokens, at least 1.
        claimed_q: The law that the drafter *says* it drew from, if that is another one (a fault to be shown).

    Returns:
        ``[V] * length`` float64; entry ``[x_1, …, x_length]`` is the probability of that text.
    """
    lengths = k if callable(k) else lambda prefix: k
    return law_of_drafts(rule, p, lambda prefix: chains(q, lengths(prefix), prefix, claimed_q), length)


def law_of_drafts(rule: Rule | RuleName, p: Law, drafts: Drafts, length: int = 1) -> Tensor:
    """:func:`exact_law` for drafts of any shape: ``drafts(prefix)`` lists them with their probabilities."""
    p = cache(p)
    V = p(()).shape[0]

    @cache
    def rest(prefix: Prefix) -> Tensor:
        n = length - len(prefix)
        law = torch.zeros((V,) * n, dtype=torch.float64)
        for emitted, _, weight in _step(rule, p, drafts(prefix), prefix):
            if len(emitted) >= n:
                law[emitted[:n]] += weight
            else:
                law[emitted] += weight * rest(prefix + emitted)
        return law

    return rest(())


def plain_law(p: Law, length: int = 1) -> Tensor:
    """``[V] * length``: the law of ``length`` tokens drawn one by one from p."""
    law = torch.ones((), dtype=torch.float64)
    for n in range(length):
        V = p(()).shape[0]
        prefixes = torch.cartesian_prod(*[torch.arange(V)] * n).reshape(-1, n).tolist() if n else [[]]
        rows = torch.stack([p(tuple(prefix)) for prefix in prefixes]).reshape((V,) * (n + 1))
        law = law.unsqueeze(-1) * rows
    return law


def accepted_law(
    rule: Rule | RuleName, p: Law, q: Proposal, k: int, prefix: Prefix = (), *, claimed_q: Law | None = None
) -> Tensor:
    """``[k+1]`` float64: probability that one step from ``prefix`` accepts 0, 1, …, k drafted tokens.

    Not for ``"coupled"``: how often draft and target agree depends on the noise that they share.
    """
    if rule == "coupled":
        raise ConfigError("acceptance of the coupled rule cannot be enumerated", field="rule", remedy="simulate it")
    law = torch.zeros(k + 1, dtype=torch.float64)
    for _, accepted, weight in _step(rule, p, chains(q, k, prefix, claimed_q), prefix):
        law[accepted] += weight
    return law


def expected_tokens(rule: Rule | RuleName, p: Law, q: Proposal, k: int, prefix: Prefix = ()) -> float:
    """Tokens that one step commits on average: 1 + Σ i P(i accepted)."""
    return 1.0 + float(accepted_law(rule, p, q, k, prefix) @ torch.arange(k + 1, dtype=torch.float64))


def chains(q: Proposal, k: int, prefix: Prefix = (), claimed_q: Law | None = None) -> Iterator[tuple[Draft, float]]:
    """Every chain of k tokens that the drafter may propose after ``prefix``, with its probability."""
    if k == 0:
        yield NO_DRAFT, 1.0
        return
    claimed = claimed_q or q
    for tokens, weight in _texts(q, k, prefix):
        rows = [claimed(prefix + tokens[:i]) for i in range(k)]
        laws = [row for row in rows if isinstance(row, Tensor)]
        if laws and len(laws) < k:
            raise ConfigError("some positions are drawn from a law and others are not", field="q")
        yield Draft(tokens, torch.stack(laws) if laws else None), weight


def _texts(q: Proposal, k: int, prefix: Prefix) -> Iterator[tuple[Prefix, float]]:
    if k == 0:
        yield (), 1.0
        return
    row = q(prefix)
    options = [(x, w) for x, w in enumerate(row.tolist()) if w > 0] if isinstance(row, Tensor) else [(row, 1.0)]
    for token, weight in options:
        for text, rest in _texts(q, k - 1, (*prefix, token)):
            yield (token, *text), weight * rest


def _step(
    rule: Rule | RuleName, p: Law, drafts: Iterable[tuple[Draft, float]], prefix: Prefix
) -> Iterator[tuple[Prefix, int, float]]:
    """Tokens committed by one step, how many of them drafted, and the probability; entries may repeat."""
    for draft, weight in drafts:
        rows = torch.stack([p(prefix + draft.path(i)) for i in range(draft.k + 1)])
        for verdict, share in outcomes(lambda fork, d=draft, r=rows: _run(rule, d, r, fork)):  # type: ignore[misc]
            nodes = range(verdict.accepted) if draft.parents is None else verdict.path
            emitted = (*(draft.tokens[i] for i in nodes), verdict.next_token)
            yield emitted, verdict.accepted, weight * share


def _run(rule: Rule | RuleName, draft: Draft, p: Tensor, fork: Fork) -> Verdict:
    tree = draft.parents is not None
    if rule == "exact":
        if not bool((p.amax(-1) == 1.0).all()):
            raise ConfigError("the exact rule is for greedy decoding, whose law is one-hot", field="p")
        return (exact_tree if tree else exact)(draft, p.argmax(-1).tolist())
    if rule == "coupled":
        noise = _Races(p, fork, draft)
        return coupled_tree(draft, p, noise) if tree else coupled(draft, p, noise)
    named = {"rejection": rejection_tree, "block": traversal} if tree else {"rejection": rejection, "block": block}
    run: Any = named.get(rule, rule) if isinstance(rule, str) else rule
    verdict: Verdict = run(draft, p, [Uniform(fork) for _ in draft.tokens], Uniform(fork))
    return verdict


class _Races(Sequence[Tensor]):
    """Noise of the coupled rule, a branch a winner.

    ``race(p, E)`` is token x with probability p(x). The noise of depth i, when first read, becomes noise with which
    token x wins, on the branch x of weight p_i(x), where p_i is the row of the chain after i tokens, and in a tree
    that of the path of the earlier winners. It wins by a hair, so that a race with any other row has another winner:
    a rule that takes its tokens from anything but the winner of the right row is found out.
    """

    def __init__(self, p: Tensor, fork: Fork, draft: Draft) -> None:
        self._p, self._fork, self._draft = p, fork, draft
        self._rows: dict[int, Tensor] = {}
        self._winners: list[int] = []

    def __len__(self) -> int:
        return self._draft.depth + 1

    def __getitem__(self, depth: Any) -> Any:
        if depth not in self._rows:
            p = self._p[depth if self._draft.parents is None else self._row(depth)]
            weights = p.tolist()
            winners = [x for x, weight in enumerate(weights) if weight > 0.0]
            winner = winners[self._fork.decide([weights[x] for x in winners])]
            noise = torch.where(p > 0.0, p, 1.0)
            noise[winner] *= 1.0 - 1e-9
            self._rows[depth] = noise
            self._winners.append(winner)
        return self._rows[depth]

    def _row(self, depth: int) -> int:
        won = tuple(self._winners[:depth])
        found = (row for row in range(self._draft.k + 1) if len(won) == depth and self._draft.path(row) == won)
        if (row := next(found, None)) is None:
            raise ConfigError(
                f"noise of depth {depth} was read off the path of the target's draws", field="exponentials"
            )
        return row
