"""Root-mean-square norm (Zhang 2019, arXiv 1910.07467)."""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional


class RMSNorm:
    """Normalises the last dimension in float32 (float64 for float64 models); the result has the input's dtype.

    Args:
        weight: ``[d]`` or ``[heads, d]`` factors, kept in float32 or better whatever the model's dtype.
        eps: Added to the mean square.
    """

    def __init__(self, weight: Tensor, eps: float) -> None:
        self.weight = weight
        self.eps = eps
        self._size = (weight.shape[-1],)

    def __call__(self, x: Tensor) -> Tensor:
        exact = x.to(self.weight.dtype)
        if self.weight.dim() == 1:
            return functional.rms_norm(exact, self._size, self.weight, self.eps).to(x.dtype)
        return (functional.rms_norm(exact, self._size, None, self.eps) * self.weight).to(x.dtype)
