"""The look of ``--help``: plain columns that fit narrow terminals and never cut an option's name short."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from rich.console import Console
from rich.text import Text
from typer.core import TyperCommand, TyperGroup

from foredraft.cli.console import print_indented

WIDEST = 100
"""Longer lines are hard to read."""
INDENT = 2
COLUMN = 28
"""Where descriptions start; a longer name puts its description on the next line."""


def _entry(console: Console, head: Text, body: str, note: str = "") -> None:
    text = Text(body)
    if note:
        text.append(f" [{note}]", style="dim")
    first = Text(" " * INDENT) + head
    if first.cell_len + 2 > COLUMN:
        console.print(first, soft_wrap=True)
        first = Text()
    first.pad_right(COLUMN - first.cell_len)
    for line in text.wrap(console, max(console.width - COLUMN, 20)):
        line.rstrip()
        console.print(first + line, soft_wrap=True)
        first = Text(" " * COLUMN)


def _head(parameter: Any) -> Text:
    """``-h, --help`` or ``--top-k N`` or ``--[no-]include-stop`` or ``PROMPT``."""
    if parameter.param_type_name == "argument":
        return Text(parameter.metavar or parameter.name.upper(), style="cyan")
    names = sorted(parameter.opts, key=len)
    if parameter.secondary_opts:
        names = [f"--[no-]{names[0][2:]}"]
    head = Text(", ").join(Text(name, style="cyan") for name in names)
    return head + Text(f" {parameter.metavar}", style="yellow") if parameter.metavar else head


def _default(parameter: Any) -> str:
    if parameter.param_type_name == "option" and parameter.required:
        return "required"
    shown = getattr(parameter, "show_default", None)
    if isinstance(shown, str):
        return f"default: {shown}"
    ordinary = isinstance(parameter.default, str | int | float) and not isinstance(parameter.default, bool)
    return f"default: {parameter.default}" if shown and ordinary else ""


def _section(console: Console, title: str, parameters: Iterable[Any]) -> None:
    console.print(f"\n[bold]{title}[/]")
    for parameter in parameters:
        _entry(console, _head(parameter), getattr(parameter, "help", None) or "", _default(parameter))


def render(command: Any, ctx: Any) -> str:
    """The whole help text, with colours if stdout shows them."""
    console = Console(highlight=False)
    console.width = min(console.width, WIDEST)
    shown = [parameter for parameter in command.get_params(ctx) if not getattr(parameter, "hidden", False)]
    arguments = [p for p in shown if p.param_type_name == "argument"]
    panels: dict[str, list[Any]] = {}
    for parameter in shown:
        if parameter not in arguments:
            panels.setdefault(getattr(parameter, "rich_help_panel", None) or "Options", []).append(parameter)
    commands = getattr(command, "commands", {})
    pieces = [str(_head(p)) if p.required else f"[{_head(p)}]" for p in arguments]
    pieces += ["COMMAND …"] if commands else []
    with console.capture() as capture:
        console.print(Text.assemble(("Usage: ", "bold"), " ".join([ctx.command_path, "[OPTIONS]", *pieces])))
        console.print()
        print_indented(console, (command.help or "").strip(), indent=0)
        if commands:
            console.print("\n[bold]Commands[/]")
            for name, sub in commands.items():
                _entry(console, Text(name, style="cyan"), (sub.help or "").strip())
        if arguments:
            _section(console, "Arguments", arguments)
        for title, parameters in panels.items():
            _section(console, title, parameters)
    return capture.get()


class Command(TyperCommand):
    """A command with our help."""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        formatter.write(render(self, ctx))


class Group(TyperGroup):
    """A group with our help."""

    command_class = Command

    def format_help(self, ctx: Any, formatter: Any) -> None:
        formatter.write(render(self, ctx))
