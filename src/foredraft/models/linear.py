"""The one interface behind which every matrix product of a decoder stands.

A faster kernel is another :class:`Linear` and a :data:`LinearFactory` that builds it from the weights as the file
stores them, quantised blocks included; see :func:`foredraft.models.build.build_decoder`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional

from foredraft.models.weights import Weight


class Linear(Protocol):
    """``x [N, in] -> [N, out]``, any ``N >= 0``; the result has the dtype of ``x`` or a wider one."""

    in_features: int
    out_features: int

    def __call__(self, x: Tensor) -> Tensor: ...

    def parameters(self) -> list[Tensor]:
        """Dense weights that a trainer may update; none if the weights are packed."""


class DenseLinear:
    """Weights ``[out, in]`` in the model's dtype, multiplied by torch.

    For two to five rows (eight, if the matrix is very tall) of float32 on a CPU the product is taken the other way
    round, weights first: the usual way then takes up to twice as long as for a single row.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self.weight = weight
        self.bias = bias
        self.out_features, self.in_features = weight.shape
        turn = weight.device.type == "cpu" and weight.dtype == torch.float32 and self.out_features > self.in_features
        self._turn_up_to = (8 if self.out_features > 8 * self.in_features else 5) if turn else 0

    def __call__(self, x: Tensor) -> Tensor:
        if 1 < x.shape[0] <= self._turn_up_to:
            y = torch.mm(self.weight, x.t()).t().contiguous()
            return y if self.bias is None else y + self.bias
        return functional.linear(x, self.weight, self.bias)

    def parameters(self) -> list[Tensor]:
        return [self.weight] if self.bias is None else [self.weight, self.bias]


LinearFactory = Callable[[Sequence[Weight], Tensor | None, torch.dtype, torch.device], Linear]
"""Builds one linear from weights stacked along their output rows (q, k and v; gate and up), an optional bias
``[out]``, the model's dtype and its device."""


def dense_linear(
    weights: Sequence[Weight], bias: Tensor | None, dtype: torch.dtype, device: torch.device
) -> DenseLinear:
    """The default factory: dequantises and stacks."""
    rows = sum(weight.shape[0] for weight in weights)
    stacked = torch.empty(rows, weights[0].shape[1], dtype=dtype, device=device)
    start = 0
    for weight in weights:
        stacked[start : start + weight.shape[0]] = weight.dense(dtype)
        start += weight.shape[0]
    return DenseLinear(stacked, None if bias is None else bias.to(device, dtype))
