"""Inverse frequencies of rotary embeddings and their scalings, and the table of cosines and sines."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from foredraft.errors import UnsupportedModelError
from foredraft.models.shape import Rope

_KNOWN = {
    "rope_type",
    "type",
    "rope_theta",
    "factor",
    "partial_rotary_factor",
    "original_max_position_embeddings",
    "low_freq_factor",
    "high_freq_factor",
    "beta_fast",
    "beta_slow",
    "attention_factor",
    "mscale",
    "mscale_all_dim",
    "truncate",
}


def make_rope(parameters: Mapping[str, Any], head_dim: int, max_positions: int) -> Rope:
    """Applies the scaling that ``parameters`` names.

    Args:
        parameters: ``rope_theta`` and, for a scaled kind, ``rope_type`` with its numbers, as in a
            ``config.json`` of transformers 5 (``rope_parameters``).
        head_dim: Width of one head, all of which is rotated.
        max_positions: Used where a scaling does not name its original context length.

    Raises:
        UnsupportedModelError: Kinds that depend on the length of the text (``dynamic``, ``longrope``), for
            which a cached key would need another angle later; partial rotation; unknown keys.
    """
    unknown = {key for key, value in parameters.items() if key not in _KNOWN and value is not None}
    if unknown:
        raise UnsupportedModelError(f"unknown key {min(unknown)!r}", field="rope_parameters")
    if parameters.get("partial_rotary_factor") not in (None, 1, 1.0):
        raise UnsupportedModelError("rotates only a part of each head", field="partial_rotary_factor")
    kind = parameters.get("rope_type") or parameters.get("type") or "default"
    try:
        base = float(parameters["rope_theta"])
        inverse = 1.0 / (base ** (torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim))
        if kind == "default":
            return Rope(tuple(inverse.tolist()))
        factor = float(parameters["factor"])
        original = int(parameters.get("original_max_position_embeddings") or max_positions)
        if kind == "linear":
            return Rope(tuple((inverse / factor).tolist()))
        if kind == "llama3":
            low, high = float(parameters["low_freq_factor"]), float(parameters["high_freq_factor"])
            return Rope(tuple(_llama3(inverse, factor, low, high, original).tolist()))
        if kind == "yarn":
            return _yarn(parameters, base, head_dim, factor, original)
    except KeyError as missing:
        raise UnsupportedModelError(f"{kind!r} lacks {missing}", field="rope_parameters") from None
    raise UnsupportedModelError(f"rotary scaling {kind!r} is not supported", field="rope_parameters")


def _llama3(inverse: Tensor, factor: float, low: float, high: float, original: int) -> Tensor:
    """Llama 3.1: long wavelengths are slowed by ``factor``, short ones kept, those between interpolated."""
    wavelength = 2 * math.pi / inverse
    smooth = (original / wavelength - low) / (high - low)
    between = (1 - smooth) * inverse / factor + smooth * inverse
    scaled = torch.where(wavelength > original / low, inverse / factor, between)
    return torch.where(wavelength < original / high, inverse, scaled)


def _yarn(parameters: Mapping[str, Any], base: float, dim: int, factor: float, original: int) -> Rope:
    """YaRN (Peng 2023, arXiv 2309.00071)."""

    def mscale(weight: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0

    def dimension(rotations: float) -> float:
        return dim * math.log(original / (rotations * 2 * math.pi)) / (2 * math.log(base))

    magnitude = parameters.get("attention_factor")
    if magnitude is None:
        over, under = parameters.get("mscale"), parameters.get("mscale_all_dim")
        magnitude = mscale(over) / mscale(under) if over and under else mscale(1.0)
    low = dimension(parameters.get("beta_fast") or 32)
    high = dimension(parameters.get("beta_slow") or 1)
    if parameters.get("truncate") is not False:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    high = high + 0.001 if low == high else high
    frequencies = base ** (torch.arange(0, dim, 2, dtype=torch.int64).float() / dim)
    interpolate = ((torch.arange(dim // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    inverse = interpolate / (factor * frequencies) + (1 - interpolate) / frequencies
    return Rope(tuple(inverse.tolist()), float(magnitude))


def half_angles(rope: Rope, rows: int) -> tuple[Tensor, Tensor]:
    """Cosines and sines ``[rows, head_dim / 2]`` float32 of positions ``0 … rows-1``, as the compiled kernels read."""
    angles = torch.arange(rows, dtype=torch.float32)[:, None] * torch.tensor(rope.inverse_frequencies)
    return angles.cos() * rope.magnitude, angles.sin() * rope.magnitude


class RopeTable:
    """Cosines and sines of positions ``0 … n-1``, grown when a longer text comes.

    Angles are computed in float32 (float64 for a float64 model) and rounded to the model's dtype. The first half
    of each sine row is negated, so that a rotation is ``x * cos + swap_halves(x) * sin``.
    """

    def __init__(self, rope: Rope, dtype: torch.dtype, device: torch.device) -> None:
        self._rope = rope
        self._dtype = dtype
        self._device = device
        self._cos = self._sin = torch.empty(0, 1, 0)

    def __call__(self, positions: Tensor, longest: int) -> tuple[Tensor, Tensor]:
        """Rows ``[N, 1, head_dim]`` for ``positions`` ``[N]``, none of which is above ``longest``."""
        if longest >= self._cos.shape[0]:
            self._grow(max(256, 2 * longest))
        return self._cos[positions], self._sin[positions]

    def _grow(self, rows: int) -> None:
        exact = torch.float64 if self._dtype == torch.float64 else torch.float32
        with torch.inference_mode(False):
            inverse = torch.tensor(self._rope.inverse_frequencies, dtype=exact)
            angles = torch.arange(rows, dtype=exact)[:, None] * inverse
            cos, sin = angles.cos() * self._rope.magnitude, angles.sin() * self._rope.magnitude
            self._cos = torch.cat([cos, cos], -1).to(self._device, self._dtype)[:, None]
            self._sin = torch.cat([-sin, sin], -1).to(self._device, self._dtype)[:, None]


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotates heads ``x`` ``[N, heads, head_dim]`` by the angles of their rows."""
    return torch.addcmul(x * cos, x.roll(x.shape[-1] // 2, -1), sin)
