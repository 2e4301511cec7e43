"""The EAGLE-1 head as something to train and to measure (Li 2024, arXiv 2401.15077)."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from foredraft.drafters.eagle1_checkpoint import eagle1_sizes
from foredraft.drafters.eagle_head import HeadShape
from foredraft.models.norm import RMSNorm
from foredraft.train.eagle_net import EagleNet


class Eagle1Net(EagleNet):
    """The trainable weights of an EAGLE-1 head; chains are rolled out as those of EAGLE-3.

    Args:
        shape: Its sizes.
        final_norm: The target's, before its LM head.
        rows: ``[V, d]`` float32 rows of the target's LM head.
        softcap: The target's cap on logits, if it has one.
        scale: ``[2 d]`` usual size of each input of ``fc``, embedding first; None is ones.
        bias: ``[d]`` of ``fc``, not trained; None if it has none.
        device: Where the weights are.
    """

    def __init__(
        self,
        shape: HeadShape,
        final_norm: RMSNorm,
        rows: Tensor,
        softcap: float | None = None,
        scale: Tensor | None = None,
        bias: Tensor | None = None,
        device: torch.device | None = None,
    ) -> None:
        super().__init__(shape, scale, device)
        self.final_norm, self.rows, self.softcap, self.bias = final_norm, rows, softcap, bias

    @staticmethod
    def sizes(shape: HeadShape) -> dict[str, tuple[int, ...]]:
        """Names and sizes of the weights of a checkpoint."""
        return eagle1_sizes(shape)

    def feature(self, taps: Tensor) -> Tensor:
        """``[T, 1, d]`` outputs of the target's last layer -> ``[T, d]``."""
        return self.final_norm(taps[:, 0].float())

    def logits(self, hidden: Tensor, wanted: Tensor | None = None) -> Tensor:
        """``[n, d]`` features -> ``[n, V]``, or only the tokens ``wanted``."""
        logits = functional.linear(hidden, self.rows if wanted is None else self.rows[wanted])
        return logits if self.softcap is None else (logits / self.softcap).tanh() * self.softcap

    def _join(self, embedded: Tensor, feature: Tensor) -> tuple[Tensor, Tensor]:
        joined = functional.linear(torch.cat([embedded, feature], -1) / self.tap_scale, self.weights["fc"], self.bias)
        return joined, joined.float()
