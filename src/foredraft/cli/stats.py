"""Figures for people: the footer of one answer, and pooled acceptance over many."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from foredraft.engine.result import Result


@dataclass(slots=True)
class Tally:
    """Results pooled: every rate is a ratio of sums, never a mean of ratios.

    α = accepted / drafted tokens. τ = 1 + accepted / steps that drafted (the bonus token counts).
    """

    results: list[Result] = field(default_factory=list)

    def _sum(self, value: Callable[[Result], float]) -> float:
        return sum(value(result) for result in self.results)

    def _count(self, value: Callable[[Result], int]) -> int:
        return sum(value(result) for result in self.results)

    @property
    def tokens(self) -> int:
        return self._count(lambda r: r.usage.completion_tokens)

    @property
    def reused(self) -> int:
        return self._count(lambda r: r.usage.cached_tokens)

    @property
    def seconds(self) -> float:
        """From the first token of each result to its last."""
        return self._sum(lambda r: r.timings.decode_s)

    @property
    def rate(self) -> float | None:
        """Tokens after the first over decoding time; None where there are none or no time passed."""
        after_first = self._count(lambda r: max(r.usage.completion_tokens - 1, 0))
        return after_first / self.seconds if after_first and self.seconds > 0 else None

    @property
    def calls(self) -> int:
        """Passes of the target that produced tokens."""
        return self._count(lambda r: r.stats.num_steps)

    @property
    def calls_saved(self) -> int:
        """Passes that plain decoding would have needed on top."""
        return self.tokens - self.calls

    @property
    def steps(self) -> int:
        return self._count(lambda r: r.stats.num_spec_steps)

    @property
    def drafted(self) -> int:
        return self._count(lambda r: r.stats.num_draft_tokens)

    @property
    def accepted(self) -> int:
        return self._count(lambda r: r.stats.num_accepted_draft_tokens)

    @property
    def alpha(self) -> float | None:
        return self.accepted / self.drafted if self.drafted else None

    @property
    def tau(self) -> float | None:
        return 1 + self.accepted / self.steps if self.steps else None

    @property
    def by_position(self) -> list[float]:
        """Share of drafting steps that accepted position 1, 2, … (unconditional)."""
        columns = zip_longest(*(r.stats.accepted_per_position() for r in self.results), fillvalue=0)
        return [sum(column) / self.steps for column in columns]

    def to_dict(self) -> dict[str, Any]:
        return {
            "completion_tokens": self.tokens,
            "cached_tokens": self.reused,
            "decode_s": self.seconds,
            "tokens_per_second": self.rate,
            "target_calls": self.calls,
            "target_calls_saved": self.calls_saved,
            "num_spec_steps": self.steps,
            "num_draft_tokens": self.drafted,
            "num_accepted_draft_tokens": self.accepted,
            "draft_acceptance_rate": self.alpha,
            "mean_acceptance_length": self.tau,
            "acceptance_by_position": self.by_position,
        }


def number(value: float | None, digits: int = 2, suffix: str = "") -> str:
    return "–" if value is None else f"{value:.{digits}f}{suffix}"


def footer(tally: Tally, *, finish_reason: str | None = None, seed: int | None = None) -> str:
    """One line, such as ``48 tokens in 0.91 s · 52.7 tok/s · α 0.71 · τ 3.12 · 20 target calls saved``."""
    parts = [f"{tally.tokens} token{'s' * (tally.tokens != 1)} in {tally.seconds:.2f} s"]
    if tally.rate is not None:
        parts.append(f"{tally.rate:.1f} tok/s")
    if tally.steps:
        parts += [
            f"α {number(tally.alpha)}",
            f"τ {number(tally.tau)}",
            f"{tally.calls_saved} target call{'s' * (tally.calls_saved != 1)} saved",
        ]
    else:
        parts.append("nothing drafted")
    if tally.reused:
        parts.append(f"{tally.reused} tokens reused")
    if finish_reason == "length":
        parts.append("stopped at the token limit")
    if seed is not None:
        parts.append(f"seed {seed}")
    return " · ".join(parts)
