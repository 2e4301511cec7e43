"""Grammars for requests, over one model's vocabulary."""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING

from foredraft.config import SamplingParams
from foredraft.errors import ConfigError
from foredraft.grammar import Grammar, GrammarVocabulary, structure_of

if TYPE_CHECKING:
    from foredraft.models.tokenizer import Tokenizer


class Structures:
    """Makes the grammars of requests.

    Args:
        tokenizer: The target's; None refuses structured requests.
        width: ``V``, the width of the target's logits.
    """

    def __init__(self, tokenizer: Tokenizer | None, width: int) -> None:
        self._tokenizer = tokenizer
        self._width = width

    @cached_property
    def vocabulary(self) -> GrammarVocabulary:
        """Made at the first structured request."""
        tokenizer = self._tokenizer
        assert tokenizer is not None
        size = tokenizer.vocab_size
        special = {id for id in range(size) if tokenizer.is_special(id)} | tokenizer.eos_ids
        tokens = [
            (tokenizer.backend.id_to_token(id) or "").encode() if id in special else tokenizer.token_bytes(id)
            for id in range(size)
        ]
        return GrammarVocabulary(tokens, sorted(special), lambda text: tokenizer.encode(text, special=False))

    def grammar(self, params: SamplingParams, end_ids: frozenset[int]) -> Grammar | None:
        """The grammar that a request asks for, at its beginning; None if it asks for none.

        Raises:
            ConfigError: It cannot be honoured; the field is named.
        """
        if params.structured_field is None:
            return None
        if self._tokenizer is None:
            raise ConfigError("this target has no tokenizer", field=params.structured_field)
        structure = structure_of(params, self.vocabulary.names)
        assert structure is not None
        return Grammar(structure, self.vocabulary, self._width, end_ids)
