"""The ``foredraft`` command: what is mapped to which exit code, and where the commands live.

Exit codes: 0 done, 2 the user can fix it (one line says how), 1 a bug, 130 interrupted, 141 the reader went away.
"""

from __future__ import annotations

import errno
import os
import sys
import traceback
from collections.abc import Sequence
from typing import Annotated, Any

import typer

from foredraft import __version__
from foredraft.cli import bench, chat, demo, doctor, drafters, export, generate, lab, metrics, models, serve, train
from foredraft.cli.console import (
    never_fail_to_print,
    one_line,
    print_error,
    print_note,
    silence_stdout,
    warnings_as_lines,
)
from foredraft.cli.help import Command, Group
from foredraft.cli.options import flag_name
from foredraft.errors import ForedraftError

DISK_FULL = {errno.ENOSPC, errno.EDQUOT}
EXIT_BUG, EXIT_USER, EXIT_INTERRUPTED, EXIT_PIPE = 1, 2, 130, 141


def describe(error: ForedraftError, options: set[str]) -> str:
    """The error on one line, its field spelled as the option that the user typed, if it is one."""
    text = str(error)
    name, *rest = (error.field or "").split(".")
    if name and flag_name(name) in options:
        # Of pydantic's path inside the value only keys matter to the user, not the branch of a union.
        keys = [part for part in rest if part.lstrip("-").isdigit()]
        text = " ".join([flag_name(name), *keys]) + text.removeprefix(str(error.field))
    return one_line(text)


def known_options(command: Any) -> set[str]:
    own = {name for parameter in command.params for name in parameter.opts}
    return own.union(*map(known_options, getattr(command, "commands", {}).values()))


class ForedraftGroup(Group):
    """The root command; every error of every command ends here."""

    def main(
        self,
        args: Sequence[str] | None = None,
        prog_name: str | None = "foredraft",
        complete_var: str | None = None,
        standalone_mode: bool = True,
        windows_expand_args: bool = True,
        **extra: Any,
    ) -> Any:
        warnings_as_lines()
        never_fail_to_print()
        argv = list(sys.argv[1:] if args is None else args)
        debug = "--debug" in argv  # wherever it stands: people add it to the end of a line that failed
        argv = [argument for argument in argv if argument != "--debug"]
        try:
            code = super().main(argv, prog_name, complete_var, False, windows_expand_args, **extra)
        except typer.Abort:
            code = EXIT_INTERRUPTED
        except Exception as error:
            code = self.report(error, argv, debug)
        if not standalone_mode:
            return code
        sys.exit(code if isinstance(code, int) else 0)

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            print_note("interrupted")
            raise typer.Exit(EXIT_INTERRUPTED) from None
        except BrokenPipeError:
            silence_stdout()
            raise typer.Exit(EXIT_PIPE) from None

    def report(self, error: Exception, argv: list[str], debug: bool) -> int:
        """Says on stderr what went wrong; answers with the exit code."""
        if debug:
            traceback.print_exception(error)
        usage = getattr(error, "format_message", None)  # of every error that typer raises, whatever its version
        if isinstance(error, ForedraftError):
            print_error(describe(error, known_options(self)))
        elif usage is not None:
            context = getattr(error, "ctx", None)
            known = f"foredraft {argv[0]}" if argv and argv[0] in self.commands else "foredraft"
            problem, path = one_line(usage()).rstrip("."), context.command_path if context else known
            see = " See" if problem.endswith("?") else "; see"
            print_error(f"{problem[:1].lower()}{problem[1:]}{see} '{path} --help'")
        elif isinstance(error, OSError) and error.errno in DISK_FULL:
            silence_stdout()
            print_error(f"{one_line(str(error.strerror)).lower()}; make room where the output goes and try again")
        elif isinstance(error, OSError) and isinstance(error.filename, str | bytes | os.PathLike):
            print_error(f"{os.fsdecode(error.filename)}: {one_line(str(error.strerror)).lower()}; name another place")
        else:
            print_error(f"unexpected {type(error).__name__}: {error}; run 'foredraft --debug …' to see where")
            return EXIT_BUG
        return EXIT_USER


app = typer.Typer(
    name="foredraft",
    cls=ForedraftGroup,
    help="Lossless speculative decoding: faster text from language models, with the same distribution.",
    invoke_without_command=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _show_version(wanted: bool) -> None:
    if wanted:
        sys.stdout.write(f"foredraft {__version__}\n")
        raise typer.Exit


@app.callback()
def root(
    ctx: typer.Context,
    show_version: Annotated[
        bool, typer.Option("--version", help="Print the version and exit.", callback=_show_version, is_eager=True)
    ] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False,
) -> None:
    """Both options are dealt with before a command runs."""
    if ctx.invoked_subcommand is None:
        typer.echo(ctx.get_help())


app.command(cls=Command)(generate.generate)
app.command(cls=Command)(chat.chat)
app.command(cls=Command)(demo.demo)
app.command(cls=Command)(serve.serve)
app.command(name="new-key", cls=Command)(serve.new_key)
app.command(cls=Command)(metrics.metrics)
app.add_typer(models.app, name="models")
app.command(cls=Command)(drafters.drafters)
app.command(cls=Command)(doctor.doctor)
app.add_typer(lab.app, name="lab")
app.command(cls=Command)(bench.bench)
app.add_typer(train.app, name="train")
app.command(cls=Command)(export.export)


def run(argv: Sequence[str] | None = None) -> None:
    """The console script."""
    app(args=argv, prog_name="foredraft")


if __name__ == "__main__":
    run()
