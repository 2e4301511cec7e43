"""What speculation did, counted once and pooled: the fields and formulas that vLLM's users know, and a few more."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from foredraft.types import StepRecord


@dataclass(slots=True, repr=False)
class SpecStats:
    """Counts of one request, or of many pooled with :meth:`merge`. The bonus token never counts as accepted.

    A step is one target pass that wrote tokens; a *speculative* step is one whose pass verified a draft.

    Attributes:
        counts: Steps by how many tokens they drafted and accepted.
        trace: The steps in order; only kept for a single request.
    """

    counts: Counter[StepRecord] = field(default_factory=Counter)
    trace: list[StepRecord] = field(default_factory=list)

    def __repr__(self) -> str:
        drafted, accepted = self.num_draft_tokens, self.num_accepted_draft_tokens
        return f"SpecStats(steps={self.num_steps}, drafted={drafted}, accepted={accepted})"

    def add(self, drafted: int, accepted: int, depth: int = -1) -> None:
        """Takes in one step; ``depth`` is that of a tree (see :class:`~foredraft.types.StepRecord`)."""
        step = StepRecord(drafted, accepted, depth)
        self.counts[step] += 1
        self.trace.append(step)

    def merge(self, other: SpecStats) -> None:
        """Pools: adds the other's counts (never averages its ratios)."""
        self.counts.update(other.counts)

    @property
    def num_steps(self) -> int:
        return self.counts.total()

    @property
    def num_spec_steps(self) -> int:
        return sum(n for step, n in self.counts.items() if step.drafted)

    @property
    def num_draft_tokens(self) -> int:
        return sum(n * step.drafted for step, n in self.counts.items())

    @property
    def num_accepted_draft_tokens(self) -> int:
        return sum(n * step.accepted for step, n in self.counts.items())

    @property
    def draft_acceptance_rate(self) -> float | None:
        """α: accepted / drafted; None where nothing was drafted."""
        return _ratio(self.num_accepted_draft_tokens, self.num_draft_tokens)

    @property
    def mean_acceptance_length(self) -> float | None:
        """τ over speculative steps, vLLM's definition: 1 + accepted / speculative steps, bonus included."""
        accepted = _ratio(self.num_accepted_draft_tokens, self.num_spec_steps)
        return None if accepted is None else 1 + accepted

    @property
    def tokens_per_step(self) -> float | None:
        """τ over all steps, those that drafted nothing included: 1 + accepted / steps."""
        accepted = _ratio(self.num_accepted_draft_tokens, self.num_steps)
        return None if accepted is None else 1 + accepted

    def accepted_per_position(self) -> list[int]:
        """How often a drafted token of each position was accepted; in a tree the position is the depth."""
        longest = max((step.positions for step in self.counts), default=0)
        return [sum(n for step, n in self.counts.items() if step.accepted > i) for i in range(longest)]

    def histogram(self, drafted: int | None = None) -> list[int]:
        """``hist[i]``: speculative steps (of one draft length, if given) that accepted exactly i tokens."""
        hist: Counter[int] = Counter()
        for step, n in self.counts.items():
            if step.drafted and drafted in (None, step.drafted):
                hist[step.accepted] += n
        return [hist[i] for i in range(max(hist, default=-1) + 1)]

    def to_dict(self, detailed: bool = False) -> dict[str, Any]:
        """The ``metrics.speculative_decoding`` object; ``detailed`` adds two lists with an entry a step."""
        lengths = sorted({step.drafted for step in self.counts if step.drafted})
        result: dict[str, Any] = {
            "mean_acceptance_length": self.mean_acceptance_length,
            "draft_acceptance_rate": self.draft_acceptance_rate,
            "acceptance_rate_per_position": [_ratio(n, self.num_spec_steps) for n in self.accepted_per_position()],
            "acceptance_histogram": self.histogram(),
            "acceptance_histogram_by_draft_length": {str(n): self.histogram(n) for n in lengths},
            "num_spec_steps": self.num_spec_steps,
            "num_accepted_draft_tokens": self.num_accepted_draft_tokens,
            "num_draft_tokens": self.num_draft_tokens,
            "num_spec_tokens": max(lengths, default=0),
            "num_steps": self.num_steps,
            "tokens_per_step": self.tokens_per_step,
        }
        if detailed:
            result["per_step_accepted"] = [step.accepted for step in self.trace]
            result["per_step_drafted"] = [step.drafted for step in self.trace]
        return result


def _ratio(part: int, whole: int) -> float | None:
    return part / whole if whole else None
