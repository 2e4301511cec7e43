"""``foredraft lab``: studies that reproduce published figures from scratch."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from foredraft.cli.console import print_json, print_plain, stderr
from foredraft.cli.help import Command, Group
from foredraft.cli.session import JsonOption
from foredraft.errors import ConfigError

DEFAULT_OUT = Path("out/article")

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


@app.command(cls=Command)
def article(
    out: Annotated[
        Path,
        typer.Option(
            "--out", metavar="DIR", help="Folder for the page and the figures.", show_default=str(DEFAULT_OUT)
        ),
    ] = DEFAULT_OUT,
    corpus: Annotated[
        str, typer.Option("--corpus", metavar="NAME|PATH", help="english, korean, or a UTF-8 text file.")
    ] = "english",
    seed: Annotated[int, typer.Option("--seed", metavar="N", help="Of training, positions and draws.")] = 0,
    retrain: Annotated[bool, typer.Option("--retrain", help="Train again, even if the models are cached.")] = False,
    quick: Annotated[bool, typer.Option("--quick", help="A toy version in seconds: shows that all runs.")] = False,
    json: JsonOption = False,
) -> None:
    """Reproduce the founding study: acceptance, speed and exactness of two character models trained here."""
    if seed < 0:
        raise ConfigError(f"must be 0 or more (got {seed})", field="seed")
    if out.exists() and not out.is_dir():
        raise ConfigError(f"{out} is a file", field="out", remedy="name a folder")
    from foredraft.lab.article import run_article

    with bars() as progress:
        report = run_article(out, corpus=corpus, seed=seed, retrain=retrain, quick=quick, progress=progress)
    if json:
        print_json(report.article.model_dump(mode="json") | {"html": str(report.html_path)})
        return
    print_plain(report.summary)
    print_plain(f"\npage     {report.html_path}\nfigures  {report.json_path}")
