"""``foredraft drafters``: what can write a draft, what each needs, and how it is asked for."""

from __future__ import annotations

from dataclasses import asdict

from rich.text import Text

from foredraft.cli.console import print_indented, print_json, stdout
from foredraft.cli.session import DEFAULT_DRAFTER, DEFAULT_SHOWN, JsonOption


def drafters(json: JsonOption = False) -> None:
    """List the registered drafters, what each needs, and what may follow its name."""
    from foredraft.drafters.registry import entries

    found = entries()
    if json:
        print_json({"default": DEFAULT_DRAFTER, "drafters": [asdict(entry) for entry in found]})
        return
    console = stdout()
    for entry in found:
        console.print(Text.assemble((entry.name, "bold green"), (":ARG" if entry.argument else "", "green")))
        print_indented(console, entry.summary)
        print_indented(console, entry.needs, label="needs     ")
        print_indented(console, entry.argument or "none", label="argument  ")
        console.print()
    console.print(Text(f"Use one with --drafter NAME or --drafter NAME:ARG. Default: {DEFAULT_SHOWN}.", style="dim"))
