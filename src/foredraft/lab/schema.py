"""The saved result of the study, one model a table. ``article.json`` is :class:`Article`, field by field."""

from __future__ import annotations

from typing import Any

from foredraft.config import Schema

Interval = tuple[float, float]
"""Low and high end of a 95 % interval."""


class CorpusFacts(Schema):
    """What the two models read."""

    name: str
    source: str
    licence: str
    sha256: str
    characters: int
    held_out_characters: int
    vocab_size: int
    dropped: int


class ModelFacts(Schema):
    """One of the two models; losses in nats a character."""

    name: str
    key: str
    layers: int
    parameters: int
    held_out_loss: float
    train_seconds: float
    reused: bool


class AcceptanceRow(Schema):
    """Table A at one draft length: how much of a sampled draft is accepted, over ``trials`` rounds."""

    k: int
    trials: int
    mean_accepted: float
    mean_interval: Interval
    all_accepted: float
    all_interval: Interval
    predicted: float
    """Σ αⁱ of the table's own α."""
    block_mean_accepted: float
    """The same drafts under block verification."""
    block_interval: Interval
    by_accepted: tuple[int, ...]
    """How many trials accepted 0, 1, … k tokens."""


class TableA(Schema):
    """Table A. ``alpha`` is accepted tokens over judged tokens, pooled over all rows."""

    alpha: float
    rows: tuple[AcceptanceRow, ...]


class SpeedRow(Schema):
    """Table B at one draft length; times in milliseconds, speed-ups over plain decoding at batch 1."""

    k: int
    target_ms: float
    """One target call of k+1 rows."""
    tokens_per_step: float
    step_ms: float
    """``k`` draft calls and that target call."""
    arithmetic: float
    """Tokens a step over time a step, in calls measured alone, as the first study reckoned it."""
    predicted: float
    """Leviathan's formula from α and c."""
    engine_step_ms: float
    """A step of the engine: the calls, and sampling, verification and bookkeeping too."""
    measured: float
    """Whole generation through the engine, against plain decoding in the same rounds."""
    measured_interval: Interval


class TableB(Schema):
    """Table B. ``c`` is a draft call over a target call of one row."""

    target_ms: float
    draft_ms: float
    c: float
    threads: int
    """Threads of one torch operation while speed was measured."""
    context: int
    calls: int
    rounds: int
    tokens: int
    plain_tokens_per_s: float
    plain_step_ms: float
    """A step of plain decoding in the engine, to set beside ``target_ms``."""
    rows: tuple[SpeedRow, ...]
    auto: float
    """Measured speed-up with the adaptive draft length."""
    auto_interval: Interval
    best_k_arithmetic: int
    best_k_predicted: int
    best_k_measured: int


class LawRow(Schema):
    """One way of drawing, and how far its frequencies lie from the target's law."""

    name: str
    samples: int
    tv: float
    within_noise: bool


class TableC(Schema):
    """Table C: how different the models are, and how equal the laws."""

    positions: int
    tv_mean: float
    tv_mean_interval: Interval
    tv_max: float
    worst_context: str
    draft_length: int
    noise_mean: float
    noise_band: Interval
    """Central 95 % of the TV of true draws, by simulation."""
    rows: tuple[LawRow, ...]


class BatchRow(Schema):
    """Gain of speculation over plain decoding for ``batch`` requests at once."""

    batch: int
    plain_tokens_per_s: float
    fixed_gain: float
    fixed_interval: Interval
    auto_gain: float
    auto_interval: Interval


class BatchStudy(Schema):
    """The batch-size study; ``k`` is the fixed draft length, the best one of table B."""

    k: int
    threads: int
    rounds: int
    tokens: int
    rows: tuple[BatchRow, ...]


class Strip(Schema):
    """One trial for the picture: the drafted characters, how many were accepted, what the target wrote next."""

    context: str
    drafted: tuple[str, ...]
    accepted: int
    next: str


class Article(Schema):
    """The whole study."""

    schema_version: int = 1
    seed: int
    quick: bool
    corpus: CorpusFacts
    models: tuple[ModelFacts, ...]
    table_a: TableA
    table_b: TableB
    table_c: TableC
    batches: BatchStudy
    strips: tuple[Strip, ...]
    seconds: dict[str, float]
    load_before: float | None
    """Processes that wanted a processor in the minute before the study; None where the system does not tell."""
    provenance: dict[str, Any]
