"""What the demo found, as rows, tables and plain words."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rich.table import Table
from rich.text import Text

from foredraft.cli.console import stdout
from foredraft.cli.stats import Tally, number

if TYPE_CHECKING:
    from foredraft.engine.result import Result


@dataclass(frozen=True, slots=True)
class Run:
    """One decoding of one prompt.

    Attributes:
        seconds: Time inside the engine from the first token to the last.
        timed_tokens: Tokens written in that time.
    """

    result: Result
    seconds: float
    timed_tokens: int

    def and_again(self, other: Run) -> Run:
        """The first result, timed over both runs."""
        return Run(self.result, self.seconds + other.seconds, self.timed_tokens + other.timed_tokens)

    @property
    def rate(self) -> float | None:
        return self.timed_tokens / self.seconds if self.timed_tokens and self.seconds > 0 else None


@dataclass(slots=True)
class Row:
    """One prompt, both ways.

    Attributes:
        gap: Top-2 logit gap of the target where the texts part; None while they do not.
    """

    name: str
    plain: Run
    speculative: Run
    gap: float | None = None

    @property
    def first_difference(self) -> int | None:
        """Index of the first token that differs; None if the outputs are the same."""
        ours, theirs = self.plain.result.token_ids, self.speculative.result.token_ids
        if ours == theirs:
            return None
        pairs = zip(ours, theirs, strict=False)
        return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(ours), len(theirs)))

    @property
    def speed_up(self) -> float | None:
        return ratio(self.speculative.rate, self.plain.rate)

    @property
    def too_fast(self) -> bool:
        """Whether the speed-up is over 10 % more than is possible: no target call costs less than a plain one."""
        tally = Tally([self.speculative.result])
        return self.speed_up is not None and tally.calls > 0 and self.speed_up > 1.1 * tally.tokens / tally.calls

    def to_dict(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "same_text": self.first_difference is None,
            "first_difference": self.first_difference,
            "top2_logit_gap": self.gap,
            "prompt_tokens": self.plain.result.usage.prompt_tokens,
            "plain": {"tokens": self.plain.result.usage.completion_tokens, "tokens_per_second": self.plain.rate},
            "speculative": Tally([self.speculative.result]).to_dict() | {"tokens_per_second": self.speculative.rate},
            "speed_up": self.speed_up,
        }


def ratio(ours: float | None, theirs: float | None) -> float | None:
    return ours / theirs if ours is not None and theirs else None


def pooled(runs: Sequence[Run]) -> Run:
    """Times and tokens summed; the result is the last one's and stands for nothing."""
    return Run(runs[-1].result, sum(run.seconds for run in runs), sum(run.timed_tokens for run in runs))


def total_of(rows: Sequence[Row]) -> dict[str, Any]:
    """All prompts pooled: rates are sums of tokens over sums of time."""
    plain, speculative = pooled([row.plain for row in rows]), pooled([row.speculative for row in rows])
    return {
        "same_text": all(row.first_difference is None for row in rows),
        "plain": {"tokens_per_second": plain.rate},
        "speculative": Tally([row.speculative.result for row in rows]).to_dict()
        | {"tokens_per_second": speculative.rate},
        "speed_up": ratio(speculative.rate, plain.rate),
    }


def coloured(speed_up: float | None) -> Text:
    style = "" if speed_up is None else "bold green" if speed_up >= 1.05 else "bold red" if speed_up < 0.95 else "bold"
    return Text(number(speed_up, 2, "x"), style=style)


def verdict(row: Row) -> Text:
    """The line under one prompt's text."""
    line = Text(
        f"plain {number(row.plain.rate, 1)} tok/s · speculative {number(row.speculative.rate, 1)} tok/s · ", style="dim"
    )
    line.append_text(coloured(row.speed_up))
    return line.append(
        " · same text\n" if row.first_difference is None else " · different text, see the table\n", "dim"
    )


