"""The saved result of the encoder–decoder study. ``t5.json`` is :class:`T5Study`, field by field."""

from __future__ import annotations

from typing import Any

from foredraft.config import Schema
from foredraft.lab.schema import CorpusFacts, Interval


class T5Facts(Schema):
    """One of the three models; losses in nats a token of held-out text."""

    name: str
    key: str
    encoder_layers: int
    decoder_layers: int
    parameters: int
    losses: dict[str, float]
    train_seconds: float
    reused: bool


class LengthRow(Schema):
    """One draft length: speed-up over plain decoding of the same sources in the same rounds."""

    k: int
    tokens_per_step: float
    predicted: float
    """(1-α^(k+1)) / ((1-α)(kc+1)), rows for nothing."""
    priced: float
    """The same with the measured price of a pass of k+1 rows for the 1."""
    measured: float
    measured_interval: Interval


class PairRow(Schema):
    """One task, temperature and drafter."""

    task: str
    temperature: float
    drafter: str
    alpha: float
    """Accepted over judged tokens, pooled over all draft lengths."""
    c: float
    """A draft call over a target call of one row."""
    best_k: int
    """By measured speed-up."""
    predicted_best_k: int
    lengths: tuple[LengthRow, ...]
    texts: int
    identical: int
    """Of them, texts equal to plain decoding's, token for token; expected of all at temperature 0."""

    @property
    def best(self) -> LengthRow:
        return next(row for row in self.lengths if row.k == self.best_k)


class CallCosts(Schema):
    """Median milliseconds of calls measured in turns: the target's by rows, the drafters' of one row."""

    target_ms: dict[int, float]
    draft_ms: dict[str, float]
    encoder_ms: dict[str, float]
    calls: int
    threads: int


class LawCheck(Schema):
    """Texts of ``tokens`` tokens drawn with speculation against as many drawn without: do they have one law?"""

    drawn_by: str
    samples: int
    tv: float
    """Total variation between the two sets of samples."""
    p_value: float
    """Of a chi-square test of two samples."""


class T5Law(Schema):
    """The law check at one source, the one of those tried where target and drafter differ most."""

    task: str
    source: str
    tokens: int
    model_tv: float
    """Between target and small drafter, mean over the first places."""
    rows: tuple[LawCheck, ...]


class Strip(Schema):
    """One example: source, the target's greedy answer, and how many tokens each step wrote with the small drafter."""

    task: str
    source: str
    answer: str
    right: str


class Claim(Schema):
    """One thing that the founding paper's table shows, and whether this table shows it too."""

    text: str
    holds: bool


class T5Study(Schema):
    """The whole study."""

    schema_version: int = 1
    seed: int
    quick: bool
    corpus: CorpusFacts
    models: tuple[T5Facts, ...]
    costs: CallCosts
    rows: tuple[PairRow, ...]
    claims: tuple[Claim, ...]
    laws: tuple[T5Law, ...]
    examples: tuple[Strip, ...]
    rounds: int
    seconds: dict[str, float]
    load_before: float | None
    provenance: dict[str, Any]
