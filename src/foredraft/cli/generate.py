"""``foredraft generate``: one prompt, streamed text or one JSON object."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from foredraft.cli import session
from foredraft.cli.console import TokenPrinter, legend, print_json, print_note, stderr, warnings_held
from foredraft.cli.options import Given, build, schema_options
from foredraft.cli.stats import Tally, footer
from foredraft.config import SamplingParams, Schema
from foredraft.errors import ConfigError

if TYPE_CHECKING:
    from foredraft.engine.engine import Engine
    from foredraft.engine.result import Result

DEFAULTS = {"max_tokens": 256}
"""Unlike the library, a command should end by itself soon."""

PANELS: dict[str, type[Schema]] = {"Sampling": SamplingParams, **session.PANELS}


def read_prompt(prompt: str | None, file: Path | None) -> str:
    """The prompt from the argument, stdin (``-``) or a file.

    Raises:
        ConfigError: None or two of them, an unreadable file, bytes that are not UTF-8, or an empty prompt.
    """
    if (prompt is None) == (file is None):
        problem = "no prompt" if prompt is None else "given twice, as an argument and as --file"
        raise ConfigError(problem, field="prompt", remedy="give PROMPT, '-' to read stdin, or --file PATH")
    if file is not None:
        try:
            text = session.whole_text(lambda: file.read_text("utf-8"), str(file))
        except OSError as problem:
            reason = problem.strerror or str(problem)
            raise ConfigError(f"cannot read {file} ({reason})", field="file", remedy="check the path") from None
    elif prompt == "-":
        text = session.whole_text(sys.stdin.read, "stdin")
    else:
        text = session.whole_text(lambda: prompt or "", "it")
    if not text:
        raise ConfigError("the prompt is empty", field="prompt", remedy="give at least one character")
    return text


@schema_options(PANELS, defaults=DEFAULTS)
def generate(
    prompt: Annotated[str | None, typer.Argument(help="The text to continue; '-' reads stdin.")] = None,
    file: Annotated[Path | None, typer.Option("--file", metavar="PATH", help="Read the prompt from a file.")] = None,
    target: session.TargetOption = session.DEFAULT_TARGET,
    drafter: session.DrafterOption = None,
    plain: session.PlainOption = False,
    chat: Annotated[bool, typer.Option("--chat", help="Wrap the prompt in the model's chat template.")] = False,
    color_tokens: session.ColourOption = None,
    json: session.JsonOption = False,
    *,
    given: Given,
) -> None:
    """Continue PROMPT, with drafts checked by the target: the same text law as plain decoding, in fewer passes."""
    params = build(SamplingParams, given, **DEFAULTS)
    build(session.EngineOptions, given)  # judged before a prompt is read or a model loaded
    chosen = session.chosen_drafter(drafter, plain, given, session.usual_drafter(target))
    text = read_prompt(prompt, file)
    engine = session.open_engine(target, chosen, given)
    ids: str | list[int] = session.tokenizer_of(engine).chat([{"role": "user", "content": text}]) if chat else text
    if json:
        print_json(decode(engine, ids, params).to_dict())
    else:
        stream(engine, ids, params, color_tokens)


def decode(engine: Engine, ids: str | list[int], params: SamplingParams) -> Result:
    """Decodes to the end; Ctrl-C prints what is there as a cancelled result before it goes on its way."""
    request = engine.submit(ids, params)
    try:
        while not request.finished:
            engine.step()
    except KeyboardInterrupt:
        engine.cancel(request)
        engine.scheduler.reap()
        print_json(request.result(engine.load_s).to_dict())
        raise
    if request.error is not None:
        raise request.error
    return request.result(engine.load_s)


def stream(engine: Engine, ids: str | list[int], params: SamplingParams, colour: bool | None) -> None:
    """Streams the text to stdout and a footer to a terminal's stderr."""
    printer, result = TokenPrinter(colour), None
    if printer.colour:
        stderr().print(legend())
    with warnings_held():
        try:
            for delta in engine.stream(ids, params):
                printer(delta)
                result = delta.result
        finally:
            printer.end_line()
    assert result is not None
    seed = None if params.greedy else result.seed
    print_note(footer(Tally([result]), finish_reason=result.finish_reason, seed=seed))
