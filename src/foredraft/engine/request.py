"""One request inside the engine: everything that belongs to it alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from foredraft.config import SamplingParams, SpeculationConfig
from foredraft.engine.controller import Acceptance
from foredraft.engine.guard import Account
from foredraft.engine.result import Result, StreamToken, Timings, TokenLogprob, Usage
from foredraft.engine.stats import SpecStats
from foredraft.engine.stream import TextStream
from foredraft.errors import ForedraftError
from foredraft.sampling.drafting import RequestSampler
from foredraft.sampling.law import TokenLaw
from foredraft.sampling.noise import RequestNoise
from foredraft.types import FinishReason, RuleName, TokenKind


@dataclass(eq=False)
class Request:
    """A request from submission to result. Drafters see it as a :class:`~foredraft.drafters.base.DraftRequest`.

    Attributes:
        ids: Committed ids, prompt and output.
        budget: Most tokens that it may write.
        slot: Slot of the target's cache once admitted.
        speculation: How it is drafted and verified.
        drafter: Name of the drafter that serves it; ``none`` without one.
        drafting: Whether the drafter serves it; cleared if the drafter fails on it.
        after: One with the same prompt, of the same tenant, whose rows of the cache it may copy; it must be queued
            once that one has read its prompt.
        priority: Lower numbers are admitted first.
        admit_by: Clock time after which it fails if it still waits for a slot; None waits for ever.
        deadline: Clock time after which it fails unless it has finished.
        asked_at: Steps that it had made when its drafter was last asked; None since the drafter started.
        account: What the guard knows of it, once it was looked at.
        events: Tokens committed since the last look, for streams.
    """

    id: str
    ids: list[int]
    prompt_length: int
    params: SamplingParams
    speculation: SpeculationConfig
    rule: RuleName
    law: TokenLaw
    noise: RequestNoise
    sampler: RequestSampler
    stream: TextStream
    end_ids: frozenset[int]
    budget: int
    seed: int
    tenant: str
    submitted_at: float
    acceptance: Acceptance
    drafter: str
    account: Account | None = None
    after: Request | None = None
    priority: int = 0
    admit_by: float | None = None
    deadline: float | None = None
    drafting: bool = True
    asked_at: int | None = None
    slot: int | None = None
    cached_tokens: int = 0
    started: bool = False
    kinds: list[TokenKind] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprob | None] = field(default_factory=list)
    stats: SpecStats = field(default_factory=SpecStats)
    plain_steps: int = 0
    events: list[StreamToken] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    error: ForedraftError | None = None
    cancelled: bool = False
    admitted_at: float | None = None
    first_token_at: float | None = None
    finished_at: float | None = None

    @property
    def output(self) -> Sequence[int]:
        return self.ids[self.prompt_length :]

    @property
    def written(self) -> int:
        return len(self.ids) - self.prompt_length

    @property
    def remaining(self) -> int:
        return self.budget - self.written

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None

    def result(self, load_s: float) -> Result:
        """The finished request as its caller sees it."""
        assert self.finish_reason is not None
        assert self.finished_at is not None
        admitted = self.finished_at if self.admitted_at is None else self.admitted_at
        first = self.finished_at if self.first_token_at is None else self.first_token_at
        return Result(
            id=self.id,
            prompt_ids=self.ids[: self.prompt_length],
            text=self.stream.text,
            token_ids=list(self.output),
            kinds=self.kinds,
            logprobs=None if self.params.logprobs is None else self.logprobs,
            prompt_logprobs=None if self.params.prompt_logprobs is None else self.prompt_logprobs,
            finish_reason=self.finish_reason,
            seed=self.seed,
            usage=Usage(self.prompt_length, self.written, self.cached_tokens),
            timings=Timings(load_s, admitted - self.submitted_at, first - admitted, self.finished_at - first),
            stats=self.stats,
            verify=self.rule,
            drafter=self.drafter,
            plain_steps=self.plain_steps,
            error=self.error,
        )
