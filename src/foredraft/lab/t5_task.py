"""What the small T5s learn: two tasks over real text, one that puts it into other words and one that cuts it down.

*Translate* goes from English into a made-up creole: the commonest tokens of the text have a counterpart of their own
there, all others are loan words. *Summarise* keeps the first words of every sentence. Of the one little can be copied
from the source, of the other everything, except that a summary knows where a copy ends and where the next begins.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor

from foredraft.lab.corpus import BLOCK, HELD_OUT_EVERY, Corpus

TaskName = Literal["translate", "summarise"]
TASKS: tuple[TaskName, ...] = ("translate", "summarise")
START, END, TRANSLATE, SUMMARISE = range(4)
"""Tokens with a meaning of their own; ``START`` is the decoder's start token and fills up a batch."""
SPECIAL = 4
WORDS = 400
"""Size of the text's own vocabulary."""
COMMON = 60
"""How many of its tokens have a counterpart; these follow it in the vocabulary of the models."""
VOCABULARY = SPECIAL + WORDS + COMMON
PASSAGE = {"translate": 28, "summarise": 48}
"""Tokens of a passage."""
HEAD = 3
"""Words of every sentence that belong to its summary."""
SHORT = 10
"""Tokens of the first passages: see :func:`batch`."""
SHUFFLED = 0.4
"""Share of the training that reads shuffled tokens."""


@dataclass(frozen=True, slots=True)
class Example:
    """One source, task token first, and its answer, end token last; neither holds the start token."""

    source: list[int]
    answer: list[int]

    @property
    def prompt(self) -> list[int]:
        """What an encoder–decoder target is given: see :mod:`foredraft.models.encoder_decoder`."""
        return [*self.source, START]


@dataclass(frozen=True, slots=True)
class Passages:
    """One part of a corpus as tokens, and what each task makes of it.

    Attributes:
        tokens: The text's ids in its own vocabulary, ``0 … WORDS-1``.
        word: Whether a word begins at each of them.
        sentence: Whether a sentence begins there.
        creole: The model's id of every token's counterpart, or of itself.
        kinds: One place of every distinct token.
    """

    tokens: list[int]
    word: list[bool]
    sentence: list[bool]
    creole: list[int]
    kinds: list[int]

    def example(self, task: TaskName, generator: torch.Generator, length: int | None = None) -> Example:
        """A passage at a random place; one of a summary begins where a sentence does."""
        length = length or PASSAGE[task]
        at = int(torch.randint(len(self.tokens) - length, (), generator=generator))
        while task == "summarise" and not self.sentence[at] and at < len(self.tokens) - length:
            at += 1
        return self._made_of(task, range(at, at + length))

    def shuffled(self, task: TaskName, generator: torch.Generator, length: int) -> Example:
        """Any tokens in any order, rare ones as often as common ones: only the source can tell what follows what."""
        picked = torch.randint(len(self.kinds), (length,), generator=generator).tolist()
        return self._made_of(task, [self.kinds[i] for i in picked])

    def _made_of(self, task: TaskName, places: Sequence[int]) -> Example:
        source = [SPECIAL + self.tokens[i] for i in places]
        if task == "translate":
            return Example([TRANSLATE, *source], [*(self.creole[self.tokens[i]] for i in places), END])
        kept: list[int] = []
        words = 0
        for token, i in zip(source, places, strict=True):
            words = 1 if self.sentence[i] or not words else words + self.word[i]
            kept += [token] if words <= HEAD else []
        return Example([SUMMARISE, *source], [*kept, END])


def passages(corpus: Corpus) -> tuple[Passages, Passages, Tokenizer]:
    """Training text, held-out text (every tenth block of it) and the tokenizer, which has read the former alone."""
    parts: tuple[list[str], list[str]] = ([], [])
    for number, start in enumerate(range(0, len(corpus.text), BLOCK)):
        block = re.sub(r"\s+", " ", corpus.text[start : start + BLOCK])
        parts[number % HELD_OUT_EVERY == HELD_OUT_EVERY - 1].append(block)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.train_from_iterator(parts[0], trainers.BpeTrainer(vocab_size=WORDS, show_progress=False))
    training, held_out = (_read(tokenizer, blocks) for blocks in parts)
    creole = [SPECIAL + token for token in range(WORDS)]
    for number, (token, _) in enumerate(Counter(training[0]).most_common(COMMON)):
        creole[token] = SPECIAL + WORDS + number
    kinds = [sorted({token: i for i, token in enumerate(part[0])}.values()) for part in (training, held_out)]
    return Passages(*training, creole, kinds[0]), Passages(*held_out, creole, kinds[1]), tokenizer


def _read(tokenizer: Tokenizer, blocks: Sequence[str]) -> tuple[list[int], list[bool], list[bool]]:
    tokens: list[int] = []
    word: list[bool] = []
    sentence: list[bool] = []
    names = [tokenizer.id_to_token(i) or " " for i in range(tokenizer.get_vocab_size())]
    ended = True
    for encoding in tokenizer.encode_batch(list(blocks)):
        for token in encoding.ids:
            begins = names[token].startswith("Ġ")
            tokens.append(token)
            word.append(begins)
            sentence.append(begins and ended)
            ended = names[token][-1] in ".:;?!"
    return tokens, word, sentence


def show(tokenizer: Tokenizer, ids: Sequence[int], creole: Sequence[int]) -> str:
    """Tokens as text; counterparts in capitals, as the tokens that they stand for."""
    native = {SPECIAL + token: token for token in range(WORDS)}
    native |= {counterpart: token for token, counterpart in enumerate(creole)}
    words = [(str(tokenizer.id_to_token(native[i])), i >= SPECIAL + WORDS) for i in ids if i in native]
    return "".join(word.upper() if common else word for word, common in words).replace("Ġ", " ").strip()


def batch(text: Passages, size: int, seed: int, step: int, progress: float) -> tuple[Tensor, Tensor, Tensor]:
    """``[size, n]`` sources, their mask ``[size, n]``, and ``[size, m]`` labels (-100 where there is none).

    Args:
        progress: Share of the training that is behind. The first part translates short passages of shuffled tokens:
            what follows can then be told only by finding one's place in the source, so this is what is learnt first.
            The second grows to whole passages of real text, for both tasks.
    """
    generator = torch.Generator().manual_seed(seed * 1_000_003 + step)
    examples = []
    for number in range(size):
        task = TASKS[number % 2]
        if progress < SHUFFLED:
            examples.append(text.shuffled("translate", generator, SHORT))
        else:
            grown = min(1.0, 4 * (progress - SHUFFLED))
            examples.append(text.example(task, generator, round(SHORT + grown * (PASSAGE[task] - SHORT))))
    source = _padded([example.source for example in examples], START)
    return source, (source != START).long(), _padded([example.answer for example in examples], -100)


def _padded(rows: Sequence[Sequence[int]], value: int) -> Tensor:
    width = max(map(len, rows))
    return torch.tensor([[*row, *[value] * (width - len(row))] for row in rows])
