"""Answers in OpenAI's shapes, whole and in chunks, for completions and chats alike."""

from __future__ import annotations

import time
import uuid
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from foredraft.engine.request import Request
from foredraft.engine.result import Result, StreamToken
from foredraft.engine.stats import SpecStats
from foredraft.server.bodies import ChatBody, CompletionBody, DecodeBody
from foredraft.server.logprobs import TokenTexts, chat_logprobs, completion_logprobs, echoed_logprobs
from foredraft.server.pieces import Piece
from foredraft.server.tool_parser import ToolCall, ToolParser
from foredraft.server.tools import Tools, call_deltas, call_object


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
        self.n = body.n or 1
        self.echoes: list[str] = []  # what an answer begins with, one an answer
        self._offsets: dict[int, int] = {}  # of each answer, where its next token begins

    # --- what differs between completions and chats

    def content(self, choice: int, piece: Piece, whole: bool) -> tuple[dict[str, Any], str | None]:
        """The text of a piece, as a whole answer or as a chunk has it, and why the answer ended, if it did."""
        echo = self.echoes[choice] if self.echoes and whole else ""
        return {"text": echo + piece.text}, _reason(piece)

    def logprobs(self, choice: int, piece: Piece) -> dict[str, Any] | None:
        """Log-probabilities of a piece; None where they were not asked for."""
        if not isinstance(self.body, CompletionBody) or self.body.logprobs is None:
            return None
        offset = self._offsets.get(choice, 0)
        self._offsets[choice] = self.texts.offsets([entry.token_id for entry in piece.logprobs], offset)[-1]
        return completion_logprobs(self.texts, piece.logprobs, offset)

    @property
    def scored(self) -> bool:
        """Whether answers begin with the scores of their prompt, which are not known before it was read."""
        return bool(self.echoes) and isinstance(self.body, CompletionBody) and self.body.logprobs is not None

    def prompt_logprobs(self, choice: int, first: Request | Result) -> dict[str, Any]:
        """Scores of the prompt of an answer, from the request that read it."""
        ids = first.ids[: first.prompt_length] if isinstance(first, Request) else first.prompt_ids
        assert first.prompt_logprobs is not None
        scores = echoed_logprobs(self.texts, ids, first.prompt_logprobs, self.echoes[choice])
        self._offsets[choice] = self.texts.offsets(ids[-1:], scores["text_offset"][-1])[-1]
        return scores

    def scored_opening(self, choice: int, first: Request) -> dict[str, Any]:
        """The chunk that echoes a scored prompt."""
        scores = self.prompt_logprobs(choice, first)
        entry = {"text": self.echoes[choice], "index": choice, "finish_reason": None, "logprobs": scores}
        return self.envelope([entry | self._ids([])])

    def opening(self, choice: int) -> dict[str, Any] | None:
        """The chunk before an answer's first text, if there is one."""
        if not self.echoes or self.scored:
            return None
        return self.chunk(choice, Piece(self.echoes[choice]))

    # --- whole answers

    def complete(self, pieces: Sequence[Piece]) -> dict[str, Any]:
        """The response: one finished piece an answer, in order."""
        choices = []
        for number, piece in enumerate(pieces):
            scores = None
            if self.scored:
                scores = self.prompt_logprobs(number, _result(pieces[number - number % self.n]))
            logprobs = self.logprobs(number, piece)
            if scores is not None and logprobs is not None:
                logprobs = {name: scores[name] + logprobs[name] for name in scores}
            content, reason = self.content(number, piece, whole=True)
            entry = {"index": number, "finish_reason": reason, "logprobs": logprobs}
            choices.append(content | entry | self._ids(piece.tokens))
        results = [_result(piece) for piece in pieces]
        response = {"id": self.id, "object": self.whole, **self._head, "choices": choices}
        response["usage"] = usage(results, self.n)
        return response | self._metrics(results)

    # --- chunks

    def chunk(self, choice: int, piece: Piece) -> dict[str, Any]:
        """One chunk of a stream."""
        logprobs = self.logprobs(choice, piece)
        content, reason = self.content(choice, piece, whole=False)
        entry = {"index": choice, "finish_reason": reason, "logprobs": logprobs}
        return self.envelope([content | entry | self._ids(piece.tokens)])

    def envelope(self, choices: list[dict[str, Any]], results: Sequence[Result] | None = None) -> dict[str, Any]:
        """A chunk around choices; with ``results`` the last one, which has the usage."""
        chunk = {"id": self.id, "object": self.part, **self._head, "choices": choices}
        options = self.body.stream_options
        if options is not None and options.include_usage:
            chunk["usage"] = None if results is None else usage(results, self.n)
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
        spec["drafter"] = results[0].drafter
        spec["plain_steps_by_choice"] = sum(result.plain_steps for result in results)
        timings = asdict(results[0].timings) if len(results) == 1 else None
        return {
            "metrics": {"speculative_decoding": spec, "timings": timings, "seeds": [result.seed for result in results]}
        }


