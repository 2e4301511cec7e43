"""``foredraft train``: record what a model writes, and train a drafter on it."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from foredraft.cli.console import print_json, print_plain, stderr
from foredraft.cli.help import Command, Group
from foredraft.cli.options import Given, build, collect, schema_options
from foredraft.cli.session import DEFAULT_TARGET, JsonOption, LoadOptions, TargetOption, spinner, whole_text
from foredraft.errors import ConfigError
from foredraft.train.config import DraftTraining, Eagle1Training, EagleTraining

if TYPE_CHECKING:
    from foredraft.models.info import LoadedModel
    from foredraft.train.measure import Measure

app = typer.Typer(cls=Group, help="Train a drafter for your model.", invoke_without_command=True)

DataOption = Annotated[Path, typer.Option("--data", metavar="FOLDER", help="Folder of recorded answers.")]
OutOption = Annotated[Path, typer.Option("--out", metavar="FOLDER", help="Folder of the run; an earlier run goes on.")]
MinutesOption = Annotated[
    float | None, typer.Option("--minutes", metavar="X", min=0, help="Stop, ready to go on, after this time.")
]


@app.callback()
def train(ctx: typer.Context) -> None:
    """Train a drafter for your model."""
    if ctx.invoked_subcommand is None:
        typer.echo(ctx.get_help())


@app.command(cls=Command)
@schema_options({"Loading": LoadOptions})
def data(
    out: Annotated[Path, typer.Option("--out", metavar="FOLDER", help="Folder to write shards to.")],
    target: TargetOption = DEFAULT_TARGET,
    conversations: Annotated[
        Path | None,
        typer.Option(
            "--conversations",
            metavar="FILE",
            help="Prompts of your own: a JSON list of messages a line, or plain text, one prompt a line.",
        ),
    ] = None,
    prompts: Annotated[
        int, typer.Option("--prompts", metavar="N", min=1, help="How many of the built-in prompts to answer.")
    ] = 1000,
    max_tokens: Annotated[int, typer.Option("--max-tokens", metavar="N", min=1, help="Longest answer.")] = 320,
    batch: Annotated[int, typer.Option("--batch", metavar="N", min=1, help="Prompts answered together.")] = 16,
    seed: Annotated[int, typer.Option("--seed", metavar="N", min=0, help="Seed of the built-in prompts.")] = 0,
    *,
    given: Given,
) -> None:
    """Let TARGET answer prompts and record its hidden states; a second call goes on where the first stopped."""
    from foredraft.train.run import record_data
    from foredraft.train.workers import process_count

    if process_count() > 1:
        raise ConfigError("answers are recorded by one process", remedy="start this command without torchrun")
    own = None if conversations is None else read_conversations(conversations)
    loaded = load(target, given)
    started, written = time.monotonic(), 0
    steps = record_data(loaded, out, own, prompts=prompts, max_tokens=max_tokens, batch=batch, seed=seed)
    for written in steps:
        _say(f"{written} answer tokens, {written / (time.monotonic() - started):.0f} a second")
    print_plain(f"{written} answer tokens written to {out}")


@app.command(cls=Command)
@schema_options({"Training": EagleTraining, "Loading": LoadOptions})
def eagle3(
    folder: DataOption,
    out: OutOption,
    target: TargetOption = DEFAULT_TARGET,
    minutes: MinutesOption = None,
    start: Annotated[
        Path | None,
        typer.Option(
            "--from",
            metavar="FOLDER",
            help="A trained head to go on from, with its sizes; without it the weights are solved from the data.",
        ),
    ] = None,
    *,
    given: Given,
) -> None:
    """Train an EAGLE-3 head for TARGET on recorded answers; OUT/head is what --drafter eagle3:OUT/head takes."""
    from foredraft.train.heads import train_eagle3

    config = build(EagleTraining, given)
    _train(target, given, minutes, partial(train_eagle3, data=folder, out=out, config=config, start=start))


@app.command(cls=Command)
@schema_options({"Training": Eagle1Training, "Loading": LoadOptions})
def eagle1(
    folder: DataOption,
    out: OutOption,
    target: TargetOption = DEFAULT_TARGET,
    minutes: MinutesOption = None,
    *,
    given: Given,
) -> None:
    """Train an EAGLE-1 head for TARGET on recorded answers; OUT/head is what --drafter eagle1:OUT/head takes."""
    from foredraft.train.heads import train_eagle1

    config = build(Eagle1Training, given)
    _train(target, given, minutes, partial(train_eagle1, data=folder, out=out, config=config))


@app.command(cls=Command)
@schema_options({"Training": DraftTraining, "Loading": LoadOptions})
def draft(
    out: OutOption,
    folder: Annotated[
        Path | None, typer.Option("--data", metavar="FOLDER", help="Folder of recorded answers; or --answers.")
    ] = None,
    answers: Annotated[
        Path | None,
        typer.Option(
            "--answers",
            metavar="FILE",
            help="Answers that TARGET scores: a JSON list of messages a line, the answer last, or a text a line.",
        ),
    ] = None,
    target: TargetOption = DEFAULT_TARGET,
    minutes: MinutesOption = None,
    *,
    given: Given,
) -> None:
    """Distil a small model from TARGET; OUT/draft is what --drafter model:OUT/draft takes."""
    from foredraft.train.drafts import train_draft

    config = build(DraftTraining, given)
    if (folder is None) == (answers is None):
        raise ConfigError("give recorded answers or a file of answers", field="data", remedy="use --data or --answers")
    _train(target, given, minutes, partial(train_draft, out=out, config=config, data=folder, answers=answers))


@app.command(cls=Command)
@schema_options({"Loading": LoadOptions})
def check(
    path: Annotated[Path, typer.Argument(metavar="FOLDER", help="An EAGLE-1 or EAGLE-3 checkpoint.")],
    target: TargetOption = DEFAULT_TARGET,
    as_json: JsonOption = False,
    *,
    given: Given,
) -> None:
    """Say what is wrong with an EAGLE checkpoint, and how well it foresees what TARGET writes."""
    from foredraft.train.check import check_head

    found = check_head(path, load(target, given))
    if as_json:
        print_json(found.to_dict())
    else:
        for line in found.lines():
            print_plain(line)
    if found.broken:
        raise typer.Exit(2)


def _train(target: str, given: Given, minutes: float | None, work: Callable[..., Path]) -> None:
    """Loads the target and trains, alone or as one of the processes that torchrun started."""
    from foredraft.train.workers import join_workers, leave_workers, local_rank

    until = float("inf") if minutes is None else time.time() + 60 * minutes
    if local_rank() and "device" not in given:
        given = {**given, "device": own_device(local_rank())}
    loaded = load(target, given)
    workers = join_workers(loaded.target.device)  # type: ignore[attr-defined]

    def report(measure: Measure) -> None:
        if workers.writes:
            _say(describe(measure))

    try:
        made = work(loaded, report=report, until=until, workers=workers)
    except BaseException:
        leave_workers(together=False)
        raise
    leave_workers(together=True)
    if workers.writes:
        print_plain(f"{made.name} written to {made}")


def own_device(rank: int) -> str:
    """The accelerator of the process with this number on its machine, or the CPU."""
    import torch

    return f"cuda:{rank}" if torch.cuda.is_available() else "cpu"


def _say(line: str) -> None:
    """Progress on stderr, in a log as on a terminal: such runs take hours."""
    stderr().print(line, markup=False, highlight=False, soft_wrap=True)


def load(target: str, given: Given) -> LoadedModel:
    from foredraft.models.loading import load_model

    with spinner(f"loading {target} …"):
        return load_model(target, **collect(LoadOptions, given))


def describe(measure: Measure) -> str:
    """One line of progress."""
    alpha = " ".join(f"{value:.2f}" for value in measure.alpha)
    return (
        f"step {measure.step}: loss {measure.loss:.3f}, held-out acceptance by position {alpha}, "
        f"{measure.tau:.2f} tokens a pass"
    )


def read_conversations(path: Path) -> list[list[dict[str, str]]]:
    """JSON lines of messages, or plain text with a prompt a line.

    Raises:
        ConfigError: The file cannot be read, is empty, or a line holds something else.
    """
    try:
        lines = [line for line in whole_text(lambda: path.read_text("utf-8"), str(path)).splitlines() if line.strip()]
    except OSError as error:
        raise ConfigError(f"cannot be read ({error.strerror})", field="conversations") from None
    if not lines:
        raise ConfigError(f"{path} is empty", field="conversations", remedy="write one prompt a line")
    return [_conversation(line, number) for number, line in enumerate(lines, 1)]


def _conversation(line: str, number: int) -> list[dict[str, str]]:
    if line.lstrip()[0] not in "[{":
        return [{"role": "user", "content": line}]
    try:
        found: Any = json.loads(line)
        found = found.get("messages") or found.get("conversations") if isinstance(found, dict) else found
        messages = [{"role": str(m["role"]), "content": str(m["content"])} for m in found]
    except (ValueError, KeyError, TypeError):
        messages = []
    while messages and messages[-1]["role"] == "assistant":  # the target writes the answer itself
        messages.pop()
    if not messages:
        raise ConfigError(
            f"line {number} holds no messages with role and content",
            field="conversations",
            remedy='write [{"role": "user", "content": "…"}] or plain text on each line',
        )
    return messages
