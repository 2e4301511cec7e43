"""``foredraft demo``: a few real prompts, decoded plainly and speculatively, side by side."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.rule import Rule
from rich.text import Text

from foredraft.cli import session
from foredraft.cli.console import TokenPrinter, legend, print_json, print_warning, stderr, stdout, warnings_held
from foredraft.cli.demo_prompts import PROMPTS, DemoPrompt
from foredraft.cli.demo_table import Row, Run, print_tables, total_of, verdict
from foredraft.cli.models import fetch_with_bar
from foredraft.cli.options import Given, build, schema_options
from foredraft.config import SamplingParams

if TYPE_CHECKING:
    from foredraft.engine.engine import Engine
    from foredraft.engine.result import StreamDelta

TOKENS = 128
BUDGET_S = 110.0
"""Seconds that the first pass over the prompts may take, even if no draft is ever accepted."""
ENOUGH_S = 50.0
"""A demo that has taken longer than this does not measure a second time."""

OnDelta = Callable[["StreamDelta"], None]


@dataclass(frozen=True)
class Pair:
    """Two engines over one model; ``plain`` never drafts. Neither keeps a cache from one prompt for the next."""

    plain: Engine
    speculative: Engine

    def prompt_ids(self, prompt: DemoPrompt) -> list[int]:
        """The prompt in the model's chat template; as it is for a model without one."""
        tokenizer = session.tokenizer_of(self.plain)
        if tokenizer.has_chat_template:
            return tokenizer.chat([{"role": "user", "content": prompt.text}])
        return tokenizer.encode(prompt.text)


def open_pair(target: str, drafter: str, given: Given) -> Pair:
    from foredraft.models import catalog

    if catalog.find(target):
        fetch_with_bar(target)
    plain = session.open_engine(target, None, given, prefix_reuse=False)
    from foredraft.models.info import LoadedModel

    assert plain.target_info is not None  # a target given by name always has one
    model = LoadedModel(plain.target, plain.tokenizer, plain.target_info)
    return Pair(plain, session.open_engine(model, drafter, given, prefix_reuse=False))


def timed(engine: Engine, ids: list[int], params: SamplingParams, show: OnDelta) -> Run:
    """Decodes one prompt, cold: what a drafter kept of earlier answers would make a repeated prompt look quick.

    Only time inside the engine counts, from the first token on: showing a token is free.
    """
    engine.reset()
    stream, seconds, first, result = iter(engine.stream(ids, params)), 0.0, 0, None
    while result is None:
        began = time.perf_counter()
        delta = next(stream)
        if first:
            seconds += time.perf_counter() - began
        first = first or len(delta.tokens)
        show(delta)
        result = delta.result
    if result.error:
        raise result.error
    return Run(result, seconds, result.usage.completion_tokens - first)


