"""Prompts of eight kinds, shipped with the package, each with its source and licence; and longer ones for context.

The categories are Spec-Bench's (Xia 2024, arXiv 2401.07851) plus code editing and agent-like repetition.
"""

from __future__ import annotations

import argparse
import inspect
import json
from dataclasses import dataclass
from functools import cache
from importlib.resources import files

from foredraft.models.tokenizer import Tokenizer

COPY_HEAVY = ("code editing", "agent repetition")
"""Categories whose answers repeat much of their prompt."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """One conversation that ends with the user's turn.

    Attributes:
        id: Unique.
        category: One of eight.
        source: Where the text comes from.
        licence: SPDX identifier.
        messages: ``role`` and ``content`` each.
    """

    id: str
    category: str
    source: str
    licence: str
    messages: list[dict[str, str]]


@cache
def prompts() -> tuple[Prompt, ...]:
    """All prompts, by category."""
    text = files("foredraft.bench").joinpath("workloads.jsonl").read_text("utf-8")
    return tuple(Prompt(**json.loads(line)) for line in text.splitlines())


def categories() -> list[str]:
    """In the order of the report."""
    return list(dict.fromkeys(prompt.category for prompt in prompts()))


def of_category(category: str) -> list[Prompt]:
    return [prompt for prompt in prompts() if prompt.category == category]


def mix(n: int) -> list[Prompt]:
    """``n`` prompts, from all categories in turn; from the beginning again if there are not enough."""
    kinds = [of_category(category) for category in categories()]
    turns = [kind[i] for i in range(max(map(len, kinds))) for kind in kinds if i < len(kind)]
    return [turns[i % len(turns)] for i in range(n)]


def long_prompt(tokens: int, tokenizer: Tokenizer) -> Prompt:
    """A question about a piece of source code, ``tokens`` ids long to within a few: Python's own argparse module."""
    source = inspect.getsource(argparse)
    task = "Write out the first function of this code again, then say what it does.\n\n"
    empty = len(tokenizer.chat([{"role": "user", "content": task}]))
    ids = tokenizer.encode(source, special=False)[: max(tokens - empty, 1)]
    messages = [{"role": "user", "content": task + tokenizer.decode(ids)}]
    return Prompt(f"context-{tokens}", f"context {tokens}", "Python standard library, argparse", "PSF-2.0", messages)
