"""What is run in which order: the most telling first, so that a bench cut short is a smaller bench, not a broken one.

A round gives the same work to every row, one after the other (A B C A B C …), beginning with another row each time. A
block is a set of rounds that belong together, such as one prompt of each category.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from foredraft.bench.rows import Row
from foredraft.bench.workloads import categories, mix, of_category

PARTS = ("curve", "speed", "batch", "context", "sampled", "warm")
PASS_ROWS = (1, 2, 4, 8, 16)
PASS_CONTEXT = 256


@dataclass(frozen=True, slots=True)
class Preset:
    """How much to run.

    Attributes:
        minutes: Time after which no new round is begun; None for no limit.
        tokens: Most tokens of an answer.
        prompts: Prompts of each category.
        repeats: How often everything is run.
        batches: Requests together in the batch part.
        contexts: Prompt lengths in the context part.
        parts: Which of :data:`PARTS`.
    """

    minutes: float | None
    tokens: int
    prompts: int
    repeats: int
    batches: tuple[int, ...]
    contexts: tuple[int, ...]
    parts: tuple[str, ...] = PARTS


PRESETS = {
    "quick": Preset(5, 32, 1, 1, (8,), (128,), ("curve", "speed", "batch")),
    "standard": Preset(25, 64, 8, 2, (8, 32, 4, 1), (128, 1024, 4096)),
    "full": Preset(None, 128, 8, 3, (8, 32, 4, 1), (128, 1024, 4096, 8192)),
}


@dataclass(frozen=True, slots=True)
class Task:
    """One piece of work for one row.

    Attributes:
        part: One of :data:`PARTS`.
        row: Name of the row.
        group: Category, or the point on the part's curve.
        prompts: Ids of the prompts decoded together; none for the cost of a pass.
        tokens: Most tokens of an answer.
        temperature: 0 or 1.
        repeat: Number of the repetition.
    """

    part: str
    row: str
    group: str
    prompts: tuple[str, ...]
    tokens: int
    temperature: float
    repeat: int

    @property
    def key(self) -> str:
        """Finished tasks are known by it."""
        head = self.prompts[0] if len(self.prompts) == 1 else f"{len(self.prompts)} prompts"
        return f"{self.part}/{self.row}/{self.group}/{head}/{self.tokens}/{self.repeat}"


@dataclass(frozen=True, slots=True)
class Block:
    """Rounds that belong together. ``slow_rows_rest``: rows far slower than the others may skip it."""

    name: str
    rounds: list[list[Task]]
    slow_rows_rest: bool = False


def plan(rows: Sequence[Row], preset: Preset) -> list[Block]:
    """All blocks, the most telling first."""
    first = [_curve(rows, 0), _speed(rows, preset, 0, 0), _batch(rows, preset, preset.batches[:2], 0)]
    first += [_speed(rows, preset, 1, 0), _context(rows, preset, 0), _sampled(rows, preset, 0)]
    first += [_warm(rows, preset), _batch(rows, preset, preset.batches[2:], 0)]
    rest = [_speed(rows, preset, number, 0) for number in range(2, preset.prompts)]
    for repeat in range(1, preset.repeats):
        rest += [_speed(rows, preset, number, repeat) for number in range(preset.prompts)]
        rest += [_curve(rows, repeat), _batch(rows, preset, preset.batches, repeat), _context(rows, preset, repeat)]
    return [block for block in first + rest if block.rounds and _part(block) in preset.parts]


def _part(block: Block) -> str:
    return next((task.part for tasks in block.rounds for task in tasks), "")


def _round(
    rows: Sequence[Row],
    number: int,
    part: str,
    group: str,
    prompts: Sequence[str],
    tokens: int,
    repeat: int,
    temperature: float = 0.0,
) -> list[Task]:
    taking = [row for row in rows if not row.parts or part in row.parts]
    if len(prompts) > 1:
        taking = [row for row in taking if row.batches]
    start = number % len(taking) if taking else 0
    return [
        Task(part, row.name, group, tuple(prompts), tokens, temperature, repeat)
        for row in [*taking[start:], *taking[:start]]
    ]


def _curve(rows: Sequence[Row], repeat: int) -> Block:
    plain = [row for row in rows if row.plain]
    return Block("cost of a pass", [_round(plain, repeat, "curve", "pass", (), 0, repeat)])


def _speed(rows: Sequence[Row], preset: Preset, number: int, repeat: int) -> Block:
    rounds = []
    if number < preset.prompts:
        for place, category in enumerate(categories()):
            prompt = of_category(category)[number]
            rounds.append(_round(rows, number + place, "speed", category, [prompt.id], preset.tokens, repeat))
    name = f"speed, prompt {number + 1} of each category" + (f", repeat {repeat + 1}" if repeat else "")
    return Block(name, rounds, slow_rows_rest=number + repeat > 0)


def _batch(rows: Sequence[Row], preset: Preset, sizes: Sequence[int], repeat: int) -> Block:
    together = [row for row in rows if row.batches]
    rounds = [
        _round(together, n, "batch", str(size), [prompt.id for prompt in mix(size)], preset.tokens, repeat)
        for n, size in enumerate(sizes)
    ]
    return Block(f"batches of {', '.join(map(str, sizes))}", rounds)


def _context(rows: Sequence[Row], preset: Preset, repeat: int) -> Block:
    rounds = [
        _round(rows, n, "context", str(size), [f"context-{size}"], preset.tokens, repeat)
        for n, size in enumerate(preset.contexts)
    ]
    return Block(f"contexts of {', '.join(map(str, preset.contexts))} tokens", rounds)


def _sampled(rows: Sequence[Row], preset: Preset, number: int) -> Block:
    rounds = [
        _round(rows, place, "sampled", category, [of_category(category)[number].id], preset.tokens, 0, 1.0)
        for place, category in enumerate(categories())
    ]
    return Block("sampling at T=1", rounds, slow_rows_rest=True)


def _warm(rows: Sequence[Row], preset: Preset) -> Block:
    """The same prompt again, nothing forgotten; only rows whose engine could remember."""
    remembering = [row for row in rows if not row.plain]
    rounds = [
        _round(remembering, place, "warm", category, [of_category(category)[0].id], preset.tokens, 0)
        for place, category in enumerate(categories())
    ]
    return Block("the same prompts again, warm", rounds, slow_rows_rest=True)
