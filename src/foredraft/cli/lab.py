"""``foredraft lab``: studies that reproduce published figures from scratch."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from pydantic import BaseModel
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from foredraft.cli.console import print_json, print_plain, stderr
from foredraft.cli.help import Command, Group
from foredraft.cli.session import JsonOption
from foredraft.errors import ConfigError

app = typer.Typer(
    cls=Group, help="Studies of speculative decoding, from scratch on this machine.", invoke_without_command=True
)


@app.callback()
def lab(ctx: typer.Context) -> None:
    """Studies of speculative decoding, from scratch on this machine."""
    if ctx.invoked_subcommand is None:
        typer.echo(ctx.get_help())


class Bars:
    """Shows a study's stages as one bar each; :class:`foredraft.lab.progress.Progress`."""

    def __init__(self, progress: Progress) -> None:
        self.progress = progress
        self.task: TaskID | None = None

    def stage(self, title: str, total: int) -> None:
        self.end_stage()
        self.task = self.progress.add_task(title, total=total, note="")
        if self.progress.disable:  # no terminal: a log reader still wants to see where it is
            stderr().print(f"{title} …", markup=False)

    def end_stage(self) -> None:
        if self.task is not None:
            total = self.progress.tasks[-1].total
            self.progress.update(self.task, completed=total or 0)

    def advance(self, amount: int = 1, note: str = "") -> None:
        if self.task is not None:
            self.progress.update(self.task, advance=amount, note=note)


@contextmanager
def bars() -> Iterator[Bars]:
    columns = (
        TextColumn("{task.description}"),
        BarColumn(bar_width=16),
        MofNCompleteColumn(),
        TimeRemainingColumn(elapsed_when_finished=True),
        TextColumn("[dim]{task.fields[note]}"),
    )
    console = stderr()
    with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
        shown = Bars(progress)
        yield shown
        shown.end_stage()


def _out(default: str) -> Any:
    return typer.Option("--out", metavar="DIR", help="Folder for the page and the figures.", show_default=default)


CorpusOption = Annotated[
    str, typer.Option("--corpus", metavar="NAME|PATH", help="english, korean, or a UTF-8 text file.")
]
SeedOption = Annotated[int, typer.Option("--seed", metavar="N", help="Of training, positions and draws.")]
RetrainOption = Annotated[bool, typer.Option("--retrain", help="Train again, even if the models are cached.")]
QuickOption = Annotated[bool, typer.Option("--quick", help="A toy version in seconds: shows that all runs.")]


def _check(out: Path, seed: int) -> None:
    if seed < 0:
        raise ConfigError(f"must be 0 or more (got {seed})", field="seed")
    if out.exists() and not out.is_dir():
        raise ConfigError(f"{out} is a file", field="out", remedy="name a folder")


def _tell(result: BaseModel, summary: str, html: Path, figures: Path, json: bool) -> None:
    if json:
        print_json(result.model_dump(mode="json") | {"html": str(html)})
        return
    print_plain(summary)
    print_plain(f"\npage     {html}\nfigures  {figures}")


@app.command(cls=Command)
def article(
    out: Annotated[Path, _out("out/article")] = Path("out/article"),
    corpus: CorpusOption = "english",
    seed: SeedOption = 0,
    retrain: RetrainOption = False,
    quick: QuickOption = False,
    json: JsonOption = False,
) -> None:
    """Reproduce the founding study: acceptance, speed and exactness of two character models trained here."""
    _check(out, seed)
    from foredraft.lab.article import run_article

    with bars() as progress:
        report = run_article(out, corpus=corpus, seed=seed, retrain=retrain, quick=quick, progress=progress)
    _tell(report.article, report.summary, report.html_path, report.json_path, json)


@app.command(cls=Command)
def t5(
    out: Annotated[Path, _out("out/t5")] = Path("out/t5"),
    corpus: CorpusOption = "english",
    seed: SeedOption = 0,
    retrain: RetrainOption = False,
    quick: QuickOption = False,
    json: JsonOption = False,
) -> None:
    """Study encoder-decoder models: the shape of the founding paper's table, from small T5s trained here."""
    _check(out, seed)
    from foredraft.lab.t5 import run_t5

    with bars() as progress:
        report = run_t5(out, corpus=corpus, seed=seed, retrain=retrain, quick=quick, progress=progress)
    _tell(report.result, report.summary, report.html_path, report.json_path, json)


@app.command(cls=Command)
def moe(
    out: Annotated[Path, _out("out/moe")] = Path("out/moe"),
    seed: SeedOption = 0,
    quick: QuickOption = False,
    json: JsonOption = False,
) -> None:
    """Study mixtures of experts: how many experts a draft touches, what that costs, and when drafting still pays."""
    _check(out, seed)
    from foredraft.lab.moe import run_moe

    with bars() as progress:
        report = run_moe(out, seed=seed, quick=quick, progress=progress)
    _tell(report.result, report.summary, report.html_path, report.json_path, json)


@app.command(cls=Command)
def load(
    out: Annotated[Path, _out("out/load")] = Path("out/load"),
    seed: SeedOption = 0,
    quick: QuickOption = False,
    json: JsonOption = False,
) -> None:
    """Study draft lengths under load: fixed, by request, by batch before drafting and after, for batches of 1 to 32."""
    _check(out, seed)
    from foredraft.lab.load import run_load

    with bars() as progress:
        report = run_load(out, seed=seed, quick=quick, progress=progress)
    _tell(report.result, report.summary, report.html_path, report.json_path, json)
