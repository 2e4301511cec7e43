"""The saved result of the study of mixtures of experts. ``moe.json`` is :class:`MoeStudy`, field by field."""

from __future__ import annotations

from typing import Any

from foredraft.config import Schema


class RowsRow(Schema):
    """A pass of so many rows."""

    rows: int
    distinct: float
    """Experts a layer that so many consecutive positions of text touched, mean over layers and places."""
    independent: float
    """E (1 - (1 - top_k/E)^rows)."""
    ms: float
    dense_ms: float
    """The dense twin's."""
    ratio: float
    """Over a pass of one row."""
    dense_ratio: float
    prior: float
    """What the cost model expects before it has measured anything."""


class BreakEven(Schema):
    """The acceptance rate above which drafting k tokens pays, drafting itself being free; None where none suffices."""

    batch: int
    k: int
    alpha: float | None
    dense_alpha: float | None


class Chosen(Schema):
    """What the engine made of a drafter of a known acceptance rate, ``k = auto``."""

    batch: int
    rate: float
    experts_k: float
    """Drafted tokens a step."""
    dense_k: float
    experts_gain: float
    """Over plain decoding in the same rounds."""
    dense_gain: float
    fixed_k: int
    experts_fixed_gain: float
    """With ``fixed_k`` instead."""


class MoeModel(Schema):
    """One mixture of experts and its twin."""

    name: str
    experts: int
    top_k: int
    layers: int
    parameters: int
    active_parameters: int
    rows: tuple[RowsRow, ...]
    break_even: tuple[BreakEven, ...]
    chosen: tuple[Chosen, ...]


class MoeStudy(Schema):
    """The whole study."""

    schema_version: int = 1
    seed: int
    quick: bool
    text: str
    models: tuple[MoeModel, ...]
    threads: int
    calls: int
    rounds: int
    seconds: dict[str, float]
    load_before: float | None
    provenance: dict[str, Any]
