"""``foredraft serve --engine vllm``: vLLM's server, from our options."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import typer

from foredraft.cli.console import print_note, print_plain, print_warning, stderr
from foredraft.cli.options import Given, collect, field_types
from foredraft.cli.session import EngineOptions
from foredraft.errors import ConfigError
from foredraft.server.config import ServerConfig

if TYPE_CHECKING:
    from foredraft.scaleout.options import ScaleOptions

NOTE_EVERY = 15.0
"""Seconds between two notes that the server is still starting."""


def only_vllm(given: Given) -> None:
    """Raises ConfigError if an option of vLLM's is given without ``--engine vllm``."""
    from foredraft.scaleout.options import ScaleOptions

    for field in set(field_types(ScaleOptions)) - set(field_types(EngineOptions)):
        if field in given and field != "engine":
            raise ConfigError("is for vLLM only", field=field, remedy="add --engine vllm, or drop it")


def serve(target: str, drafter: str | None, given: Given, scale: ScaleOptions) -> None:
    """Starts vLLM, streams its log, waits for it, and ends with its exit code."""
    from foredraft.scaleout import process, translate

    options: dict[str, Any] = collect(ServerConfig, given) | collect(EngineOptions, given)
    ServerConfig(**collect(ServerConfig, given))
    EngineOptions(**collect(EngineOptions, given))  # values are judged before anything is translated
    if options.get("port") == 0 and not scale.dry_run:
        options["port"] = process.free_port(options.get("host", "127.0.0.1"))
    launch = translate.launch(target, drafter, options, scale, os.environ)
    interpreter = process.probe(process.find_python(scale.vllm_python), launch.modules)
    words = process.command(interpreter, launch)
    for note in launch.notes:
        print_warning(note)
    if scale.dry_run:
        print_plain(process.shown(words, launch))
        return
    process.check(interpreter, launch)
    stderr().print(f"starting vLLM: {process.shown(words, launch)}", soft_wrap=True, markup=False)
    child = process.Child(words, launch.secrets, patience=options.get("drain_timeout", 60.0) + 30.0)
    last = 0.0

    def waiting(seconds: float) -> None:
        nonlocal last
        if seconds - last >= NOTE_EVERY:
            last = seconds
            print_note(f"vLLM is starting: {seconds:.0f} s")

    with child.signals():
        if process.wait_ready(child, launch.url, waiting):
            drafting = f" with drafter {launch.drafter}" if launch.drafter else ""
            keyless = "" if launch.secrets else "; no API key needed"
            line = f"serving {launch.name}{drafting} by vLLM on {launch.url}/v1{keyless}"
            stderr().print(line, soft_wrap=True, markup=False)
        code = child.wait()
    if code:
        raise typer.Exit(code)
