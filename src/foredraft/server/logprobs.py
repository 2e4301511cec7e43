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

    def special(self, token: int) -> bool:
        """Whether it stands for no text."""
        return self._tokenizer is not None and self._tokenizer.is_special(token)

    def offsets(self, tokens: Sequence[int], offset: int) -> list[int]:
        """Character at which each token begins, and at which the next one would; ``offset`` is the first one's.

        Characters are counted where they begin: of one in several tokens, the later ones begin where the next does.
        """
        found = [offset]
        for token in tokens:
            raw = self.bytes(token)
            begun = sum(byte & 0xC0 != 0x80 for byte in raw) if raw else len(self.text(token))
            found.append(found[-1] + begun)
        return found

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


def echoed_logprobs(
    texts: TokenTexts, ids: Sequence[int], entries: Sequence[TokenLogprob | None], echo: str
) -> dict[str, Any]:
    """``choices[].logprobs`` of an echoed prompt, whose first token has none.

    Tokens that the tokenizer put before the text, and that the echo does not show, take no room in ``text_offset``.
    """
    scored = completion_logprobs(texts, [entry for entry in entries if entry is not None], 0)
    hidden = texts.special(ids[0]) and not echo.startswith(texts.text(ids[0]))
    return {
        "tokens": [texts.text(token) for token in ids],
        "token_logprobs": [None, *scored["token_logprobs"]],
        "top_logprobs": [None, *scored["top_logprobs"]],
        "text_offset": [0, *texts.offsets(ids[1:], 0)[:-1]] if hidden else texts.offsets(ids, 0)[:-1],
    }


def completion_logprobs(texts: TokenTexts, entries: Sequence[TokenLogprob], offset: int) -> dict[str, Any]:
    """``choices[].logprobs`` of a completion; ``offset`` is where the first token's text begins."""
    top = [
        {texts.text(token): max(logprob, LOWEST) for token, logprob in ((e.token_id, e.logprob), *reversed(e.top))}
        for e in entries
    ]
    return {
        "tokens": [texts.text(entry.token_id) for entry in entries],
        "token_logprobs": [max(entry.logprob, LOWEST) for entry in entries],
        "top_logprobs": top,
        "text_offset": texts.offsets([entry.token_id for entry in entries], offset)[:-1],
    }
