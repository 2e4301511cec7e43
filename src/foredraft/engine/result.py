"""What a request gives back: the whole result, and the pieces of a stream."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from foredraft.engine.stats import SpecStats
from foredraft.errors import ForedraftError
from foredraft.types import FinishReason, TokenKind


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """Log-probability of one token under the target's unfiltered law (temperature 1, no filters).

    Attributes:
        top: The likeliest tokens there with their log-probabilities, as many as ``SamplingParams.logprobs``.
    """

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens read and written; ``cached_tokens`` of the prompt were already in the cache."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0

    @property
    def total_tokens(self) -> int:
        return self.prompt_tokens + self.completion_tokens


@dataclass(frozen=True, slots=True)
class Timings:
    """Seconds: waiting for a slot, reading the prompt up to the first token, writing the rest."""

    load_s: float = 0.0
    queue_s: float = 0.0
    prefill_s: float = 0.0
    decode_s: float = 0.0

    def tokens_per_second(self, completion_tokens: int) -> float | None:
        """Decoding speed: tokens after the first over ``decode_s``; None for fewer than two tokens."""
        return (completion_tokens - 1) / self.decode_s if completion_tokens > 1 and self.decode_s > 0 else None


@dataclass(frozen=True, slots=True)
class Result:
    """One finished request. What has an entry a token is left out when it is printed.

    Attributes:
        text: Decoded output up to the stop string; empty without a tokenizer.
        token_ids: Written ids, the end-of-sequence or stop token included.
        kinds: How each token came to be.
        logprobs: One entry a token if asked for, else None.
        prompt_logprobs: If asked for, one entry a token of the prompt, None for the first.
        finish_reason: ``stop``, ``length``, ``cancelled`` or ``error``.
        seed: Seed that reproduces the request.
        stats: Acceptance of this request.
        error: What went wrong, if ``finish_reason`` is ``error``.
        verify: Verification rule that was used.
        drafter: Name of the drafter that served it; ``none`` where the engine has none.
        plain_steps: Steps decoded without a draft because drafting would not have paid.
    """

    id: str
    prompt_ids: list[int] = field(repr=False)
    text: str
    token_ids: list[int] = field(repr=False)
    kinds: list[TokenKind] = field(repr=False)
    logprobs: list[TokenLogprob] | None = field(repr=False)
    finish_reason: FinishReason
    seed: int
    usage: Usage
    timings: Timings
    stats: SpecStats
    verify: str
    drafter: str = "none"
    plain_steps: int = 0
    error: ForedraftError | None = None
    prompt_logprobs: list[TokenLogprob | None] | None = field(default=None, repr=False)

    @property
    def metrics(self) -> dict[str, Any]:
        """``{"speculative_decoding": …}`` with vLLM's field names."""
        spec = self.stats.to_dict(detailed=True)
        spec["verify"] = self.verify
        spec["drafter"] = self.drafter
        spec["plain_steps_by_choice"] = self.plain_steps
        return {"speculative_decoding": spec}

    def to_dict(self) -> dict[str, Any]:
        """The result as plain data for JSON."""
        usage = asdict(self.usage) | {"total_tokens": self.usage.total_tokens}
        return {
            "text": self.text,
            "token_ids": self.token_ids,
            "token_kinds": self.kinds,
            "logprobs": None if self.logprobs is None else [asdict(entry) for entry in self.logprobs],
            "prompt_logprobs": None
            if self.prompt_logprobs is None
            else [None if entry is None else asdict(entry) for entry in self.prompt_logprobs],
            "finish_reason": self.finish_reason,
            "seed": self.seed,
            "error": None if self.error is None else str(self.error),
            "usage": usage,
            "timings": asdict(self.timings)
            | {"tokens_per_second": self.timings.tokens_per_second(self.usage.completion_tokens)},
            "metrics": self.metrics,
        }


@dataclass(frozen=True, slots=True)
class StreamToken:
    """One committed token in a stream; ``text`` is what became certain with it (empty while bytes are missing)."""

    id: int
    kind: TokenKind
    text: str


@dataclass(frozen=True, slots=True)
class StreamDelta:
    """One step's worth of a stream; the last one carries the result."""

    text: str
    tokens: list[StreamToken] = field(default_factory=list)
    result: Result | None = None
