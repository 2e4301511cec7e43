"""How near a plain step comes to the fastest that memory allows, for the live page."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from foredraft.engine.costs import PassCosts
from foredraft.kernels.linear import PackedLinear
from foredraft.machine import read_bandwidth
from foredraft.models.base import Target
from foredraft.models.decoder import Decoder
from foredraft.models.linear import DenseLinear
from foredraft.models.mlp import GatedMlp


@dataclass(frozen=True, slots=True)
class Ceiling:
    """The ceiling of plain decoding: no pass can be faster than reading the weights once.

    Attributes:
        bandwidth: Measured speed of reading memory, bytes a second.
        weight_bytes: What every pass reads of the weights.
    """

    bandwidth: float
    weight_bytes: int

    def figures(self, passes: PassCosts) -> dict[str, Any] | None:
        """The time of reading the weights over the measured time of a pass of one row; None before there was one.

        Keys and values are left out, so the true share is a little higher.
        """
        if 1 not in passes.shape:
            return None
        share = self.weight_bytes / self.bandwidth / (passes.level * passes.shape[1])
        return {"share": share, "bandwidth": self.bandwidth, "weight_bytes": self.weight_bytes}


def measure(target: Target) -> Ceiling | None:
    """Times the target's memory, which takes half a second; None for models whose reads cannot be told in advance."""
    nbytes = weight_bytes(target)
    if not nbytes or not isinstance(target, Decoder):
        return None
    return Ceiling(read_bandwidth(device=str(target.device)), nbytes)


def weight_bytes(target: Target) -> int | None:
    """Bytes of the matrices that a pass of one row reads; None where the row decides (experts) or nothing is known."""
    if not isinstance(target, Decoder):
        return None
    total = _bytes(target.head)
    for layer in target.layers:
        if not isinstance(layer.mlp, GatedMlp):
            return None
        total += sum(_bytes(linear) for linear in (layer.qkv, layer.out, layer.mlp.gate_up, layer.mlp.down))
    return total


def _bytes(linear: object) -> int:
    if isinstance(linear, PackedLinear):
        return linear.bytes
    return linear.weight.nbytes if isinstance(linear, DenseLinear) else 0