class ChatReply(Reply):
    """Answers to a chat, with the calls of tools that they hold.

    Args:
        tools: What may be called; None where nothing may.
    """

    prefix, whole, part = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def __init__(
        self, body: DecodeBody, model: str, texts: TokenTexts, fingerprint: str, tools: Tools | None = None
    ) -> None:
        super().__init__(body, model, texts, fingerprint)
        self._tools = tools if tools is not None and tools.tools else None
        self._parsers: dict[int, ToolParser] = {}
        self._calls: Counter[int] = Counter()

    def content(self, choice: int, piece: Piece, whole: bool) -> tuple[dict[str, Any], str | None]:
        text, calls = self._parsed(choice, piece)
        name, first = f"{self.id[-12:]}_{choice}", self._calls[choice]
        self._calls[choice] += len(calls)
        reason = _reason(piece)
        if reason == "stop" and self._calls[choice]:
            reason = "tool_calls"
        found: dict[str, Any] = {}
        if whole:
            found = {"role": "assistant", "content": text if text or not calls else None, "refusal": None}
            if calls:
                found["tool_calls"] = [call_object(call, name, i) for i, call in enumerate(calls)]
            return {"message": found}, reason
        if text:
            found["content"] = text
        if calls:
            found["tool_calls"] = [delta for i, call in enumerate(calls, first) for delta in call_deltas(call, name, i)]
        return {"delta": found}, reason

    def _parsed(self, choice: int, piece: Piece) -> tuple[str, list[ToolCall]]:
        """What is certain now: text, and calls that are whole."""
        if self._tools is None:
            return piece.text, []
        if (parser := self._parsers.get(choice)) is None:
            made = self._tools.parser()
            assert made is not None
            parser = self._parsers[choice] = made
        events = parser.push(self._tools.visible(piece.text, piece.tokens))
        if piece.result is not None:
            events = [*events, *parser.finish()]
        calls = [event for event in events if isinstance(event, ToolCall)]
        return "".join(event for event in events if isinstance(event, str)), calls

    def logprobs(self, choice: int, piece: Piece) -> dict[str, Any] | None:
        asked = isinstance(self.body, ChatBody) and self.body.logprobs
        return chat_logprobs(self.texts, piece.logprobs) if asked else None

    def opening(self, choice: int) -> dict[str, Any] | None:
        entry = {"index": choice, "finish_reason": None, "logprobs": None}
        return self.envelope([{"delta": {"role": "assistant", "content": ""}} | entry])


def _reason(piece: Piece) -> str | None:
    return piece.result.finish_reason if piece.result is not None else None


def usage(results: Sequence[Result], n: int) -> dict[str, Any]:
    """Tokens of all answers; a prompt counts once, whatever its number ``n`` of answers."""
    prompt = sum(result.usage.prompt_tokens for result in results[::n])
    completion = sum(result.usage.completion_tokens for result in results)
    accepted = sum(result.stats.num_accepted_draft_tokens for result in results)
    drafted = sum(result.stats.num_draft_tokens for result in results)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": sum(result.usage.cached_tokens for result in results[::n])},
        "completion_tokens_details": {
            "accepted_prediction_tokens": accepted,
            "rejected_prediction_tokens": drafted - accepted,
        },
    }


def _result(piece: Piece) -> Result:
    assert piece.result is not None
    return piece.result
