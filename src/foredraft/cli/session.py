"""What generate, chat and demo share: the options that choose target and drafter, and opening the engine."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from pydantic import Field

from foredraft.cli.console import stderr
from foredraft.cli.options import Given, collect
from foredraft.config import DraftingOptions, EngineConfig, Schema
from foredraft.errors import ConfigError

if TYPE_CHECKING:
    from foredraft.engine.engine import Engine
    from foredraft.models.info import LoadedModel
    from foredraft.models.tokenizer import Tokenizer

DEFAULT_TARGET = "smollm2-135m"
DEFAULT_DRAFTER = "lookup"
DEFAULT_SHOWN = f"{DEFAULT_DRAFTER}; for {DEFAULT_TARGET} combined:suffix+eagle3"


class LoadOptions(Schema):
    """Keyword arguments of :class:`foredraft.Engine` that say how models are loaded."""

    dtype: Literal["auto", "float32", "bfloat16", "float16", "float64"] = "auto"
    """Number type of weights and cache; auto takes the fastest that the model and device allow."""
    device: str = "auto"
    """Where to run: cpu, cuda, cuda:1; auto takes an accelerator if there is one."""
    max_context: Annotated[int, Field(ge=1)] | None = None
    """Most tokens of one request, prompt included; without it the model's own limit holds."""
    cache_bytes: Annotated[int, Field(ge=1)] | None = None
    """Budget of the KV cache in bytes; without it a share of the free memory."""
    activations: Literal["float32", "int16", "int8"] = "float32"
    """How inputs enter products with quantised weights on a CPU; int16 and int8 are faster, the target a little
    another."""
    trust_remote_code: bool = False
    """Run Python code that comes with a model; only for models whose code you have read."""
    tensor_parallel: Annotated[int, Field(ge=1)] = 1
    """Split the target over so many processes, a GPU each where there are enough; see docs/multi-device.md."""
    device_map: str | None = None
    """Distribute the target's layers over devices by transformers: auto, balanced, sequential, or a JSON file."""


class EngineOptions(LoadOptions, EngineConfig):
    """Everything that an engine is made with besides its target and drafter."""


PANELS: dict[str, type[Schema]] = {"Speculation": DraftingOptions, "Engine": EngineConfig, "Loading": LoadOptions}

TargetOption = Annotated[
    str, typer.Option("--target", metavar="MODEL", help="Catalogue name, local folder, .gguf file or hub id.")
]
DrafterOption = Annotated[
    str | None,
    typer.Option(
        "--drafter",
        metavar="NAME[:ARG]",
        help="What writes the draft; see 'foredraft drafters'.",
        show_default=DEFAULT_SHOWN,
    ),
]
DraftersOption = Annotated[
    list[str] | None,
    typer.Option(
        "--drafter",
        metavar="[NAME=]DRAFTER[:ARG]",
        help="What writes the draft; see 'foredraft drafters'. Repeatable: requests choose one by name, the first is "
        "the default.",
        show_default=DEFAULT_DRAFTER,
    ),
]
PlainOption = Annotated[bool, typer.Option("--plain", help="Decode without drafts.")]
ColourOption = Annotated[
    bool | None,
    typer.Option(
        "--color-tokens/--no-color-tokens",
        help="Colour tokens by how they came to be.",
        show_default="on a terminal",
    ),
]
JsonOption = Annotated[bool, typer.Option("--json", help="One JSON object on stdout and nothing else.")]


def usual_drafter(target: str) -> str:
    """What drafts for a target unless told otherwise: copying, and the head that comes with the embedded model."""
    from foredraft.models import catalog

    entry = catalog.find(target)
    return (entry and entry.drafter) or DEFAULT_DRAFTER


def chosen_drafter(drafter: str | None, plain: bool, given: Given, usual: str = DEFAULT_DRAFTER) -> str | None:
    """The drafter to use, ``usual`` unless told otherwise, or None for plain decoding.

    Raises:
        ConfigError: ``--plain`` together with an option that only makes sense with drafts.
    """
    if not plain:
        return usual if drafter is None else drafter
    useless = ["drafter"] if drafter is not None else [name for name in ("k", "max_k") if name in given]
    if useless:
        raise ConfigError("nothing is drafted with --plain", field=useless[0], remedy="drop one of the two options")
    return None


def chosen_drafters(drafters: Sequence[str], plain: bool, given: Given) -> list[str]:
    """The same for a server, where several may be given, of which each request chooses one.

    Unless told otherwise it copies whatever the target: many requests at once leave a head little to gain.

    Raises:
        ConfigError: Also where two have one name.
    """
    first = chosen_drafter(drafters[0] if drafters else None, plain, given)
    if first is None or len(drafters) < 2:
        return [] if first is None else [first]
    from foredraft.drafters.choice import check_names

    check_names(drafters)
    return list(drafters)


@contextlib.contextmanager
def spinner(message: str) -> Iterator[None]:
    """A spinner on stderr while something slow happens; nothing where stderr is not a terminal."""
    console = stderr()
    if not console.is_terminal:
        yield
        return
    with console.status(message):
        yield


def open_engine(
    target: str | LoadedModel, drafter: str | Sequence[str] | None, given: Given, **defaults: Any
) -> Engine:
    """Loads the target and the drafter, or drafters."""
    settings = collect(EngineOptions, given, **defaults)
    with spinner(f"loading {target if isinstance(target, str) else 'the drafter'} …"):
        from foredraft import Engine  # torch is imported here, not by --help

        return Engine(target=target, drafter=drafter, **settings)


def whole_text(read: Callable[[], str], where: str) -> str:
    """What ``read`` returns, if it is text.

    Raises:
        ConfigError: Its bytes are not UTF-8. (Python smuggles such bytes through arguments as lone surrogates.)
    """
    try:
        text = read()
        text.encode("utf-8")
    except UnicodeError:
        raise ConfigError(f"{where} is not UTF-8 text", field="prompt", remedy="convert it to UTF-8") from None
    return text


def tokenizer_of(engine: Engine) -> Tokenizer:
    """The target's tokenizer.

    Raises:
        ConfigError: The model's files carry none, so there is no text to speak of.
    """
    if engine.tokenizer is None:
        raise ConfigError("the model has no tokenizer", field="target", remedy="use a model that carries one")
    tokenizer: Tokenizer = engine.tokenizer
    return tokenizer
