"""Gated MLPs, dense and mixture-of-experts."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn import functional

from foredraft.models.linear import Linear
from foredraft.models.shape import Activation, MoeShape

Mlp = Callable[[Tensor], Tensor]
"""``[N, d] -> [N, d]``."""


class GatedMlp:
    """``down(act(gate(x)) * up(x))`` with gate and up fused into one linear, gate first."""

    def __init__(self, gate_up: Linear, down: Linear, activation: Activation) -> None:
        self.gate_up = gate_up
        self.down = down
        self._tanh = activation == "gelu_tanh"

    def __call__(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up(x).chunk(2, -1)
        gate = functional.gelu(gate, approximate="tanh") if self._tanh else functional.silu(gate)
        return self.down(gate * up)


class MoeMlp:
    """Experts chosen for each token by a softmax router, and perhaps one that always runs behind a gate.

    Args:
        shape: Numbers of experts and how their weights are normalised.
        router: ``d -> experts``.
        experts: One MLP each.
        shared: The expert that always runs.
        shared_gate: ``d -> 1``, its weight before the sigmoid.
    """

    def __init__(
        self,
        shape: MoeShape,
        router: Linear,
        experts: Sequence[GatedMlp],
        shared: GatedMlp | None = None,
        shared_gate: Linear | None = None,
    ) -> None:
        self._shape = shape
        self.router = router
        self.experts = tuple(experts)
        self.shared = shared
        self.shared_gate = shared_gate

    def __call__(self, x: Tensor) -> Tensor:
        exact = torch.promote_types(x.dtype, torch.float32)
        weights, chosen = self.router(x).softmax(-1, dtype=exact).topk(self._shape.top_k, -1)
        if self._shape.normalise:
            weights = weights / weights.sum(-1, keepdim=True)
        weights = weights.to(x.dtype)
        mixed = torch.zeros_like(x)
        for expert in sorted(set(chosen.flatten().tolist())):
            rows, place = (chosen == expert).nonzero(as_tuple=True)
            mixed = mixed.index_add(0, rows, self.experts[expert](x[rows]) * weights[rows, place, None])
        if self.shared is not None and self.shared_gate is not None:
            mixed = mixed + self.shared_gate(x).sigmoid() * self.shared(x)
        return mixed
