"""A small encoder–decoder model drafts for a large one: the setting of the founding paper (Leviathan 2022, 2211.17192).

It reads the same source with an encoder of its own, once a request, and rolls its decoder's cache back like any model.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Self

from foredraft.drafters.base import DrafterContext
from foredraft.drafters.model import ModelDrafter
from foredraft.errors import ConfigError, UnsupportedModelError

if TYPE_CHECKING:
    from foredraft.models.encoder_decoder import EncoderDecoderTarget


class EncoderDecoderDrafter(ModelDrafter):
    """Drafts by sampling from a smaller encoder–decoder model under the request's own law.

    Args:
        model: A model with the target's vocabulary and its decoder's start token.

    Raises:
        UnsupportedModelError: At attachment: the target has no encoder.
        ConfigError: At attachment: the target's decoder starts with another token.
        VocabularyMismatchError: At attachment: the vocabularies differ.
    """

    name = "encoder-decoder"
    model: EncoderDecoderTarget

    def __init__(self, model: EncoderDecoderTarget) -> None:
        super().__init__(model)

    @classmethod
    def from_spec(cls, argument: str | None, context: DrafterContext) -> Self:
        from foredraft.models.encoder_decoder import load_encoder_decoder

        if argument is None:
            raise ConfigError(
                "names no model",
                field="drafter encoder-decoder",
                remedy="write encoder-decoder:FOLDER or encoder-decoder:HUB-ID",
            )
        device = "cpu" if context.device == "auto" else context.device
        return cls(load_encoder_decoder(argument, context.dtype, device, context.max_context))

    def attach(self, context: DrafterContext) -> None:
        start = getattr(context.target, "start", None)
        if start is None:
            raise UnsupportedModelError(
                "the target has no encoder", field="drafter encoder-decoder", remedy="use the drafter 'model' for it"
            )
        if start != self.model.start:
            raise ConfigError(
                f"its decoder starts with token {self.model.start}, the target's with {start}",
                field="drafter encoder-decoder",
                remedy="use a smaller model of the target's family",
            )
        super().attach(context)
