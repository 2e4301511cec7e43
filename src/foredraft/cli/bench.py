"""``foredraft bench``: foredraft beside other engines, on the same weights, in one run."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer
from rich.status import Status

from foredraft.cli.console import print_json, print_plain, stderr
from foredraft.cli.session import DEFAULT_TARGET, JsonOption
from foredraft.errors import ConfigError

ENGINES = "foredraft,openvino,llama.cpp,vllm,transformers"
LARGER = "qwen2.5-coder-1.5b"
DRAFT_OF = {LARGER: "qwen2.5-coder-0.5b"}


class Lines:
    """Lines on stderr, and on a terminal what is going on just now."""

    def __init__(self, status: Status | None) -> None:
        self._status = status

    def line(self, text: str) -> None:
        stderr().print(text, markup=False, highlight=False)

    def status(self, text: str) -> None:
        if self._status is not None:
            self._status.update(text.replace("[", r"\["))


@contextlib.contextmanager
def _shown() -> Iterator[Lines]:
    console = stderr()
    if not console.is_terminal:
        yield Lines(None)
        return
    with console.status("") as status:
        yield Lines(status)


def _urls(values: list[str]) -> tuple[tuple[str, str], ...]:
    pairs = [value.partition("=") for value in values]
    for value, (name, mark, url) in zip(values, pairs, strict=True):
        if not (name and mark and url.startswith(("http://", "https://"))):
            raise ConfigError(f"{value!r} is no named address", field="url", remedy="write NAME=http://HOST:PORT/v1")
    return tuple((name, url) for name, _, url in pairs)


def _split(field: str, text: str, allowed: tuple[str, ...]) -> tuple[str, ...]:
    names = tuple(name.strip() for name in text.split(",") if name.strip())
    for name in names:
        if name not in allowed:
            raise ConfigError(f"{name!r} is none", field=field, remedy=f"choose from {','.join(allowed)}")
    return names


def bench(
    target: Annotated[
        str, typer.Option("--target", metavar="MODEL", help="Catalogue name or .gguf file.")
    ] = DEFAULT_TARGET,
    draft: Annotated[
        str | None,
        typer.Option(
            "--draft",
            metavar="MODEL",
            help="A smaller model with the same vocabulary.",
            show_default=f"that of the catalogue for {LARGER}",
        ),
    ] = None,
    preset: Annotated[str, typer.Option("--preset", metavar="NAME", help="quick, standard or full.")] = "standard",
    minutes: Annotated[
        float | None,
        typer.Option("--minutes", metavar="N", help="Begin nothing new after N minutes.", show_default="the preset's"),
    ] = None,
    max_tokens: Annotated[
        int | None,
        typer.Option("--max-tokens", metavar="N", help="Most tokens of an answer.", show_default="the preset's"),
    ] = None,
    parts: Annotated[
        str,
        typer.Option(
            "--parts",
            metavar="A,B",
            help="Of curve, speed, batch, context, sampled, warm.",
            show_default="the preset's",
        ),
    ] = "",
    engines: Annotated[str, typer.Option("--engines", metavar="A,B", help="Which engines.")] = ENGINES,
    rows: Annotated[
        list[str] | None,
        typer.Option("--rows", metavar="GLOB", help="Only rows of these names, and their plain ones."),
    ] = None,
    url: Annotated[
        list[str] | None,
        typer.Option("--url", metavar="NAME=URL", help="An OpenAI-compatible server as one more engine."),
    ] = None,
    threads: Annotated[
        int | None, typer.Option("--threads", metavar="N", help="Of every engine.", show_default="all cores")
    ] = None,
    head: Annotated[
        str | None, typer.Option("--head", metavar="DIR", help="An exported EAGLE-3 head for vLLM.")
    ] = None,
    drafter: Annotated[
        list[str] | None,
        typer.Option("--drafter", metavar="NAME[:ARG]", help="One more drafter of foredraft to measure."),
    ] = None,
    fresh: Annotated[bool, typer.Option("--fresh", help="Forget finished cells and begin anew.")] = False,
    redo: Annotated[list[str] | None, typer.Option("--redo", metavar="GLOB", help="Measure these rows again.")] = None,
    only_install: Annotated[bool, typer.Option("--install", help="Only make the environments of the engines.")] = False,
    only_report: Annotated[
        bool, typer.Option("--report", help="Measure nothing; write the report of the finished cells.")
    ] = False,
    out: Annotated[
        Path, typer.Option("--out", metavar="DIR", help="Gets benchmarks/results and docs.", show_default="here")
    ] = Path(),
    json: JsonOption = False,
) -> None:
    """Measure speed beside OpenVINO GenAI, llama.cpp, vLLM and transformers. An interrupted bench goes on."""
    from foredraft.bench import session
    from foredraft.bench.pages import findings
    from foredraft.bench.plan import PARTS
    from foredraft.bench.rows import ENGINES as KNOWN
    from foredraft.bench.tables import View

    for field, value in (("minutes", minutes), ("max_tokens", max_tokens), ("threads", threads)):
        if value is not None and value <= 0:
            raise ConfigError(f"must be above 0 (got {value:g})", field=field)
    options = session.Options(
        target=target,
        draft=draft or DRAFT_OF.get(target),
        preset=preset,
        minutes=minutes,
        tokens=max_tokens,
        parts=_split("parts", parts, PARTS),
        engines=_split("engines", engines, KNOWN),
        only=tuple(rows or ()),
        urls=_urls(url or []),
        threads=threads,
        head=head,
        drafters=tuple(drafter or ()),
        fresh=fresh,
        redo=tuple(redo or ()),
    )
    with _shown() as show:
        if only_install:
            session.install(options.engines, show)
            return
        results = session.report(target, out) if only_report else session.run(options, show, out)
    if json:
        print_json(results.data["summary"])
        return
    print_plain("\n".join(findings(View.of(results.data))))
    print_plain(
        f"\nfigures  {out / 'benchmarks/results' / results.stem}.json\npage     "
        f"{out / 'benchmarks/results' / results.stem}.html"
    )
