"""Table models that write characters: a small byte-level vocabulary around the rig's logits."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from rig import chain
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers

from foredraft.models.info import LoadedModel, ModelInfo
from foredraft.models.tokenizer import Tokenizer
from foredraft.testing import TableModel

CHARS = '{}[]":,<>/=_-.0123456789abcdefghilmnoprstuvxyz'
MERGES = [("t", "r"), ("tr", "u"), ("tru", "e"), ("{", '"'), ('"', ":"), ('"', "}"), ("a", "b"), (">", "{"), ("<", "/")]
BLANK, NEWLINE = "\u0120", "\u010a"  # as byte-level vocabularies spell them


def tokenizer() -> Tokenizer:
    names = [*CHARS, BLANK, NEWLINE, *(left + right for left, right in MERGES)]
    backend = Backend(models.BPE(vocab={name: i for i, name in enumerate(names)}, merges=MERGES))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<|endoftext|>", "<|call|>"])
    return Tokenizer(backend, eos_ids=[backend.token_to_id("<|endoftext|>")])


TOKENIZER = tokenizer()
V = TOKENIZER.vocab_size
[EOS] = TOKENIZER.eos_ids
PROMPT = [3, 1, 2]


def writer(seed: int = 0, logits: Callable[[tuple[int, ...]], Sequence[float]] | None = None) -> LoadedModel:
    """A table model with the vocabulary above."""
    table = TableModel(logits or chain(seed, V), V)
    return LoadedModel(table, TOKENIZER, ModelInfo("table", Path(), "table", 0, 0, V, 0, "float64", 0))