@contextmanager
def token_bar(label: str, total: int) -> Iterator[OnDelta]:
    """A bar that counts tokens and is gone when full."""
    columns = (TextColumn("[dim]{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("[dim]tokens"))
    with Progress(*columns, console=stderr(), transient=True, disable=not stderr().is_terminal) as progress:
        task = progress.add_task(label, total=total)
        yield lambda delta: progress.advance(task, len(delta.tokens))


def warm_up(engines: Pair) -> float:
    """Decodes a little both ways, so that nothing happens for the first time later; returns plain tokens a second."""
    params = SamplingParams(max_tokens=8, ignore_eos=True)
    ids = engines.prompt_ids(PROMPTS[0])
    engines.speculative.generate([ids], params)
    run = timed(engines.plain, ids, params, lambda delta: None)
    return run.rate or float("inf")


def affordable(rate: float) -> int:
    """Tokens a prompt that both ways can write in about ``BUDGET_S`` on this machine."""
    return max(16, int(min(TOKENS, BUDGET_S * rate / (2 * len(PROMPTS)))))


def compare(engines: Pair, prompt: DemoPrompt, params: SamplingParams, *, plain_first: bool, quiet: bool) -> Row:
    """Decodes one prompt both ways and looks for the first token that differs."""
    ids, console = engines.prompt_ids(prompt), stdout()
    limit = params.max_tokens or 0

    def plain() -> Run:
        with token_bar("plain decoding", limit) as advance:
            return timed(engines.plain, ids, params, advance)

    def speculative() -> Run:
        if quiet:
            with token_bar("speculative decoding", limit) as advance:
                return timed(engines.speculative, ids, params, advance)
        printer = TokenPrinter()
        try:
            return timed(engines.speculative, ids, params, printer)
        finally:
            printer.end_line()

    if not quiet:
        console.print(Rule(f"[bold]{prompt.name}[/]", align="left", style="dim"))
        console.print(Text(prompt.text.partition("\n")[0], style="dim italic"))
    with warnings_held():
        runs = {way.__name__: way() for way in ((plain, speculative) if plain_first else (speculative, plain))}
    row = Row(prompt.name, runs["plain"], runs["speculative"])
    if row.first_difference is not None:
        row.gap = top2_gap(engines.plain, ids + runs["plain"].result.token_ids[: row.first_difference])
    if not quiet:
        console.print(verdict(row))
    return row


def again(engines: Pair, params: SamplingParams, rows: list[Row]) -> None:
    """Measures every prompt once more, the other way round first; the rates then stand on both measurements."""
    limit = 2 * len(rows) * (params.max_tokens or 0)
    with token_bar("measuring again", limit) as advance, warnings_held():
        for number, (prompt, row) in enumerate(zip(PROMPTS, rows, strict=True)):
            ids = engines.prompt_ids(prompt)
            ways = ("speculative", "plain") if number % 2 == 0 else ("plain", "speculative")
            for way in ways:
                run = timed(getattr(engines, way), ids, params, advance)
                setattr(row, way, getattr(row, way).and_again(run))


def top2_gap(engine: Engine, ids: list[int]) -> float:
    """By how much the likeliest next token's logit exceeds the second's: a near-tie explains a difference."""
    [result] = engine.generate(ids, SamplingParams(max_tokens=1, logprobs=2))
    assert result.logprobs is not None
    (_, best), (_, second) = result.logprobs[0].top
    return best - second


@schema_options(session.PANELS, skip=("prefix_reuse",))
def demo(
    target: session.TargetOption = session.DEFAULT_TARGET,
    drafter: session.DrafterOption = None,
    max_tokens: Annotated[
        int | None,
        typer.Option(
            "--max-tokens",
            metavar="N",
            min=2,
            help="Most tokens to write for each prompt.",
            show_default=f"{TOKENS}, fewer on a slow machine",
        ),
    ] = None,
    json: session.JsonOption = False,
    *,
    given: Given,
) -> None:
    """Decode a few prompts greedily, plainly and with drafts, and compare text and speed."""
    build(session.EngineOptions, given)
    began = time.perf_counter()
    name = drafter or session.usual_drafter(target)
    engines = open_pair(target, name, given)
    with session.spinner("warming up …"):
        rate = warm_up(engines)
    if max_tokens is None:
        max_tokens = affordable(rate)
        if max_tokens < TOKENS:
            print_warning(
                f"plain decoding runs at {rate:.1f} tokens a second; writing {max_tokens} a prompt, not {TOKENS}"
            )
    if not json:
        stdout().print(legend())
    params = SamplingParams(max_tokens=max_tokens)
    # Which way goes first alternates, so that a machine that slows down or speeds up favours neither.
    rows = [
        compare(engines, prompt, params, plain_first=number % 2 == 0, quiet=json)
        for number, prompt in enumerate(PROMPTS)
    ]
    rounds = 1
    if time.perf_counter() - began < ENOUGH_S:
        again(engines, params, rows)
        rounds = 2
    spent = time.perf_counter() - began
    if json:
        report: dict[str, Any] = {"target": target, "drafter": name, "prompts": [row.to_dict() for row in rows]}
        from foredraft.machine import provenance

        report |= {"total": total_of(rows), "rounds": rounds, "wall_s": spent, "provenance": provenance()}
        print_json(report)
    else:
        print_tables(rows, rounds, spent)
