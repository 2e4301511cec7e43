"""What changes scores because of the text so far: penalties, bias, bans, and processors of the user's own.

A row's prefix is the prompt, the committed output and the row's path (drafted tokens that precede it). Everything
about the committed part is kept up to date as tokens are committed, so that a step costs the same however
long the text is; everything about the paths is added a step at a time.

A **custom processor** is any callable ``(ids: list[int], logits: Tensor) -> Tensor``: the whole prefix of one row and
its ``[V]`` logits, which it may change in place, to ``[V]`` logits. It is called for every row that is drawn from, for
a draft or for the target. If its answer depends on more than its arguments, it must also have
``snapshot() -> object`` and ``restore(state)``; it then sees each row of a step once, in order, and after the step its
state is put back to what it was after the last committed row. In a tree, its state before a row is the one after the
row's parent.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol, cast, runtime_checkable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from foredraft.errors import ConfigError

Paths = Sequence[Sequence[int]]
Processor = Callable[[list[int], Tensor], Tensor]
Scores = NDArray[Any]
"""Logits on their way to a law, float32 or float64; numpy, because a step touches a few entries of each row."""
NEVER = float("-inf")


class Penalties:
    """Repetition (prompt and output), presence and frequency (output only) penalties."""

    def __init__(self, vocab_size: int, prompt: Sequence[int], repetition: float, presence: float, frequency: float):
        self.repetition, self.presence, self.frequency = repetition, presence, frequency
        self.count = np.zeros(vocab_size)  # occurrences in the output
        self._seen = np.zeros(vocab_size, dtype=bool)
        self._ids = np.zeros(64, dtype=np.int64)  # the seen ids, in order of appearance
        self._n = 0
        if repetition != 1.0:
            self._note(prompt)

    @property
    def seen(self) -> NDArray[np.int64]:
        """The ids that they concern, in order of appearance."""
        return self._ids[: self._n]

    def commit(self, tokens: Sequence[int]) -> None:
        self._note(tokens)
        for token in tokens:
            self.count[token] += 1

    def apply(self, scores: Scores, paths: Paths) -> None:
        """Changes ``scores [n, V]`` in place."""
        rows, tokens, extra = _occurrences(paths)
        ids = self.seen
        # Scores of drafted tokens are read before the committed counts change them, and written after.
        drafted = scores[rows, tokens]
        scores[:, ids] = self._penalised(scores[:, ids], self.count[ids])
        scores[rows, tokens] = self._penalised(drafted, self.count[tokens] + extra)

    def _penalised(self, scores: Scores, count: NDArray[np.float64]) -> Scores:
        """``[..., m]`` scores of seen tokens and their ``[m]`` occurrences in the output."""
        r = self.repetition
        if r != 1.0:
            scores = np.where(scores > 0, scores / r, scores * r)
        return scores - (self.presence * (count > 0) + self.frequency * count)

    def _note(self, tokens: Iterable[int]) -> None:
        for token in tokens:
            if not self._seen[token]:
                self._seen[token] = True
                if self._n == len(self._ids):
                    self._ids = np.concatenate((self._ids, np.zeros_like(self._ids)))
                self._ids[self._n] = token
                self._n += 1


def _occurrences(paths: Paths) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """Row, token and number of occurrences of every distinct token of every path."""
    found = [(row, token, n) for row, path in enumerate(paths) for token, n in Counter(path).items()]
    rows, tokens, counts = np.array(found, dtype=np.int64).reshape(-1, 3).T
    return rows, tokens, counts


class Bias:
    """Adds a number to the logits of given tokens."""

    def __init__(self, bias: dict[int, float]) -> None:
        self.ids = np.array(list(bias), dtype=np.int64)
        self.values = np.array(list(bias.values()), dtype=np.float64)

    def apply(self, scores: Scores) -> None:
        """Changes ``scores [n, V]`` in place."""
        scores[:, self.ids] += self.values.astype(scores.dtype)


class Bans:
    """Bad token sequences, the list of allowed ids, and the ends that ``min_tokens`` forbids."""

    def __init__(
        self, bad: Iterable[Sequence[int]], allowed: Sequence[int] | None, ends: Iterable[int], min_tokens: int
    ) -> None:
        sequences = {tuple(ids) for ids in bad}
        self._always = sorted(ids[0] for ids in sequences if len(ids) == 1)
        # Longer ones by the token that must come just before the banned one.
        self._after: dict[int, list[tuple[int, ...]]] = {}
        for ids in sequences:
            if len(ids) > 1:
                self._after.setdefault(ids[-2], []).append(ids)
        self._reach = max((len(ids) for ids in sequences), default=1) - 1
        self._allowed = None if allowed is None else sorted(set(allowed))
        self._ends = sorted(set(ends))
        self._min_tokens = min_tokens

    def apply(self, scores: Scores, paths: Paths, ids: Sequence[int], written: int) -> None:
        """Changes ``scores [n, V]`` in place; ``ids`` are prompt and output, ``written`` of them output."""
        if self._allowed is not None:
            kept = scores[:, self._allowed]
            scores.fill(NEVER)
            scores[:, self._allowed] = kept
        if self._always:
            scores[:, self._always] = NEVER
        tail = tuple(ids[-self._reach :]) if self._reach else ()
        for row, path in enumerate(paths):
            if self._after:
                self._ban_continuations(scores[row], (*tail, *path))
            if self._ends and written + len(path) < self._min_tokens:
                scores[row, self._ends] = NEVER

    def _ban_continuations(self, scores: Scores, prefix: tuple[int, ...]) -> None:
        for ids in self._after.get(prefix[-1], ()) if prefix else ():
            if prefix[1 - len(ids) :] == ids[:-1]:
                scores[ids[-1]] = NEVER


@runtime_checkable
class Stateful(Protocol):
    """A custom processor whose answer depends on what it saw before."""

    def snapshot(self) -> object: ...

    def restore(self, state: object) -> None: ...


class Custom:
    """Runs the user's processors row by row and keeps the states of those that have one."""

    def __init__(self, processors: Sequence[Processor]) -> None:
        self._processors = processors
        self._stateful = [cast(Stateful, processor) for processor in processors if isinstance(processor, Stateful)]
        self._committed = self._snapshot()
        self._after: dict[tuple[int, ...], list[object]] = {}  # states since the last rewind, by path
        self._last: tuple[int, ...] | None = None

    def apply(self, scores: Tensor, paths: Paths, ids: list[int]) -> Tensor:
        """``[n, V]`` -> ``[n, V]``; may change ``scores`` in place."""
        rows = []
        for row, path in zip(scores, paths, strict=True):
            self._enter(tuple(path))
            for processor in self._processors:
                before = row.shape
                row = processor([*ids, *path], row)
                if not isinstance(row, Tensor) or row.shape != before:
                    raise ConfigError(
                        f"{processor!r} did not return logits of shape {tuple(before)}", field="processors"
                    )
            rows.append(row.to(scores))
            if self._stateful:
                self._last = tuple(path)
                self._after[self._last] = self._snapshot()
        return torch.stack(rows)

    def _enter(self, path: tuple[int, ...]) -> None:
        """Puts the state to what it was after the row before ``path``'s last token, where another row came since."""
        if not path:
            if self._last is not None:
                self._restore(self._committed)
        elif path[:-1] != self._last and path[:-1] in self._after:
            self._restore(self._after[path[:-1]])

    def rewind(self) -> None:
        self._restore(self._committed)
        self._after, self._last = {}, None

    def settle(self, path: Sequence[int]) -> None:
        if self._stateful:
            self._committed = self._after[tuple(path)]
            self.rewind()

    def _snapshot(self) -> list[object]:
        return [processor.snapshot() for processor in self._stateful]

    def _restore(self, states: list[object]) -> None:
        for processor, state in zip(self._stateful, states, strict=True):
            processor.restore(state)
