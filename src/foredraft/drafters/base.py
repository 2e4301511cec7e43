"""The contract of a drafter, and what it may see of a request.

A drafter is a plug-in: subclass :class:`Drafter`, implement :meth:`Drafter.propose`, register it
(see docs/writing-a-drafter.md). It cannot change what is written, only how fast.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Protocol, Self

from torch import Tensor

from foredraft.drafters.outlook import Outlook, StepPrice
from foredraft.errors import ConfigError, UnsupportedModelError
from foredraft.kernels.law import Draws
from foredraft.models.base import Target
from foredraft.sampling.drafting import Children
from foredraft.types import NO_DRAFT, Draft, Verdict

if TYPE_CHECKING:
    from foredraft.models.loading import DtypeName
    from foredraft.models.tokenizer import Tokenizer


class DraftSampler(Protocol):
    """Draws drafted tokens by the request's own law, filters and random stream."""

    def draw(self, logits: Tensor, path: Sequence[int], ids: Tensor | None = None) -> tuple[int, Tensor | None]:
        """Draws the token that follows ``path``.

        Args:
            logits: ``[V]`` raw logits of the drafter, or ``[D]`` of the tokens ``ids``.
            path: Tokens already drafted in this step, in order.
            ids: ``[D]`` int64, ascending: the only tokens that the drafter can propose; None for all.

        Returns:
            The token, and the ``[V]`` post-filter law that it was drawn from: put these rows, stacked, into
            ``Draft.q``. None for every token of a request that is greedy or coupled (``Draft.q = None``).
        """

    @property
    def sampled(self) -> bool:
        """Whether drawn tokens must be proposed, with their q: neither greedy nor coupled."""

    @property
    def bare(self) -> bool:
        """Whether nothing but temperature and filters decides what is drawn: no penalty, grammar or processor."""

    def ahead(self, count: int) -> Draws | None:
        """How :meth:`draw` would choose the next ``count >= 1`` tokens, for a drafter that can do so by itself.

        None if it must be asked for each token.
        """

    def children(
        self, logits: Tensor, paths: Sequence[Sequence[int]], counts: Sequence[int], ids: Tensor | None = None
    ) -> list[Children]:
        """Drafts ``counts[i]`` different tokens behind ``paths[i]``, for a tree (see docs/trees.md).

        Args:
            logits: ``[n, V]`` raw logits of the drafter behind each path, or ``[n, D]`` of the tokens ``ids``.
            paths: Tokens already drafted in this step, in order.
            counts: At least one each. Fixed before it is known what is drawn: no sampled child may be dropped.
            ids: As in :meth:`draw`.
        """


class DraftRequest(Protocol):
    """What a drafter sees of a request. Read only."""

    @property
    def id(self) -> str: ...

    @property
    def ids(self) -> Sequence[int]:
        """Committed token ids, prompt and output."""

    @property
    def prompt_length(self) -> int: ...

    @property
    def tenant(self) -> str:
        """Whose request this is; state shared between requests must never cross tenants."""

    @property
    def sampler(self) -> DraftSampler: ...


@dataclass(frozen=True, slots=True)
class DrafterContext:
    """What a drafter may know of the engine that makes it.

    Attributes:
        target: The model that will verify.
        tokenizer: Its tokenizer; None for models of token ids only.
        dtype: The engine's ``dtype`` option, for models that the drafter loads.
        device: The engine's ``device`` option.
        max_context: The engine's ``max_context`` option.
        max_batch: Most requests decoded together.
    """

    target: Target
    tokenizer: Tokenizer | None
    dtype: DtypeName = "auto"
    device: str = "auto"
    max_context: int | None = None
    max_batch: int = 8


class Drafter:
    """Base of all drafters. Only :meth:`propose` must be implemented.

    Attributes:
        name: Registry name.
        taps: Target layers whose hidden states :meth:`observe` wants.
    """

    name: ClassVar[str] = "drafter"
    taps: tuple[int, ...] = ()

    @classmethod
    def from_spec(cls, argument: str | None, context: DrafterContext) -> Self:
        """Makes the drafter that ``--drafter NAME:argument`` asks for.

        Raises:
            ConfigError: The argument cannot be honoured.
        """
        if argument is not None:
            raise ConfigError(f"takes no argument (got {argument!r})", field=f"drafter {cls.name}")
        return cls()

    def attach(self, context: DrafterContext) -> None:
        """Called once when an engine takes the drafter; raise here if it cannot serve this target.

        Raises:
            VocabularyMismatchError: The drafter's token ids do not mean what the target's mean.
        """

    def start(self, request: DraftRequest) -> None:
        """Called once, before the first step of the request."""

    def outlook(self, request: DraftRequest, limit: int, price: StepPrice) -> Outlook | None:
        """Says, before every step, what to expect of a draft of up to ``limit`` tokens.

        Optional. The engine then drafts as many as pay by it, instead of by the request's acceptance so far. Nothing
        may be drawn with ``request.sampler`` here, nor known of what it will draw.

        Args:
            limit: Most tokens that can be asked for, >= 1.
            price: What the step costs, for drafters that choose between ways to draft.

        Returns:
            None to let the engine judge by past acceptance.
        """
        return None

    def propose(self, request: DraftRequest, k: int) -> Draft:
        """Proposes at most ``k >= 1`` tokens to follow ``request.ids``; fewer or none is ordinary.

        A drafter may stop after any token that it drew with ``request.sampler``, but must never take back one
        that it drew (an unlikely one, say): that would make q another law than the one that was drawn from.
        Nor may it raise because of a token that it drew. Tokens that were not drawn (``Draft.q`` is None) may be
        dropped freely.
        """
        raise NotImplementedError

    def propose_batch(self, requests: Sequence[DraftRequest], ks: Sequence[int]) -> list[Draft]:
        """Proposes for several requests at once; override where one pass can serve them all."""
        return [self.propose(request, k) if k else NO_DRAFT for request, k in zip(requests, ks, strict=True)]

    def observe(self, request: DraftRequest, verdict: Verdict | None, taps: Tensor | None) -> None:
        """Called after each step, when ``request.ids`` already holds the newly committed tokens.

        Args:
            verdict: What became of the draft; None after a pass that only read a chunk of the prompt.
            taps: ``[n, len(self.taps), d]`` hidden states of the ``n`` positions that this step added to the
                target's cache (they end one before the last committed token); None if no tap is wanted.
        """

    def stop(self, request: DraftRequest) -> None:
        """Called once when the request ends, however it ends; give back all that it held."""

    def reset(self) -> None:
        """Forgets what was kept of requests that have ended, so that the next request starts cold."""


def require_trees(context: DrafterContext) -> None:
    """Raises UnsupportedModelError if the target cannot read a tree of tokens."""
    if problem := getattr(context.target, "tree_problem", None):
        raise UnsupportedModelError(
            f"the target cannot read a tree of tokens: {problem}", field="drafter", remedy="use a drafter of chains"
        )
