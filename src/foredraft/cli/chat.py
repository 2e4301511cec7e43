"""``foredraft chat``: a conversation whose earlier turns stay in the KV cache."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.text import Text

from foredraft.cli import session
from foredraft.cli.console import TokenPrinter, legend, print_error, print_json, print_note, stderr, warnings_held
from foredraft.cli.generate import PANELS
from foredraft.cli.options import Given, build, schema_options
from foredraft.cli.stats import Tally, footer
from foredraft.config import SamplingParams
from foredraft.errors import ConfigError, ForedraftError

if TYPE_CHECKING:
    from foredraft.engine.engine import Engine
    from foredraft.engine.result import Result, StreamDelta

DEFAULTS = {"max_tokens": 1024}
COMMANDS = "/reset  /undo  /stats  /system TEXT  /help  /exit"


@dataclass(frozen=True)
class Turn:
    """One question and its answer; ``result`` is None if Ctrl-C cut the answer short."""

    user: str
    text: str
    result: Result | None


@dataclass
class Conversation:
    """What has been said, and the engine that answers."""

    engine: Engine
    params: SamplingParams
    system: str | None = None
    turns: list[Turn] = field(default_factory=list)

    def messages(self, user: str | None = None) -> list[dict[str, str]]:
        messages = [{"role": "system", "content": self.system}] if self.system else []
        for turn in self.turns:
            messages += [{"role": "user", "content": turn.user}, {"role": "assistant", "content": turn.text}]
        return messages if user is None else [*messages, {"role": "user", "content": user}]

    def ask(self, user: str) -> Iterator[StreamDelta]:
        """Streams the answer. An answer that is cut short counts as far as it came; one that fails does not count."""
        ids = session.tokenizer_of(self.engine).chat(self.messages(user))
        said, result = "", None
        try:
            for delta in self.engine.stream(ids, self.params):
                said, result = said + delta.text, delta.result
                yield delta
        except KeyboardInterrupt:
            self.turns.append(Turn(user, said, None))
            raise
        self.turns.append(Turn(user, said, result))

    def tally(self) -> Tally:
        return Tally([turn.result for turn in self.turns if turn.result is not None])

    def to_dict(self) -> dict[str, Any]:
        turns = [
            {"user": turn.user, **(turn.result.to_dict() if turn.result else {"text": turn.text})}
            for turn in self.turns
        ]
        return {"messages": self.messages(), "turns": turns, "total": self.tally().to_dict()}


def obey(line: str, talk: Conversation) -> bool:
    """Obeys a line that starts with a slash; False ends the chat."""
    name, _, argument = line.partition(" ")
    if name in ("/exit", "/quit"):
        return False
    if name == "/reset":
        talk.turns.clear()
        answer = "conversation cleared"
    elif name == "/undo":
        answer = f"took back: {talk.turns.pop().user}" if talk.turns else "nothing to take back"
    elif name == "/system":
        talk.system = argument.strip() or None
        talk.turns.clear()
        answer = f"system message: {talk.system or 'none'}; conversation cleared"
    elif name == "/stats":
        answer = f"{len(talk.turns)} turn{'s' * (len(talk.turns) != 1)} · {footer(talk.tally())}"
    elif name == "/help":
        answer = COMMANDS
    else:
        print_error(f"no command {name!r}; there are {COMMANDS}")
        return True
    stderr().print(Text(answer, style="dim"))
    return True


@contextlib.contextmanager
def history() -> Iterator[None]:
    """Line editing and a history that outlives the chat, where the platform has readline."""
    try:
        import readline
    except ImportError:
        yield
        return
    state = Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state") / "foredraft"
    file = state / "chat_history"
    with contextlib.suppress(OSError):  # no history yet, or none can be read
        readline.read_history_file(file)
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            state.mkdir(parents=True, exist_ok=True)
            readline.set_history_length(1000)
            readline.write_history_file(file)


def lines(interactive: bool) -> Iterator[str]:
    """What the user types, line by line, until the end of input; empty lines are passed over."""
    if not interactive:
        # Line by line, so that a program at the other end of the pipe can wait for each answer.
        while line := session.whole_text(sys.stdin.readline, "stdin"):
            if line.strip():
                yield line.strip()
        return
    with history():
        while True:
            try:
                line = input("you › ").strip()
            except EOFError:
                sys.stdout.write("\n")
                return
            except KeyboardInterrupt:
                sys.stdout.write("\n")
                print_note("Ctrl-D or /exit leaves the chat")
                continue
            if line:
                yield line


def answer(talk: Conversation, user: str, printer: TokenPrinter | None) -> None:
    """Streams one answer and its footer; Ctrl-C ends the answer, not the chat."""
    try:
        with warnings_held():
            try:
                for delta in talk.ask(user):
                    if printer:
                        printer(delta)
            finally:
                if printer:
                    printer.end_line()
    except KeyboardInterrupt:
        print_note("answer stopped; it stays in the conversation as far as it came")
        return
    result = talk.turns[-1].result
    if result is not None:
        print_note(footer(Tally([result]), finish_reason=result.finish_reason))


@schema_options(PANELS, defaults=DEFAULTS)
def chat(
    target: session.TargetOption = session.DEFAULT_TARGET,
    drafter: session.DrafterOption = None,
    plain: session.PlainOption = False,
    system: Annotated[str | None, typer.Option("--system", metavar="TEXT", help="System message.")] = None,
    color_tokens: session.ColourOption = None,
    json: session.JsonOption = False,
    *,
    given: Given,
) -> None:
    """Talk with the model. Earlier turns stay in the KV cache; piped lines are taken as one message each."""
    params = build(SamplingParams, given, **DEFAULTS)
    build(session.EngineOptions, given)
    chosen = session.chosen_drafter(drafter, plain, given, session.usual_drafter(target))
    engine = session.open_engine(target, chosen, given)
    if not session.tokenizer_of(engine).has_chat_template:
        raise ConfigError(f"{target} has no chat template", field="target", remedy="use 'foredraft generate'")
    talk = Conversation(engine, params, system)
    interactive = sys.stdin.isatty() and sys.stdout.isatty() and not json
    printer = None if json else TokenPrinter(color_tokens)
    if interactive:
        print_note(f"{target} · {COMMANDS}")
    if printer and printer.colour:
        stderr().print(legend())
    for line in lines(interactive):
        if line.startswith("/"):
            if not obey(line, talk):
                break
            continue
        try:
            answer(talk, line, printer)
        except ForedraftError as error:
            if not interactive:
                raise
            print_error(str(error))
    if json:
        print_json(talk.to_dict())
