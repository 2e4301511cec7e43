"""Drafter-invariant sampling with shared noise (Daliri, Musco, Suresh 2024, arXiv 2408.07978)."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from foredraft.errors import ConfigError, DrafterError
from foredraft.sampling.draw import Laws, NoiseRow, Rows, race
from foredraft.types import Draft, Verdict
from foredraft.verify._chain import check_chain


def coupled(draft: Draft, p: Rows, exponentials: Sequence[Tensor | NoiseRow] | Tensor) -> Verdict:
    """Accepts while the draft is the target's own draw, then commits the target's draw at the next row.

    The noise of a position belongs to the position: every committed token is ``race(p, noise)`` of its own row,
    whatever was drafted, so that the text is a function of the noise and of p alone. A drafter that races its
    q with the same noise matches with probability at least ``(1 - TV) / (1 + TV)``.

    Args:
        draft: A chain of k tokens; q does not matter.
        p: ``[k+1, V]`` post-filter law of the target. Only the rows up to the first mismatch are read.
        exponentials: k+1 rows ``[V]`` of standard exponential noise, row i of the i-th position of the step.
            Only the rows up to the first mismatch are read.

    Raises:
        NumericalError: A row of p that was needed is not a law.
    """
    check_chain(draft, p.shape[0], draft.k)
    if len(exponentials) != draft.k + 1:
        raise ConfigError(f"{draft.k} drafted tokens need {draft.k + 1} rows of noise", field="exponentials")
    for i, token in enumerate(draft.tokens):
        if not 0 <= token < p.shape[-1]:
            raise DrafterError(f"a drafted token is not in [0, {p.shape[-1]})", field="tokens")
        drawn = _race(p, i, exponentials[i])
        if drawn != token:
            return Verdict.chain(i, drawn, draft.k)
    return Verdict.chain(draft.k, _race(p, draft.k, exponentials[draft.k]), draft.k)


def _race(p: Rows, row: int, noise: Tensor | NoiseRow) -> int:
    if isinstance(noise, Tensor) or not isinstance(p, Laws):
        return race(p[row], noise)
    return p.race(row, noise)
