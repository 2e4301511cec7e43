"""``foredraft metrics``: acceptance of a running server, vLLM's or our own, in one set of names."""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table

from foredraft.cli.console import print_json, stdout
from foredraft.cli.session import JsonOption, spinner
from foredraft.cli.stats import number

if TYPE_CHECKING:
    from foredraft.scaleout.figures import Acceptance

KEY = "FOREDRAFT_API_KEY"
"""Variable with the key of a server whose ``/metrics`` wants one."""


def metrics(
    url: Annotated[str, typer.Option("--url", metavar="URL", help="Address of a server of foredraft or vLLM.")],
    over: Annotated[
        float | None,
        typer.Option(
            "--over", metavar="SECONDS", min=0.0, help="Wait so long and show what happened in that time only."
        ),
    ] = None,
    json: JsonOption = False,
) -> None:
    """Show how often drafts are accepted on a running server: vLLM's or foredraft's, with the same names."""
    from foredraft.scaleout.figures import Acceptance, fetch

    found = fetch(url, os.environ.get(KEY))
    if over is not None:
        before = found
        with spinner(f"watching {url} for {over:g} s …"):
            time.sleep(over)
        found = {
            name: after.since(before.get(name, Acceptance())) for name, after in fetch(url, os.environ.get(KEY)).items()
        }
    if json:
        print_json({"url": url, "seconds": over, "models": {name: each.to_dict() for name, each in found.items()}})
        return
    stdout().print(_table(found))


def _table(found: dict[str, Acceptance]) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column("model")
    for heading in ("α", "τ", "steps", "drafted", "accepted", "running"):
        table.add_column(heading, justify="right")
    table.add_column("accepted by position")
    for name, each in found.items():
        counts = each.counts
        table.add_row(
            name,
            number(each.alpha),
            number(each.tau),
            *(f"{counts[key]}" for key in ("num_spec_steps", "num_draft_tokens", "num_accepted_draft_tokens")),
            str(each.levels["running"]) if "running" in each.levels else "–",
            " ".join(f"{rate:.2f}" for rate in each.rates) or "–",
        )
    return table
