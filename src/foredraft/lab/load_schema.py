"""The saved result of the study of draft lengths under load. ``load.json`` is :class:`LoadStudy`, field by field."""

from __future__ import annotations

from typing import Any

from foredraft.config import Schema
from foredraft.lab.schema import Interval


class PolicyRow(Schema):
    """One way to decide draft lengths, at one batch size."""

    batch: int
    policy: str
    gain: float
    """Tokens a second over plain decoding's, same prompts, in the same rounds."""
    interval: Interval | None
    """95 %, over rounds; None where time is reckoned and not measured."""
    drafted: float
    """Verified drafted tokens a step."""
    accepted: float
    """Of them, accepted."""


class Trusted(Schema):
    """How often tokens drawn with a confidence of this class were accepted, and what admission expects at first."""

    confidence_from: float
    tokens: int
    accepted: float | None
    prior: float


class Setting(Schema):
    """One target and drafter with all policies."""

    name: str
    text: str
    """What was run, in words."""
    rows: tuple[PolicyRow, ...]
    trust: tuple[Trusted, ...]


class LoadStudy(Schema):
    """The whole study."""

    schema_version: int = 1
    seed: int
    quick: bool
    settings: tuple[Setting, ...]
    rounds: int
    tokens: int
    threads: int
    seconds: dict[str, float]
    load_before: float | None
    provenance: dict[str, Any]
