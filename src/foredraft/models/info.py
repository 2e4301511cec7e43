"""What a loaded model is."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from foredraft.models.base import Target
from foredraft.models.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """Facts about a loaded model.

    Attributes:
        name: The model's own name, or its file's.
        path: File or folder that it was read from.
        architecture: Model type as the file names it.
        layers: Layers in use.
        hidden_size: Width of hidden states.
        vocab_size: Width of the logits.
        parameters: Numbers in the layers in use, embedding and LM head (counted once if tied).
        dtype: Of the computation, e.g. ``"float32"``.
        file_bytes: Bytes of the weights' files.
        licence: As the metadata name it, or None.
    """

    name: str
    path: Path
    architecture: str
    layers: int
    hidden_size: int
    vocab_size: int
    parameters: int
    dtype: str
    file_bytes: int
    licence: str | None = None


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model ready to run; ``tokenizer`` is None if its files carry none."""

    target: Target
    tokenizer: Tokenizer | None
    info: ModelInfo
