"""``foredraft metrics``: acceptance of a running server, vLLM's or our own, in one set of names."""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING, Annotated

import typer

from foredraft.cli.console import print_json, print_plain
from foredraft.cli.session import JsonOption, spinner
from foredraft.cli.stats import number

if TYPE_CHECKING:
    from foredraft.bench.counters import Acceptance

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
    from foredraft.bench.counters import Acceptance, fetch

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
    for name, each in found.items():
        print_plain(_line(name, each))


def _line(name: str, each: Acceptance) -> str:
    """Such as ``smollm2-135m: α 0.61, τ 2.83, 61 of 100 drafted tokens accepted in 33 steps, by position 0.8 0.6``."""
    counts = each.counts
    if counts["num_draft_tokens"]:
        parts = [
            f"α {number(each.alpha)}",
            f"τ {number(each.tau)}",
            f"{counts['num_accepted_draft_tokens']} of {counts['num_draft_tokens']} drafted tokens accepted in "
            f"{counts['num_spec_steps']} steps",
            "by position " + " ".join(f"{rate:.2f}" for rate in each.rates),
        ]
    else:
        parts = ["nothing drafted"]
    parts += [f"{level} {word}" for word, level in each.levels.items()]
    return f"{name}: {', '.join(parts)}"
