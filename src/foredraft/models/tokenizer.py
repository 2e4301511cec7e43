"""Text to token ids and back, over the ``tokenizers`` library; transformers is not imported."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property, lru_cache
from typing import Any

from tokenizers import Tokenizer as Backend

from foredraft.errors import ConfigError, VocabularyMismatchError
from foredraft.models.chat_template import ChatTemplate
from foredraft.models.stream_decoder import ByteStream, StreamDecoder, WindowStream

END_TOKENS = (
    "<|im_end|>",
    "<|endoftext|>",
    "<|eot_id|>",
    "<|eom_id|>",
    "<|end_of_text|>",
    "<|end|>",
    "<end_of_turn>",
    "<eos>",
    "</s>",
)
"""Tokens that end a turn wherever a vocabulary has them as special tokens, whatever its file says."""

_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class Tokenizer:
    """A vocabulary with its chat template.

    Args:
        backend: The tokenizer proper, its post-processor adding what ``special=True`` adds.
        bos_id: Beginning-of-sequence token.
        eos_ids: End tokens that the files name; those of :data:`END_TOKENS` are added.
        chat_template: Jinja source, or None.
        tokens: Special tokens by role for the template (``{"bos_token": "<s>", …}``).
        unused: Ids that only pad the vocabulary.
    """

    def __init__(
        self,
        backend: Backend,
        *,
        bos_id: int | None = None,
        eos_ids: Iterable[int] = (),
        chat_template: str | None = None,
        tokens: Mapping[str, str] | None = None,
        unused: Iterable[int] = (),
    ) -> None:
        self.backend = backend
        self.bos_id = bos_id
        added = backend.get_added_tokens_decoder()
        self._special = frozenset(id for id, token in added.items() if token.special)
        ends = (backend.token_to_id(token) for token in END_TOKENS)
        self.eos_ids = frozenset(eos_ids).union(id for id in ends if id in self._special)
        self._template_source = chat_template
        self._template_tokens = dict(tokens or {})
        self._unused = frozenset(unused)
        self._byte_level = type(backend.decoder).__name__ == "ByteLevel"
        self.token_bytes = lru_cache(maxsize=None)(self._token_bytes)

    @property
    def vocab_size(self) -> int:
        """Ids are below this. A model's logits may be wider, padded."""
        return self.backend.get_vocab_size(with_added_tokens=True)

    def encode(self, text: str, special: bool = True) -> list[int]:
        """Token ids of ``text``; ``special`` adds the tokens that the model expects around a text (BOS)."""
        try:
            return self.backend.encode(text, add_special_tokens=special).ids
        except (TypeError, UnicodeError) as error:  # half a surrogate pair, or no string at all
            raise ConfigError(f"is not valid text ({error})", field="prompt") from None

    def decode(self, ids: Sequence[int], skip_special: bool = True) -> str:
        return self.backend.decode(list(ids), skip_special_tokens=skip_special)

    def stream_decoder(self, skip_special: bool = True) -> StreamDecoder:
        """A fresh incremental decoder for one output."""

        def hidden(token: int) -> bool:
            return skip_special and token in self._special

        if self._byte_level:
            return ByteStream(lambda token: b"" if hidden(token) else self.token_bytes(token))
        return WindowStream(
            lambda ids: self.decode(ids, skip_special=False),
            lambda token: not hidden(token),
            lambda token: _BYTE.fullmatch(self.backend.id_to_token(token) or "") is not None,
        )

    @property
    def has_chat_template(self) -> bool:
        return self._template_source is not None

    @cached_property
    def _template(self) -> ChatTemplate:
        if self._template_source is None:
            raise ConfigError("this model has no chat template", field="messages", remedy="give a plain prompt")
        return ChatTemplate(self._template_source, self._template_tokens)

    def chat(
        self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool = True, **extra: Any
    ) -> list[int]:
        """Token ids of a conversation by the model's own template.

        Args:
            messages: ``{"role": "user", "content": "…"}`` and so on.
            add_generation_prompt: End where the assistant's answer begins.
            extra: Further variables of the template, e.g. ``enable_thinking=False``.

        Raises:
            ConfigError: No template, or it refuses the messages.
        """
        return self.encode(self._template.render(messages, add_generation_prompt, **extra), special=False)

    @property
    def chat_variables(self) -> frozenset[str]:
        """Variables that the chat template reads, such as ``tools``; empty without a template."""
        return self._template.variables if self.has_chat_template else frozenset()

    @property
    def chat_template(self) -> str:
        """Source of the chat template; empty without one."""
        return self._template_source or ""

    @property
    def special_tokens(self) -> Mapping[str, str]:
        """Special tokens by role, as the chat template knows them (``{"bos_token": "<s>", …}``)."""
        return self._template_tokens

    @property
    def has_padding_ids(self) -> bool:
        """Whether some ids only pad the vocabulary."""
        return bool(self._unused)

    def is_special(self, token: int) -> bool:
        return token in self._special

    def _token_bytes(self, token: int) -> bytes:
        text = self.backend.id_to_token(token)
        if text is None:
            return b""
        if self._byte_level:
            values = [_BYTE_OF.get(char) for char in text]
            return text.encode() if None in values else bytes(value for value in values if value is not None)
        if match := _BYTE.fullmatch(text):
            return bytes([int(match[1], 16)])
        return text.replace("\u2581", " ").encode()

    def same_vocabulary(self, other: Tokenizer) -> None:
        """Checks that every id means the same token here and there; ids that only pad are left out.

        Raises:
            VocabularyMismatchError: Naming the first id that differs.
        """
        for token in range(max(self.vocab_size, other.vocab_size)):
            mine, theirs = self._meaning(token), other._meaning(token)
            if mine != theirs:
                raise VocabularyMismatchError(
                    f"token {token} is {mine!r} for the one and {theirs!r} for the other",
                    field="drafter",
                    remedy="use a drafter with the target's own tokenizer, or vocabulary:MODEL for one with another",
                )

    def _meaning(self, token: int) -> str | None:
        return None if token in self._unused else self.backend.id_to_token(token)


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's printable character for each byte, reversed (Radford 2019): printable Latin-1 bytes stand for
    themselves, the others for the characters from U+0100 on.
    """
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in plain]
    return {chr(byte): byte for byte in plain} | {chr(256 + i): byte for i, byte in enumerate(others)}


_BYTE_OF = _byte_alphabet()
