"""Answers in OpenAI's shapes, whole and in chunks, for completions and chats alike."""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from foredraft.engine.result import Result, StreamToken
from foredraft.engine.stats import SpecStats
from foredraft.server.bodies import ChatBody, CompletionBody, DecodeBody
from foredraft.server.logprobs import TokenTexts, chat_logprobs, completion_logprobs
from foredraft.server.pieces import Piece


class Reply:
    """Writes the JSON of one HTTP request's answers.

    Args:
        body: What was asked.
        model: The model's name in the API.
        texts: Texts of single tokens, for log-probabilities.
        fingerprint: ``system_fingerprint``.
    """

    prefix, whole, part = "cmpl", "text_completion", "text_completion"

    def __init__(self, body: DecodeBody, model: str, texts: TokenTexts, fingerprint: str) -> None:
        self.body = body
        self.texts = texts
        self.id = f"{self.prefix}-{uuid.uuid4().hex}"
        self._head = {"created": int(time.time()), "model": model, "system_fingerprint": fingerprint}
        self.echoes: list[str] = []  # what an answer begins with, one an answer
        self._lengths: dict[int, int] = {}

    # --- what differs between completions and chats

    def message(self, text: str) -> dict[str, Any]:
        """The text of a whole answer."""
        return {"text": text}

    def delta(self, text: str) -> dict[str, Any]:
        """Text in a chunk."""
        return {"text": text}

    def logprobs(self, choice: int, piece: Piece) -> dict[str, Any] | None:
        """Log-probabilities of a piece; None where they were not asked for."""
        if not isinstance(self.body, CompletionBody) or self.body.logprobs is None:
            return None
        return completion_logprobs(self.texts, piece.logprobs, self._lengths.get(choice, 0))

    def opening(self, choice: int) -> dict[str, Any] | None:
        """The chunk before an answer's first text, if there is one."""
        if not self.echoes:
            return None
        return self.chunk(choice, Piece(self.echoes[choice]))

    # --- whole answers

    def complete(self, pieces: Sequence[Piece]) -> dict[str, Any]:
        """The response: one finished piece an answer, in order."""
        choices = []
        for number, piece in enumerate(pieces):
            result = _result(piece)
            choice = {"index": number, "finish_reason": result.finish_reason, "logprobs": self.logprobs(number, piece)}
            echo = self.echoes[number] if self.echoes else ""
            choices.append(self.message(echo + piece.text) | choice | self._ids(piece.tokens))
        results = [_result(piece) for piece in pieces]
        response = {"id": self.id, "object": self.whole, **self._head, "choices": choices, "usage": usage(results)}
        return response | self._metrics(results)

    # --- chunks

    def chunk(self, choice: int, piece: Piece) -> dict[str, Any]:
        """One chunk of a stream."""
        reason = piece.result.finish_reason if piece.result else None
        entry = {"index": choice, "finish_reason": reason, "logprobs": self.logprobs(choice, piece)}
        self._lengths[choice] = self._lengths.get(choice, 0) + len(piece.text)
        return self.envelope([self.delta(piece.text) | entry | self._ids(piece.tokens)])

    def envelope(self, choices: list[dict[str, Any]], results: Sequence[Result] | None = None) -> dict[str, Any]:
        """A chunk around choices; with ``results`` the last one, which has the usage."""
        chunk = {"id": self.id, "object": self.part, **self._head, "choices": choices}
        options = self.body.stream_options
        if options is not None and options.include_usage:
            chunk["usage"] = None if results is None else usage(results)
        return chunk if results is None else chunk | self._metrics(results)

    @property
    def has_last_chunk(self) -> bool:
        """Whether a chunk with usage or metrics follows the answers."""
        options, wanted = self.body.stream_options, self.body.speculation
        return bool(options and options.include_usage) or bool(wanted and wanted.stats != "off")

    def _ids(self, tokens: Sequence[StreamToken]) -> dict[str, Any]:
        if not self.body.return_token_ids:
            return {}
        return {"token_ids": [token.id for token in tokens], "tokens": [asdict(token) for token in tokens]}

    def _metrics(self, results: Sequence[Result]) -> dict[str, Any]:
        wanted = self.body.speculation
        if wanted is None or wanted.stats == "off":
            return {}
        stats = SpecStats()
        for result in results:
            stats.merge(result.stats)
        if wanted.stats == "detailed":  # one answer only, see refuse_detailed
            stats = results[0].stats
        spec = stats.to_dict(detailed=wanted.stats == "detailed")
        spec["verify"] = results[0].verify
        spec["plain_steps_by_choice"] = sum(result.plain_steps for result in results)
        timings = asdict(results[0].timings) if len(results) == 1 else None
        return {
            "metrics": {"speculative_decoding": spec, "timings": timings, "seeds": [result.seed for result in results]}
        }


class ChatReply(Reply):
    """Answers to a chat."""

    prefix, whole, part = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def message(self, text: str) -> dict[str, Any]:
        return {"message": {"role": "assistant", "content": text, "refusal": None}}

    def delta(self, text: str) -> dict[str, Any]:
        return {"delta": {"content": text} if text else {}}

    def logprobs(self, choice: int, piece: Piece) -> dict[str, Any] | None:
        asked = isinstance(self.body, ChatBody) and self.body.logprobs
        return chat_logprobs(self.texts, piece.logprobs) if asked else None

    def opening(self, choice: int) -> dict[str, Any] | None:
        entry = {"index": choice, "finish_reason": None, "logprobs": None}
        return self.envelope([{"delta": {"role": "assistant", "content": ""}} | entry])


def usage(results: Sequence[Result]) -> dict[str, Any]:
    """Tokens of all answers; a prompt counts once for each of its answers, since each reads it."""
    prompt = sum(result.usage.prompt_tokens for result in results)
    completion = sum(result.usage.completion_tokens for result in results)
    accepted = sum(result.stats.num_accepted_draft_tokens for result in results)
    drafted = sum(result.stats.num_draft_tokens for result in results)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": sum(result.usage.cached_tokens for result in results)},
        "completion_tokens_details": {
            "accepted_prediction_tokens": accepted,
            "rejected_prediction_tokens": drafted - accepted,
        },
    }


def _result(piece: Piece) -> Result:
    assert piece.result is not None
    return piece.result
