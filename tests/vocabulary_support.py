"""Small tokenizers of every kind, and models that know a text by heart whatever their tokens are."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken, decoders, normalizers, pre_tokenizers, processors
from tokenizers import Tokenizer as Backend
from tokenizers.models import BPE
from tokenizers.trainers import BpeTrainer
from torch import Tensor

from foredraft.models.info import LoadedModel, ModelInfo
from foredraft.models.tokenizer import Tokenizer
from foredraft.testing import TableModel

TEXT = (
    "The quick brown fox jumps over the lazy dog, and the dog sleeps on.\n\n    Then 1234 foxes came; "
    "naïve café owners said: “déjà vu”! \U0001f98a\U0001f436 Über die Brücke gehen 17 Füchse, 狐狸跳过了懒狗。\n"
    "def area(width, height):\n        return width * height  # done\n"
)
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]


def tokenizer(kind: str = "bytes", size: int = 330, bos: bool = False, special: Sequence[str] = SPECIAL) -> Tokenizer:
    """A BPE trained on :data:`TEXT`.

    Args:
        kind: ``bytes`` (GPT-2's kind), ``digits`` (the same, digits apart), ``nfc`` (normalised to NFC) or ``pieces``
            (SentencePiece's kind: a space before the text, bytes as fallback).
        size: Tokens.
        bos: Add the first special token before a text.
    """
    return _tokenizer(kind, size, bos, tuple(special))


@cache
def _tokenizer(kind: str, size: int, bos: bool, special: tuple[str, ...]) -> Tokenizer:
    options: dict[str, Any] = {}
    if kind == "pieces":
        alphabet = [f"<0x{byte:02X}>" for byte in range(256)]
        backend = Backend(BPE(byte_fallback=True, fuse_unk=True, unk_token="<unk>"))
        backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
        backend.decoder = decoders.Sequence(
            [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
        )
        backend.pre_tokenizer = pre_tokenizers.Split("▁", "merged_with_next")
        options = {"special_tokens": ["<unk>", *alphabet], "limit_alphabet": 60}
    else:
        backend = Backend(BPE())
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        if kind == "digits":
            backend.pre_tokenizer = pre_tokenizers.Sequence(
                [pre_tokenizers.Digits(individual_digits=True), backend.pre_tokenizer]
            )
        if kind == "nfc":
            backend.normalizer = normalizers.NFC()
        backend.decoder = decoders.ByteLevel()
        options = {"initial_alphabet": pre_tokenizers.ByteLevel.alphabet()}
    backend.train_from_iterator([TEXT] * 3, BpeTrainer(vocab_size=size, show_progress=False, **options))
    if kind == "pieces":  # training made the bytes special; a model file says that they are not
        backend = _bytes_are_ordinary(backend)
    backend.add_special_tokens([AddedToken(name, normalized=False) for name in special])
    first = backend.token_to_id(special[0]) if special else None
    if bos:
        backend.post_processor = processors.TemplateProcessing(
            single=[special[0], "$A"], special_tokens=[(special[0], first)]
        )
    return Tokenizer(backend, bos_id=first if bos else None)


def _bytes_are_ordinary(backend: Backend) -> Backend:
    data = json.loads(backend.to_str())
    data["added_tokens"] = []
    return Backend.from_str(json.dumps(data))


def reciter(
    words: Tokenizer, text: str = TEXT, seed: int = 0, wrong: int = 0, padding: int = 0, spread: float = 4.0
) -> TableModel:
    """Goes on with ``text`` where it stands, in its own tokens; every ``wrong``-th position prefers something else.

    Elsewhere, and on top, its logits are random but fixed.
    """
    text = text * 2
    data = text.encode()
    ids = words.encode(text, special=False)
    strip = words.token_bytes(ids[0]).startswith(b" ")
    starts = {0: ids[0]}
    by_bytes = {words.token_bytes(token): token for token in range(words.vocab_size) if not words.is_special(token)}
    at = 0
    for position, token in enumerate(ids[:-1]):
        part = words.token_bytes(token)
        at += len(part) - (strip and position == 0)
        starts[at] = ids[position + 1]
    size = words.vocab_size + padding

    def logits(prefix: tuple[int, ...]) -> Tensor:
        said = b"".join(words.token_bytes(token) for token in prefix if not words.is_special(token))
        said = said[1:] if strip else said
        row = torch.randn(size, generator=torch.Generator().manual_seed(seed + len(said)), dtype=torch.float64)
        if data.startswith(said) and len(said) < len(data) and not (wrong and len(said) % wrong == 0):
            rest = data[len(said) :]  # where no token of the usual text begins, the longest that fits
            fits = (by_bytes[rest[:n]] for n in range(12, 0, -1) if rest[:n] in by_bytes)
            row[starts[len(said)] if len(said) in starts else next(fits)] += spread
        return row

    return TableModel(logits, size)


def loaded(model: Any, words: Tokenizer | None) -> LoadedModel:

    return LoadedModel(
        model, words, ModelInfo("table", Path("table"), "table", 0, 0, model.vocab_size, 0, "float64", 0)
    )
