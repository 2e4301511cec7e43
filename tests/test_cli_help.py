"""Help and options: every field of the schema is an option, nothing is cut short, and it comes fast."""

from __future__ import annotations

import re
import subprocess
import sys
import time
from typing import Annotated, Any, Literal

import pytest
import typer
from pydantic import Field
from typer.testing import CliRunner

from foredraft.cli import options
from foredraft.cli.main import app
from foredraft.cli.session import EngineOptions, LoadOptions
from foredraft.config import EngineConfig, SamplingParams, Schema, SpeculationConfig
from foredraft.errors import ConfigError

COMMANDS = ("generate", "chat", "demo", "drafters", "doctor", "models", "lab")


def help_of(*argv: str, columns: int = 80) -> str:
    result = CliRunner().invoke(app, [*argv, "--help"], env={"COLUMNS": str(columns)})
    assert result.exit_code == 0
    return result.output


def test_every_command_is_listed_and_has_help() -> None:
    listing = help_of()
    for command in COMMANDS:
        assert re.search(rf"^  {command} ", listing, re.MULTILINE)
        assert help_of(command).startswith(f"Usage: foredraft {command} ")


@pytest.mark.parametrize("command", ["generate", "chat"])
@pytest.mark.parametrize("columns", [40, 80, 120])
def test_every_field_of_the_schema_is_an_option(command: str, columns: int) -> None:
    text = help_of(command, columns=columns)
    for schema in (SamplingParams, SpeculationConfig, EngineConfig, LoadOptions):
        for field in schema.model_fields:
            assert re.search(rf"^  --(\[no-\])?{field.replace('_', '-')}\b", text, re.MULTILINE), field


@pytest.mark.parametrize("columns", [40, 80, 120])
def test_help_fits_the_terminal(columns: int) -> None:
    widest = max(len(line) for line in help_of("generate", columns=columns).splitlines())
    assert widest <= max(columns, 48)  # 28 columns of names and at least 20 of text


def test_the_docs_of_the_fields_are_the_help() -> None:
    text = " ".join(help_of("generate").split())
    for schema in (SamplingParams, EngineConfig):
        for field, doc in options.field_docs(schema).items():
            assert doc in text, field
    assert set(options.field_docs(EngineConfig)) == set(EngineConfig.model_fields)
    assert "``" not in text
    assert ":mod:" not in text


def test_the_load_options_are_the_engines_arguments() -> None:
    import inspect

    from foredraft import Engine

    own = {"self", "target", "drafter", "clock", "options"}
    assert set(inspect.signature(Engine.__init__).parameters) - own == set(LoadOptions.model_fields)


class Future(Schema):
    """Field types that the schema may get one day."""

    plain: str = "a"
    """A text."""
    maybe: Annotated[float, Field(gt=0)] | None = None
    """A number or none."""
    mode: Literal["x", "y"] | None = None
    """A choice."""
    count: int | Literal["auto"] = "auto"
    """Several kinds."""
    on: bool = True
    """A switch."""
    names: tuple[str, ...] = ()
    """Several texts."""
    runs: tuple[tuple[int, ...], ...] = ()
    """Several sequences."""
    weights: dict[str, float] = Field(default_factory=dict)
    """Pairs."""


def build_future(*argv: str) -> Future:
    made: list[Future] = []
    program = typer.Typer()

    @program.command()
    @options.schema_options({"Future": Future})
    def command(*, given: dict[str, Any]) -> None:
        made.append(options.build(Future, given))

    result = CliRunner().invoke(program, list(argv))
    if result.exception and not isinstance(result.exception, SystemExit):
        raise result.exception
    return made[0]


def test_a_new_field_is_a_new_option() -> None:
    assert build_future() == Future()
    argv = "--plain b --maybe 1e-3 --mode y --count 7 --no-on --names n,1 --names n2 --runs 1,2 --runs 3 --weights a=2"
    assert build_future(*argv.split()) == Future(
        plain="b", maybe=1e-3, mode="y", count=7, on=False, names=("n,1", "n2"), runs=((1, 2), (3,)), weights={"a": 2}
    )
    assert build_future("--maybe", "none").maybe is None
    assert build_future("--count", "auto").count == "auto"


@pytest.mark.parametrize(
    ("argv", "field"),
    [
        (["--maybe", "0"], "maybe"),
        (["--maybe", "much"], "maybe"),
        (["--mode", "z"], "mode"),
        (["--runs", "1,b"], "runs"),
        (["--weights", "3"], "weights"),
    ],
)
def test_a_bad_value_names_its_option(argv: list[str], field: str) -> None:
    with pytest.raises(ConfigError) as caught:
        build_future(*argv)
    assert (caught.value.field or "").split(".")[0] == field


def test_sampling_options_reach_the_schema() -> None:
    given = {
        "temperature": "0.5",
        "stop": ["a,b", "c"],
        "stop_token_ids": ["1,2", "3"],
        "logit_bias": ["5=-2.5", "6=1"],
        "bad_token_ids": ["1,2", "3"],
        "max_tokens": "none",
        "ignore_eos": True,
        "processors": ["os:getcwd"],
    }
    import os

    assert options.build(SamplingParams, given, max_tokens=9) == SamplingParams(
        temperature=0.5,
        stop=("a,b", "c"),
        stop_token_ids=(1, 2, 3),
        logit_bias={5: -2.5, 6: 1},
        bad_token_ids=((1, 2), (3,)),
        max_tokens=None,
        ignore_eos=True,
        processors=(os.getcwd,),
    )
    assert options.build(SamplingParams, {}, max_tokens=9).max_tokens == 9
    assert options.build(EngineOptions, {"k": "3", "dtype": "float32"}).k == 3


def test_help_and_version_do_not_import_torch() -> None:
    probe = "import sys; from foredraft.cli.main import app; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", probe], timeout=60).returncode == 0
    times = []
    for _ in range(3):
        began = time.perf_counter()
        done = subprocess.run([sys.executable, "-m", "foredraft.cli.main", "--version"], capture_output=True, text=True)
        times.append(time.perf_counter() - began)
        assert re.fullmatch(r"foredraft \d+\.\d+\.\d+\S*\n", done.stdout)
    assert min(times) < 1.5  # about 0.4 s on a quiet machine; importing torch alone takes longer than 1.5 s
