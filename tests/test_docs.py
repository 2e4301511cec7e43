"""The documentation cannot rot: every example runs, every link leads somewhere, every name and option is described."""

from __future__ import annotations

import importlib.util
import json
import re
import shlex
import tomllib
from dataclasses import dataclass
from pathlib import Path
from types import CodeType
from typing import Any

import pytest
from typer.main import get_command

import foredraft
from foredraft import drafters, errors
from foredraft.cli.main import app, run
from foredraft.cli.session import EngineOptions
from foredraft.config import SamplingParams
from foredraft.drafters import registry
from foredraft.models import catalog
from foredraft.testing import TableModel

ROOT = Path(__file__).parent.parent
ECHO = ROOT / "examples" / "foredraft-echo"
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
ALL_PAGES = [*PAGES, ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", ECHO / "README.md"]

_FENCE = re.compile(
    r"^(?:<!-- (?P<mark>needs the model|not run: [^>]+) -->\n)?```(?P<kind>\w+)\n(?P<body>.*?)^```", re.M | re.S
)
_LINK = re.compile(r"\]\(([^)\s]+)\)|src=\"([^\"]+)\"")
_HEADING = re.compile(r"^#+ (.+)$", re.M)

needs_model = [
    pytest.mark.real_model,
    pytest.mark.skipif(catalog.resolve("smollm2-135m") is None, reason="the small real model is not here"),
]


@dataclass(frozen=True)
class Block:
    """One fenced block; ``mark`` is the comment above it."""

    page: Path
    line: int
    kind: str
    body: str
    mark: str | None

    @property
    def needs_model(self) -> bool:
        return self.mark == "needs the model"

    @property
    def runs(self) -> bool:
        return self.mark is None or self.needs_model

    def compiled(self) -> CodeType:
        """The code, with the page's own line numbers."""
        return compile("\n" * self.line + self.body, str(self.page), "exec")


def blocks(page: Path, kind: str) -> list[Block]:
    text = page.read_text("utf-8")
    return [
        Block(page, text.count("\n", 0, found.start("body")), kind, found["body"], found["mark"])
        for found in _FENCE.finditer(text)
        if found["kind"] == kind
    ]


def python_cases() -> list[Any]:
    """One case a page, and one more for its blocks that need the model: each has one namespace."""
    cases = []
    for page in PAGES:
        for model in (False, True):
            chosen = [block for block in blocks(page, "python") if block.runs and block.needs_model == model]
            if chosen:
                name = page.name + (" with the model" if model else "")
                cases.append(pytest.param(chosen, id=name, marks=needs_model if model else ()))
    return cases


@pytest.mark.parametrize("chosen", python_cases())
def test_python_examples_run(chosen: list[Block]) -> None:
    namespace: dict[str, Any] = {"__name__": "example"}
    for block in chosen:
        exec(block.compiled(), namespace)


def console_cases() -> list[Any]:
    return [
        pytest.param(block, id=f"{page.name}:{block.line}", marks=needs_model if block.needs_model else ())
        for page in PAGES
        for block in blocks(page, "console")
        if block.runs and block.body.startswith("$ foredraft")
    ]


def sessions(body: str) -> list[tuple[str, str]]:
    """Commands with what they print; ``…`` stands for anything."""
    parts = re.split(r"^\$ ", body, flags=re.M)[1:]
    return [(command.replace("\\\n", " "), output) for command, output in (split(part) for part in parts)]


def split(part: str) -> tuple[str, str]:
    command, output = [], part.splitlines(keepends=True)
    while output:
        command.append(output.pop(0))
        if not command[-1].endswith("\\\n"):
            break
    return "".join(command), "".join(output)


@pytest.mark.parametrize("block", console_cases())
def test_console_examples_run(
    block: Block, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")
    for command, expected in sessions(block.body):
        program, *argv = shlex.split(command, comments=True)
        assert program == "foredraft"
        capsys.readouterr()
        with pytest.raises(SystemExit) as stop:
            run(argv)
        captured = capsys.readouterr()
        printed = captured.out + captured.err
        refused = expected.startswith("error: ")
        assert stop.value.code in ((2,) if refused else (0, None)), printed
        if expected:
            pattern = ".*".join(map(re.escape, expected.strip().split("…")))
            assert re.fullmatch(pattern, printed.strip(), re.S), f"{command}printed\n{printed}"


def slug(heading: str) -> str:
    """GitHub's anchor of a heading."""
    plain = re.sub(r"\[([^\]]+)\]\([^)]*\)", r"\1", heading).lower()
    return re.sub(r"[^\w\- ]", "", plain).strip().replace(" ", "-")


@pytest.mark.parametrize("page", ALL_PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    text = re.sub(r"^```.*?^```", "", page.read_text("utf-8"), flags=re.M | re.S)
    for inline, source in _LINK.findall(text):
        link = inline or source
        if link.startswith(("http://", "https://", "mailto:")):
            continue
        name, _, anchor = link.partition("#")
        target = page if not name else (page.parent / name).resolve()
        assert target.exists(), f"{page.name}: {link} does not exist"
        assert target.is_relative_to(ROOT), f"{page.name}: {link} leaves the repository"
        if anchor:
            headings = {slug(heading) for heading in _HEADING.findall(target.read_text("utf-8"))}
            assert anchor in headings, f"{page.name}: {link} has no such heading"


@pytest.mark.parametrize("page", ALL_PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_pages_name_no_machine(page: Path) -> None:
    found = re.search(r"(?<![\w.])/(home|root|work|tmp|Users|mnt|opt|srv)/\S*|[A-Z]:\\\S+", page.read_text("utf-8"))
    assert found is None, f"{page.name} names {found and found[0]}"


def everything() -> str:
    return "\n".join(page.read_text("utf-8") for page in PAGES)


def test_public_names_are_described() -> None:
    text = everything()
    names = [*foredraft.__all__, *drafters.__all__, *foredraft.testing.__all__]
    missing = [name for name in names if not re.search(rf"\b{name}\b", text)]
    assert not missing


def test_every_field_is_described() -> None:
    sampling, library = ((ROOT / "docs" / name).read_text("utf-8") for name in ("sampling.md", "library.md"))
    assert [name for name in SamplingParams.model_fields if f"`{name}`" not in sampling] == []
    assert [name for name in EngineOptions.model_fields if f"`{name}`" not in library] == []


def test_every_error_is_described() -> None:
    text = (ROOT / "docs" / "troubleshooting.md").read_text("utf-8")
    classes = [
        name
        for name, found in vars(errors).items()
        if isinstance(found, type) and issubclass(found, foredraft.ForedraftError)
    ]
    assert len(classes) > 5
    assert [name for name in classes if f"`{name}`" not in text] == []


def commands(command: Any, name: str = "foredraft") -> dict[str, Any]:
    found = {name: command}
    for part, inner in getattr(command, "commands", {}).items():
        found |= commands(inner, f"{name} {part}")
    return found


def test_every_command_and_option_is_described() -> None:
    text = (ROOT / "docs" / "cli.md").read_text("utf-8")
    found = commands(get_command(app))
    assert "foredraft models fetch" in found
    assert [name for name in found if f"`{name}" not in text] == []
    options = {name for command in found.values() for option in command.params for name in option.opts if "--" in name}
    assert sorted(name for name in options if not re.search(rf"{name}(?![\w-])", text)) == []


def test_every_drafter_is_described() -> None:
    text = (ROOT / "docs" / "drafters.md").read_text("utf-8")
    assert [entry.name for entry in registry.BUILT_IN if not re.search(rf"^\| `{entry.name}[`:]", text, re.M)] == []


def test_every_dependency_has_a_reason() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    text = (ROOT / "docs" / "design.md").read_text("utf-8")
    wanted = [*project["dependencies"], *project["optional-dependencies"]["dev"]]
    names = [re.split(r"[<>=]", requirement)[0] for requirement in wanted]
    assert [name for name in names if f"| {name} |" not in text] == []


def test_readme_has_room_for_figures() -> None:
    text = (ROOT / "README.md").read_text("utf-8")
    assert text.count("<!-- figures:start -->") == text.count("<!-- figures:end -->") == 1
    assert text.index("<!-- figures:start -->") < text.index("<!-- figures:end -->")


def kept(name: str) -> Any:
    return json.loads((ROOT / "benchmarks" / "results" / f"{name}.json").read_text("utf-8"))


def test_kernel_figures_are_the_kept_ones() -> None:
    text = (ROOT / "docs" / "kernels.md").read_text("utf-8")
    for result in kept("kernels")["results"]:
        weights, _, inputs = result["format"].partition(":")
        by_rows = {cell["rows"]: cell for cell in result["passes"]}
        cells = [result["bytes"] / 1e6, *(cell["ms_min"] for cell in by_rows.values())]
        cells += [by_rows[rows].get("torch_ms_min") for rows in (1, 8)]
        shown = [f"{cells[0]:.0f}", *("–" if cell is None else f"{cell:.1f}" for cell in cells[1:])]
        shown += [f"{result[name]:.2f}" for name in ("share_of_bandwidth", "cost8_over_cost1")]
        assert f"| {' | '.join([weights, inputs or 'float32', *shown])} |" in text
    for name, part in kept("perplexity")["parts"].items():
        change = f"{part['against_dequantised']:+.4%}" if part["against_dequantised"] else "–"
        assert f"| {name} | {part['perplexity']:.4f} | {change} |" in text


@pytest.fixture
def echo_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The example package as an installer would leave it: its source on the path, its metadata beside it."""
    project = tomllib.loads((ECHO / "pyproject.toml").read_text("utf-8"))["project"]
    info = tmp_path / f"{project['name'].replace('-', '_')}-{project['version']}.dist-info"
    info.mkdir()
    info.joinpath("METADATA").write_text(
        f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n", "utf-8"
    )
    points = [
        f"[{group}]\n" + "".join(f"{name} = {value}\n" for name, value in entries.items())
        for group, entries in project["entry-points"].items()
    ]
    info.joinpath("entry_points.txt").write_text("\n".join(points), "utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.syspath_prepend(ECHO / "src")
    registry.entries.cache_clear()
    yield project
    registry.entries.cache_clear()


def test_the_example_package_is_found_by_name(echo_installed: dict[str, Any]) -> None:
    [entry] = [entry for entry in registry.entries() if entry.name == "echo"]
    assert echo_installed["name"] in entry.summary
    engine = foredraft.Engine(target=TableModel(lambda prefix: [0.0, 1.0, 0.5], 3), drafter="echo:2", k=4)
    assert engine.drafter is not None
    assert engine.drafter.longest == 2  # type: ignore[attr-defined]
    [result] = engine.generate([[1, 1, 1]], SamplingParams(max_tokens=9))
    assert result.token_ids == [1] * 9
    assert result.stats.num_accepted_draft_tokens > 0
    with pytest.raises(errors.ConfigError, match="not a number"):
        foredraft.Engine(target=engine.target, drafter="echo:x")


def test_the_example_packages_own_tests_pass(echo_installed: dict[str, Any]) -> None:
    spec = importlib.util.spec_from_file_location("echo_tests", ECHO / "tests" / "test_echo.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    for temperature in (0.0, 1.0):
        module.test_the_output_does_not_change(temperature)
    module.test_nothing_is_left_behind()
    module.test_an_argument_that_makes_no_sense_is_refused()
