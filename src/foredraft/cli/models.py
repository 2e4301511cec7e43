"""``foredraft models``: which models come as packages, which are here, and fetching one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn
from rich.text import Text

from foredraft.cli.console import print_indented, print_json, stderr, stdout
from foredraft.cli.help import Command, Group
from foredraft.cli.session import JsonOption

if TYPE_CHECKING:
    from foredraft.models.catalog import Entry, Status
    from foredraft.models.catalog_fetch import FetchProgress, ProgressCallback

app = typer.Typer(
    cls=Group, help="List the models that can be had without a hub, or fetch one.", invoke_without_command=True
)


def describe(entry: Entry, status: Status) -> dict[str, Any]:
    """One model as plain data."""
    return {
        "name": entry.name,
        "aliases": list(entry.aliases),
        "installed": status.installed,
        "path": str(status.path) if status.path else None,
        "origin": status.origin,
        "bytes": entry.nbytes,
        "sha256": entry.sha256,
        "licence": entry.licence,
        "source": entry.source,
        "packages": list(entry.packages),
        "shape": entry.shape,
        "purpose": entry.purpose,
    }


@app.callback()
def models(ctx: typer.Context, json: JsonOption = False) -> None:
    """List the models that can be had without a hub: size, licence, origin, and whether each is here."""
    if ctx.invoked_subcommand is not None:
        return
    from foredraft.models import catalog

    found = [(entry, catalog.status(entry)) for entry in catalog.entries()]
    if json:
        listing = [describe(entry, status) for entry, status in found]
        print_json({"default": catalog.DEFAULT_MODEL, "folder": str(catalog.cache_dir()), "models": listing})
        return
    console = stdout()
    for entry, status in found:
        head = Text.assemble((f"{entry.name:<20}", "bold"), f"{entry.nbytes / 1e6:>7,.0f} MB  ")
        head.append(
            f"✓ {status.origin:<9}" if status.installed else "– not here ", "green" if status.installed else "dim"
        )
        head.append(entry.licence.partition(" (")[0])
        console.print(head)
        print_indented(console, entry.purpose)
        print_indented(console, entry.source, style="dim")
        console.print()
    console.print(
        Text(
            f"Get one with: foredraft models fetch NAME. It is kept in {catalog.cache_dir()}.\n"
            "--target also takes a folder with safetensors, a .gguf file or a hub id.",
            style="dim",
        )
    )


@app.command(cls=Command)
def fetch(
    name: Annotated[str, typer.Argument(help="A model of 'foredraft models'.")], json: JsonOption = False
) -> None:
    """Download a model, check its hash, and keep it for --target NAME. Goes on where an earlier try stopped."""
    from foredraft.models import catalog

    path = fetch_with_bar(name)
    if json:
        entry = catalog.find(name)
        assert entry is not None
        print_json(describe(entry, catalog.status(entry)))
    else:
        stdout().print(f"[green]✓[/] {path}", soft_wrap=True)


def fetch_with_bar(name: str) -> Path:
    """Fetches a model of the catalogue with a progress bar on stderr; returns at once if it is here."""
    from foredraft.models import catalog

    with bar() as tell:
        return catalog.fetch(name, tell)


@contextmanager
def bar() -> Iterator[ProgressCallback]:
    """A download bar; where stderr is no terminal, one line a stage instead."""
    console = stderr()
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("", total=None)
        said = ""

        def tell(at: FetchProgress) -> None:
            nonlocal said
            part = f"{at.package} ({at.part} of {at.parts})" if at.parts > 1 else at.package
            words = {"assemble": "joining and checking", "done": "done", "kept": f"{part}, kept from an earlier try"}
            text = words.get(at.stage, part)
            progress.update(task, total=at.bytes_total, completed=at.bytes_done, description=text)
            if progress.disable and text != said:
                console.print(Text(text), soft_wrap=True)
            said = text

        yield tell
