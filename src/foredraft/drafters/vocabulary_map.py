"""What two vocabularies have in common: tokens that stand for the same bytes, and special tokens of the same name."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from foredraft.models.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class VocabularyMap:
    """One drafter vocabulary seen from a target's.

    Attributes:
        target_ids: ``[n]`` int64: the shared tokens' ids in the target's vocabulary.
        drafter_ids: ``[n]`` int64: the same tokens' ids in the drafter's.
        to_target: Drafter id -> target id of the shared tokens.
        to_drafter: The other way round.
        specials: Special token of the target -> special token of the drafter with the same text. They are read, never
            drafted.
        byte_tokens: Byte -> the drafter's token for it alone.
        coverage: How much of what either of the two writes is made of shared tokens, 0 to 1: their share of a
            vocabulary where the r-th token counts 1/r, since tokenizers list frequent tokens first; the lesser of both.
    """

    target_ids: Tensor
    drafter_ids: Tensor
    to_target: Mapping[int, int]
    to_drafter: Mapping[int, int]
    specials: Mapping[int, int]
    byte_tokens: Mapping[int, int]
    coverage: float


def map_vocabularies(target: Tokenizer, drafter: Tokenizer) -> VocabularyMap:
    """Matches tokens by the bytes that they write; special tokens by their names."""
    mine, theirs = _ordinary(target), _ordinary(drafter)
    to_target = {token: mine[text] for text, token in theirs.items() if text in mine}
    names = {name: token for token, name in _specials(drafter).items()}
    return VocabularyMap(
        target_ids=torch.tensor(list(to_target.values()), dtype=torch.int64),
        drafter_ids=torch.tensor(list(to_target), dtype=torch.int64),
        to_target=to_target,
        to_drafter={there: here for here, there in to_target.items()},
        specials={token: names[name] for token, name in _specials(target).items() if name in names},
        byte_tokens={text[0]: token for text, token in theirs.items() if len(text) == 1},
        coverage=min(_share(theirs, to_target), _share(mine, to_target.values())),
    )


def _share(tokens: Mapping[bytes, int], shared: Collection[int]) -> float:
    ranks = {token: 1.0 / rank for rank, token in enumerate(sorted(tokens.values()), 1)}
    return sum(ranks[token] for token in shared) / sum(ranks.values()) if ranks else 0.0


def _ordinary(tokenizer: Tokenizer) -> dict[bytes, int]:
    """Bytes -> id. Of several tokens with the same bytes (a byte token and a letter) the last, which texts use."""
    found = {}
    for token in range(tokenizer.vocab_size):
        if not tokenizer.is_special(token) and (text := tokenizer.token_bytes(token)):
            found[text] = token
    return found


def _specials(tokenizer: Tokenizer) -> dict[int, str]:
    names = {token: tokenizer.backend.id_to_token(token) for token in range(tokenizer.vocab_size)}
    return {token: name for token, name in names.items() if name is not None and tokenizer.is_special(token)}