def print_tables(rows: Sequence[Row], rounds: int, wall_s: float) -> None:
    """Speed and acceptance, one row a prompt, and what to make of it."""
    console, total = stdout(), total_of(rows)
    tallies = [(row.name, Tally([row.speculative.result])) for row in rows]
    everything = Tally([row.speculative.result for row in rows])
    narrow = console.width < 76
    gap = 1 if narrow else 2
    speeds = Table(box=None, pad_edge=False, padding=(0, gap, 0, 0), header_style="bold", show_footer=True)
    speeds.add_column("\nprompt", footer="all", no_wrap=True)
    same = sum(row.first_difference is None for row in rows)
    columns: dict[str, str | Text] = {
        "same\ntext": f"{same}/{len(rows)}",
        "plain\ntok/s": number(total["plain"]["tokens_per_second"], 1),
        "spec.\ntok/s": number(total["speculative"]["tokens_per_second"], 1),
        "speed\nup": coloured(total["speed_up"]),
        "\nα": number(everything.alpha),
        "\nτ": number(everything.tau),
        "calls\nsaved": str(everything.calls_saved),
        "target\ncalls": str(everything.calls),
    }
    if narrow:
        del columns["target\ncalls"]
    for heading, footer in columns.items():
        speeds.add_column(heading, footer=footer, justify="right", no_wrap=True)
    for row, (_, tally) in zip(rows, tallies, strict=True):
        same_text = Text("yes", "green") if row.first_difference is None else Text("no", "bold red")
        rates = (number(row.plain.rate, 1), number(row.speculative.rate, 1))
        figures = (number(tally.alpha), number(tally.tau), str(tally.calls_saved), str(tally.calls))
        speeds.add_row(row.name, same_text, *rates, coloured(row.speed_up), *figures[: 3 if narrow else 4])
    console.print(speeds)
    console.print()
    _print_positions([*tallies, ("all", everything)])
    for remark in remarks(rows):
        console.print(Text(remark, style="yellow"))
    console.print(
        Text(
            "α: accepted / drafted tokens. τ: tokens a drafting step, bonus token included. Rates count from the first "
            f"token on; each way was measured {'twice' if rounds == 2 else 'once'}. Done in {wall_s:.0f} s.",
            style="dim",
        )
    )


def _print_positions(tallies: Sequence[tuple[str, Tally]]) -> None:
    """Acceptance by position in per cent of the steps that drafted; as many positions as the terminal is wide."""
    console = stdout()
    drafted = max((len(tally.by_position) for _, tally in tallies), default=0)
    width = min(drafted, max((console.width - 15) // 4, 1))
    if not width:
        return
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0), header_style="bold")
    table.add_column("% accepted\nat position")
    for position in range(1, width + 1):
        table.add_column(f"\n{position}", justify="right", min_width=3)
    for name, tally in tallies:
        table.add_row(name, *(f"{100 * share:.0f}" for share in tally.by_position[:width]))
    console.print(table)
    console.print()


NEAR_TIE = 0.1
"""Logits closer than this may swap places when a pass over several rows rounds differently from a pass over one."""


def remarks(rows: Sequence[Row]) -> list[str]:
    """What the reader should know before believing the figures; empty if all is as it should be."""
    said = []
    for row in rows:
        if row.first_difference is not None:
            tie = row.gap is not None and row.gap < NEAR_TIE
            said.append(
                f"{row.name}: the texts part at token {row.first_difference + 1}, "
                f"where the two likeliest logits differ by {number(row.gap, 4)}: "
                + ("a near-tie, decided by rounding; --dtype float32 makes these rare." if tie else "please report it.")
            )
    slower = [f"{row.name} ({row.speed_up:.2f}x)" for row in rows if row.speed_up is not None and row.speed_up < 0.95]
    if slower:
        said.append(f"Speculation was slower here: {', '.join(slower)}.")
    noisy = [row.name for row in rows if row.too_fast]
    if noisy:
        said.append(
            f"The machine's speed changed meanwhile: the speed-up of {', '.join(noisy)} is more than the saved target "
            "calls allow. Run it again when nothing else runs."
        )
    return said
