"""The terminal: consoles, the colours of tokens, and one way of printing errors, warnings and JSON."""

from __future__ import annotations

import io
import json
import logging
import math
import os
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.text import Text

if TYPE_CHECKING:
    from foredraft.engine.result import StreamDelta

KIND_STYLES = {"plain": "", "accepted": "green", "correction": "bold red", "bonus": "underline cyan"}
"""Attributes besides colour keep the kinds apart where NO_COLOR is set; accepted tokens are the many."""

KIND_MEANINGS = {
    "plain": "no draft",
    "accepted": "accepted draft",
    "correction": "correction",
    "bonus": "bonus token",
}


class _Stdout(Console):
    def on_broken_pipe(self) -> None:
        """Leaves the decision to the command line's one place for errors; rich would exit with code 1 here."""
        raise BrokenPipeError


def stdout(force_terminal: bool | None = None) -> Console:
    return _Stdout(highlight=False, force_terminal=force_terminal)


def stderr() -> Console:
    return Console(stderr=True, highlight=False)


def one_line(text: str) -> str:
    return " ".join(text.split())


def _print_line(console: Console, line: Text) -> None:
    """One line: a terminal may break it between words, a pipe or a log gets it whole."""
    console.print(line, soft_wrap=not console.is_terminal)


def print_error(message: str) -> None:
    _print_line(stderr(), Text.assemble(("error:", "bold red"), " ", one_line(message)))


_held: list[str] | None = None


def print_warning(message: str) -> None:
    """One line on stderr; inside :func:`warnings_held`, after the text that is being streamed."""
    if _held is not None:
        _held.append(message)
    else:
        _print_line(stderr(), Text.assemble(("warning:", "yellow"), " ", one_line(message)))


@contextmanager
def warnings_held() -> Iterator[None]:
    """Keeps warnings back until the end of the block, so that they do not stand in the middle of a sentence."""
    global _held
    held: list[str] = []
    _held = held
    try:
        yield
    finally:
        _held = None
        for message in held:
            print_warning(message)


def print_plain(text: str) -> None:
    """Text as it is, without wrapping or markup."""
    stdout().print(Text(text), soft_wrap=True)


def print_note(message: str) -> None:
    """A dim line on stderr for people; nothing where stderr is not a terminal."""
    console = stderr()
    if console.is_terminal:
        _print_line(console, Text(message, style="dim"))


class _LogLines(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        print_warning(record.getMessage())


def warnings_as_lines() -> None:
    """Python's warnings and foredraft's log become one line each, without a file name or source line."""

    def show(message: Warning | str, *_args: Any, **_kwargs: Any) -> None:
        print_warning(str(message))

    warnings.showwarning = show
    log = logging.getLogger("foredraft")
    if not any(isinstance(handler, _LogLines) for handler in log.handlers):
        log.addHandler(_LogLines(logging.WARNING))


def _jsonable(value: Any) -> Any:
    """JSON has no NaN and no infinity; they become null."""
    if isinstance(value, dict):
        return {str(key): _jsonable(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_jsonable(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def print_json(value: Any) -> None:
    """One object on stdout: indented for a person, on one line for a pipe."""
    ascii_only = (sys.stdout.encoding or "ascii").lower().replace("-", "") != "utf8"
    text = json.dumps(_jsonable(value), ensure_ascii=ascii_only, indent=2 if sys.stdout.isatty() else None, default=str)
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def print_indented(
    console: Console, text: str | Text, *, label: str | Text = "", style: str = "", indent: int = 4
) -> None:
    """A paragraph set in by ``indent`` columns; a label stands before it and its further lines hang under the text."""
    body = Text(text, style=style) if isinstance(text, str) else text
    head = Text(" " * indent) + (Text(label, style="dim") if isinstance(label, str) else label)
    for line in body.wrap(console, max(console.width - head.cell_len, 20)):
        line.rstrip()
        console.print(head + line, soft_wrap=True)
        head = Text(" " * head.cell_len)


def never_fail_to_print() -> None:
    """Characters that the terminal's encoding lacks become question marks; a closed stream is an empty one."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:  # started with "<&-" or from a service
            setattr(sys, name, open(os.devnull, mode))  # noqa: SIM115
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")


def silence_stdout() -> None:
    """After a broken pipe: what is still buffered goes nowhere instead of raising again at exit."""
    try:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except (OSError, ValueError):  # stdout is not a real file, as under a test runner
        return


def visible(text: str) -> str:
    """Text that cannot steer the terminal: control characters, except newline and tab, become visible symbols."""
    if text.isprintable():
        return text
    return "".join(
        chr(0x2400 + ord(char)) if char < " " and char not in "\n\t" else "␡" if "\x7f" <= char < "\xa0" else char
        for char in text
    )


def legend() -> Text:
    line = Text("tokens: ", style="dim")
    for number, (kind, meaning) in enumerate(KIND_MEANINGS.items()):
        line.append("  ·  " if number else "", style="dim")
        line.append(meaning, style=KIND_STYLES[kind])
    return line


class TokenPrinter:
    """Streams deltas: tokens in colour on a terminal, the bare text everywhere else.

    Args:
        colour: True or False; None decides by whether stdout is a terminal.
    """

    def __init__(self, colour: bool | None = None) -> None:
        self.console = stdout(force_terminal=True if colour else None)
        self.colour = self.console.is_terminal if colour is None else colour
        self.at_line_start = True

    def __call__(self, delta: StreamDelta) -> None:
        if delta.text:
            self.at_line_start = delta.text.endswith("\n")
        if self.colour:
            pieces = [(visible(token.text), KIND_STYLES[token.kind]) for token in delta.tokens]
            # The last delta may release text that waited for a stop string: it belongs to no token of this step.
            pieces.append((visible(delta.text[sum(len(token.text) for token in delta.tokens) :]), ""))
            self.console.print(Text.assemble(*pieces), end="", soft_wrap=True)
        else:
            sys.stdout.write(visible(delta.text) if sys.stdout.isatty() else delta.text)
        sys.stdout.flush()

    def end_line(self) -> None:
        if not self.at_line_start:
            sys.stdout.write("\n")
            sys.stdout.flush()
        self.at_line_start = True
