"""Log-probabilities in OpenAI's two shapes. They are the model's own, before any filter or temperature."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from foredraft.engine.result import TokenLogprob
from foredraft.models.tokenizer import Tokenizer

LOWEST = -9999.0
"""What OpenAI writes for impossible tokens; JSON has no infinity."""


class TokenTexts:
    """Texts of single tokens."""

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        self._tokenizer = tokenizer

    def bytes(self, token: int) -> bytes:
        return b"" if self._tokenizer is None else self._tokenizer.token_bytes(token)

    def text(self, token: int) -> str:
        if self._tokenizer is None:
            return f"token_id:{token}"
        return self.bytes(token).decode("utf-8", "replace")


def chat_logprobs(texts: TokenTexts, entries: Sequence[TokenLogprob]) -> dict[str, Any]:
    """``choices[].logprobs`` of a chat completion."""

    def one(token: int, logprob: float) -> dict[str, Any]:
        raw = texts.bytes(token)
        return {"token": texts.text(token), "logprob": max(logprob, LOWEST), "bytes": list(raw) if raw else None}

    content = [
        one(entry.token_id, entry.logprob) | {"top_logprobs": [one(*pair) for pair in entry.top]} for entry in entries
    ]
    return {"content": content, "refusal": None}


def completion_logprobs(texts: TokenTexts, entries: Sequence[TokenLogprob], offset: int) -> dict[str, Any]:
    """``choices[].logprobs`` of a completion; ``offset`` is where the first token's text begins."""
    offsets = []
    for entry in entries:
        offsets.append(offset)
        offset += len(texts.text(entry.token_id))
    top = [
        {texts.text(token): max(logprob, LOWEST) for token, logprob in ((e.token_id, e.logprob), *reversed(e.top))}
        for e in entries
    ]
    return {
        "tokens": [texts.text(entry.token_id) for entry in entries],
        "token_logprobs": [max(entry.logprob, LOWEST) for entry in entries],
        "top_logprobs": top,
        "text_offset": offsets,
    }
