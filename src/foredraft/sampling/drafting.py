"""What a drafter draws its tokens with: the request's own law, rule and random numbers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from foredraft.errors import DrafterError, NumericalError
from foredraft.kernels.law import Draws
from foredraft.sampling.draw import draw, race
from foredraft.sampling.law import TokenLaw
from foredraft.sampling.noise import Purpose, RequestNoise
from foredraft.types import RuleName


@dataclass(frozen=True, slots=True)
class Children:
    """Tokens drafted behind one node of a tree, the eldest first.

    Attributes:
        tokens: At most as many as were asked for; fewer where the law has no more.
        weights: What the drafter gives them, in ``(0, 1]``; they need not sum to one.
        q: ``[n, V]`` the law that each was drawn from, elder siblings excluded; None for tokens that may be dropped
            freely, since the rule does not ask what they were drawn from.
    """

    tokens: list[int]
    weights: list[float]
    q: Tensor | None


class RequestSampler:
    """Draws drafted tokens; a :class:`~foredraft.drafters.base.DraftSampler`.

    Attributes:
        anchor: Absolute position of the first token of the step; the engine sets it before each draft.
    """

    def __init__(self, law: TokenLaw, noise: RequestNoise, rule: RuleName) -> None:
        self.anchor = 0
        self._law = law
        self._noise = noise
        self._rule = rule

    @property
    def sampled(self) -> bool:
        """Whether what is drawn must be proposed: True under the rules that compare p with q."""
        return self._rule in ("rejection", "block")

    def ahead(self, count: int) -> Draws | None:
        """How :meth:`draw` would choose the next ``count >= 1`` tokens, for a drafter that can do so by itself.

        None if it must be asked for each token.
        """
        if self._likeliest:
            return Draws(count)
        controls = self._law.alone
        if controls is None or self._rule == "exact":
            return None
        if self._rule == "coupled":
            return Draws(count, controls, None, self._noise.seed, self.anchor)
        return Draws(count, controls, self._noise.uniforms(Purpose.DRAFT, self.anchor, self.anchor, count))

    @property
    def bare(self) -> bool:
        """Whether nothing but temperature and filters decides what is drawn: no penalty, grammar or processor."""
        return self._law.plain

    @property
    def _likeliest(self) -> bool:
        """Whether every draw is the likeliest token by the logits as they are, the lowest id on ties."""
        return self._rule == "exact" and self._law.plain

    def children(
        self,
        logits: Tensor,
        paths: Sequence[Sequence[int]],
        counts: Sequence[int],
        ids: Tensor | None = None,
    ) -> list[Children]:
        """Drafts ``counts[i] >= 1`` different tokens behind ``paths[i]``, from the drafter's logits ``[n, V]``.

        With ``ids`` ``[D]``, ascending, the logits are ``[n, D]``, of those tokens; no other can be drafted.

        Greedy requests get the likeliest; coupled ones the first in the race of the position's own noise, which the
        target will run, too; the others independent draws without replacement. What is drawn behind a path depends on
        path, logits and count alone, so asking twice gives the same tokens.

        Raises:
            DrafterError: The logits are not ``[n, V]``, hold NaN or +inf, or leave no token.
        """
        self._check(logits, (len(paths),), ids)
        if ids is not None and self._likeliest:
            return self._best(logits, counts, ids.numpy())
        logits = logits if ids is None else self._wide(logits, ids)
        try:
            law = self._law.confidence if self._rule == "exact" else self._law.probs
            rows = law(logits, paths)
        except NumericalError as error:
            raise DrafterError(f"the drafter's logits are no law: {error}") from error
        if self.sampled:
            return [self._drawn(*each) for each in zip(rows, paths, counts, strict=True)]
        if self._rule == "coupled":
            noise = [self._noise.exponentials(self.anchor + len(path), rows.shape[-1]) for path in paths]
            rows = rows.double() / torch.stack(noise)
            rows /= rows.sum(-1, keepdim=True)
        best = rows.topk(min(max(counts), rows.shape[-1]))
        return [
            possible(tokens[:n], weights[:n])
            for tokens, weights, n in zip(best.indices.tolist(), best.values.tolist(), counts, strict=True)
        ]

    def _drawn(self, q: Tensor, path: Sequence[int], count: int) -> Children:
        tokens: list[int] = []
        weights: list[float] = []
        laws: list[Tensor] = []
        for u in self._noise.siblings(path, self.anchor, count):
            if tokens:
                q = q.clone()
                q[tokens[-1]] = 0.0
                mass = q.sum()
                if not float(mass) > 0.0:
                    break
                q /= mass
            token = draw(q, u)
            tokens.append(token)
            weights.append(float(q[token]))
            laws.append(q)
        return Children(tokens, weights, torch.stack(laws))

    def draw(self, logits: Tensor, path: Sequence[int], ids: Tensor | None = None) -> tuple[int, Tensor | None]:
        """Draws the token that follows ``path`` from the drafter's logits ``[V]``.

        With ``ids`` ``[D]``, ascending, the logits are ``[D]``, of those tokens; no other can be drafted.

        Returns:
            The token, and the ``[V]`` law that it was drawn from; None under the rules that do not ask for one.

        Raises:
            DrafterError: The logits are not ``[V]``, hold NaN or +inf, or leave no token.
        """
        self._check(logits, (), ids)
        logits = logits if ids is None else self._wide(logits, ids)
        try:
            if self._rule == "exact":
                return self._law.argmax(logits[None], [path])[0], None
            q = self._law.probs(logits[None], [path])[0]
        except NumericalError as error:
            raise DrafterError(f"the drafter's logits are no law: {error}") from error
        position = self.anchor + len(path)
        if self._rule == "coupled":
            return race(q, self._noise.row(position, q.shape[0])), None
        return draw(q, self._noise.uniform(Purpose.DRAFT, position, self.anchor)), q

    def _best(self, logits: Tensor, counts: Sequence[int], ids: NDArray[Any]) -> list[Children]:
        """:meth:`children` where the likeliest of ``ids`` are wanted: no number is looked at for the other tokens."""
        rows = torch.softmax(logits.detach().to("cpu", torch.float32), -1)
        best = rows.topk(min(max(counts), rows.shape[-1]))
        if not bool(torch.isfinite(best.values).all()):
            raise DrafterError("the drafter's logits are no law: a row holds NaN or +inf, or no token", field="logits")
        return [
            possible(ids[tokens[:n]].tolist(), weights[:n])
            for tokens, weights, n in zip(best.indices.numpy(), best.values.tolist(), counts, strict=True)
        ]

    def _wide(self, logits: Tensor, ids: Tensor) -> Tensor:
        """Logits of the whole vocabulary, -inf for all tokens but ``ids``."""
        wide = np.full((*logits.shape[:-1], self._law.vocab_size), -np.inf, np.float32)
        wide[..., ids.numpy()] = logits.numpy()  # torch would wake other threads for it
        return torch.from_numpy(wide)

    def _check(self, logits: Tensor, rows: tuple[int, ...], ids: Tensor | None) -> None:
        wanted = (*rows, self._law.vocab_size if ids is None else ids.shape[0])
        if logits.shape != wanted:
            raise DrafterError(f"the drafter's logits have shape {tuple(logits.shape)}, not {wanted}", field="logits")


def possible(tokens: list[int], weights: list[float]) -> Children:
    """Leaves out tokens without probability, which come last."""
    n = sum(weight > 0.0 for weight in weights)
    return Children(tokens[:n], weights[:n], None)
