"""EAGLE-1 drafters: the head foresees the target's last feature, and the target's own LM head reads it.

The feature of a position is what the target's final norm gives: it enters the LM head. Row t joins it with the
embedding of token t+1 through ``fc``, and one decoder layer without an input norm gives the feature of position t+1
(Li 2024, arXiv 2401.15077). Chains and trees are drafted by the same code as those of EAGLE-3.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Self

import torch
from torch import Tensor

from foredraft.drafters.base import DrafterContext
from foredraft.drafters.eagle import Eagle3Drafter
from foredraft.drafters.eagle1_checkpoint import Eagle1Weights, FeatureReader, load_eagle1
from foredraft.drafters.eagle_head import EagleHead, HeadShape
from foredraft.drafters.tree_eagle import EagleNodes
from foredraft.errors import ConfigError


class Eagle1Head(EagleHead):
    """A head of EAGLE-1 over the shared block.

    Args:
        shape: Its sizes; the one tap is the target's last layer.
        weights: Its products and its bias.
        embed: ``[n]`` int64 ids -> ``[n, d]``.
        reader: The target's final norm and LM head.
    """

    def __init__(
        self, shape: HeadShape, weights: Eagle1Weights, embed: Callable[[Tensor], Tensor], reader: FeatureReader
    ) -> None:
        super().__init__(shape, weights.block, embed)
        self.bias = weights.bias
        self.reader = reader

    @torch.inference_mode()
    def fuse(self, taps: Tensor) -> Tensor:
        """``[n, 1, target_hidden]`` outputs of the target's last layer -> ``[n, d]`` features, float32."""
        return self.reader.feature(taps[:, 0])

    def _join(self, embedded: Tensor, feature: Tensor) -> tuple[Tensor, Tensor]:
        joined = self.weights.fc(torch.cat([embedded, feature], -1))
        joined = joined if self.bias is None else joined + self.bias
        return joined, joined

    def _logits(self, hidden: Tensor) -> Tensor:
        return self.reader.logits(hidden)


def load_eagle1_head(path: Path, context: DrafterContext) -> Eagle1Head:
    """The head in folder ``path``, ready to draft for the engine's target."""
    return Eagle1Head(*load_eagle1(path, context.target))


class Eagle1Drafter(Eagle3Drafter):
    """Drafts chains with an EAGLE-1 head (Li 2024, arXiv 2401.15077)."""

    name = "eagle1"

    @classmethod
    def from_spec(cls, argument: str | None, context: DrafterContext) -> Self:
        return cls(load_eagle1_head(_folder(argument), context))


class Eagle1Nodes(EagleNodes):
    """An EAGLE-1 head as a :class:`~foredraft.drafters.tree.NodeScorer`."""

    @classmethod
    def from_spec(cls, argument: str | None, context: DrafterContext) -> Self:
        return cls(load_eagle1_head(_folder(argument), context))


def _folder(argument: str | None) -> Path:
    if argument is None:
        raise ConfigError(
            "names no head",
            field="drafter eagle1",
            remedy="train one for your model ('foredraft train eagle1') and write eagle1:FOLDER",
        )
    return Path(argument)
