"""What a drafter draws its tokens with: the request's own law, rule and random numbers."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from foredraft.errors import DrafterError, NumericalError
from foredraft.sampling.draw import draw, race
from foredraft.sampling.law import TokenLaw
from foredraft.sampling.noise import Purpose, RequestNoise
from foredraft.types import RuleName


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

    def draw(self, logits: Tensor, path: Sequence[int]) -> tuple[int, Tensor | None]:
        """Draws the token that follows ``path`` from the drafter's logits ``[V]``.

        Returns:
            The token, and the ``[V]`` law that it was drawn from; None under the rules that do not ask for one.

        Raises:
            DrafterError: The logits are not ``[V]``, hold NaN or +inf, or leave no token.
        """
        if logits.shape != (self._law.vocab_size,):
            raise DrafterError(
                f"the drafter's logits have shape {tuple(logits.shape)}, not ({self._law.vocab_size},)", field="logits"
            )
        try:
            if self._rule == "exact":
                return self._law.argmax(logits[None], [path])[0], None
            q = self._law.probs(logits[None], [path])[0]
        except NumericalError as error:
            raise DrafterError(f"the drafter's logits are no law: {error}") from error
        position = self.anchor + len(path)
        if self._rule == "coupled":
            return race(q, self._noise.exponentials(position, q.shape[0])), None
        return draw(q, self._noise.uniform(Purpose.DRAFT, position, self.anchor)), q
