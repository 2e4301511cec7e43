"""Plain answers to train on: conversations that end with the target's answer, or texts."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from foredraft.errors import ConfigError
from foredraft.models.tokenizer import Tokenizer
from foredraft.train.shards import Sample

PART = 256
"""Texts of one part."""


class AnswerTexts:
    """Texts in memory, as :class:`~foredraft.train.texts.Texts`; they hold no states."""

    def __init__(self, samples: Sequence[Sample]) -> None:
        self._samples = list(samples)

    def names(self) -> list[str]:
        return [f"part-{start:09d}" for start in range(0, len(self._samples), PART)]

    def read(self, name: str) -> list[Sample]:
        start = int(name.removeprefix("part-"))
        return self._samples[start : start + PART]


def read_answers(path: Path, tokenizer: Tokenizer | None, longest: int | None) -> AnswerTexts:
    """JSON lines, each a conversation that ends with an answer, or plain text, a text a line.

    Args:
        longest: Texts are cut to so many tokens.

    Raises:
        ConfigError: The file cannot be read, is empty, or a line holds something else; no tokenizer.
    """
    if tokenizer is None:
        raise ConfigError("the model has no tokenizer", field="target", remedy="use a model that carries one")
    try:
        lines = [line for line in path.read_text("utf-8").splitlines() if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot be read ({error})", field="answers") from None
    if not lines:
        raise ConfigError(f"{path} is empty", field="answers", remedy="write one conversation a line")
    samples = []
    for number, line in enumerate(lines):
        ids, prompt = _ids(line, number + 1, tokenizer)
        samples.append(Sample(number, ids[:longest], prompt, torch.empty(0)))
    return AnswerTexts([sample for sample in samples if sample.prompt_length < len(sample.ids)])


def _ids(line: str, number: int, tokenizer: Tokenizer) -> tuple[list[int], int]:
    """Token ids of a line, and how many of them are the prompt."""
    if line.lstrip()[0] not in "[{":
        return tokenizer.encode(line), 1
    try:
        found: Any = json.loads(line)
        found = found.get("messages") or found.get("conversations") if isinstance(found, dict) else found
        messages = [{"role": str(m["role"]), "content": str(m["content"])} for m in found]
    except (ValueError, KeyError, TypeError):
        messages = []
    if len(messages) < 2 or messages[-1]["role"] != "assistant":
        raise ConfigError(
            f"line {number} holds no messages that end with an answer",
            field="answers",
            remedy='write [{"role": "user", …}, {"role": "assistant", "content": "…"}] or plain text on each line',
        )
    if not tokenizer.has_chat_template:
        prompt = tokenizer.encode("\n".join(message["content"] for message in messages[:-1]) + "\n")
        return prompt + tokenizer.encode(messages[-1]["content"], special=False), len(prompt)
    prompt = tokenizer.chat(messages[:-1])
    whole = tokenizer.chat(messages, add_generation_prompt=False)
    if whole[: len(prompt)] != prompt:  # a template that writes answers of the past in another way
        return prompt + tokenizer.encode(messages[-1]["content"], special=False), len(prompt)
    end = next((i + 1 for i in range(len(prompt), len(whole)) if whole[i] in tokenizer.eos_ids), len(whole))
    return whole[:end], len(prompt)
