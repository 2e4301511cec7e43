"""A whole bench: rows and prompts made ready, the plan run, results and pages written."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from foredraft.bench.ceiling import traffic
from foredraft.bench.environments import ENVIRONMENTS, UnavailableError, ensure, home
from foredraft.bench.plan import PRESETS, Preset, plan
from foredraft.bench.results import Results, collect, write
from foredraft.bench.rows import Row, Setting, all_rows, with_paths
from foredraft.bench.runner import Bench, Show
from foredraft.bench.store import Store
from foredraft.bench.weights import gguf_path, label
from foredraft.bench.workloads import Prompt, long_prompt, prompts
from foredraft.errors import ConfigError
from foredraft.machine import cores, provenance, read_bandwidth
from foredraft.models.gguf_file import GGUFFile
from foredraft.models.shape_gguf import shape_from_gguf
from foredraft.models.tokenizer import Tokenizer
from foredraft.models.tokenizer_gguf import tokenizer_from_gguf

MARGIN = 128
"""Tokens of context beyond the longest prompt and its answer."""

WARM_UP = Prompt(
    "warm-up",
    "warm-up",
    "written for this project",
    "Apache-2.0",
    [{"role": "user", "content": "Write the word tree six times: tree tree tree"}],
)


@dataclass(frozen=True, slots=True)
class Options:
    """What the command line says.

    Attributes:
        target: Catalogue name or ``.gguf`` file.
        draft: A smaller model with the same vocabulary, or None.
        preset: Name in :data:`~foredraft.bench.plan.PRESETS`.
        minutes: Overrides the preset's.
        tokens: Overrides the preset's.
        parts: Overrides the preset's.
        engines: Which engines.
        only: Glob patterns of row names; empty for all.
        urls: Name and base address of OpenAI-compatible servers.
        threads: Of every engine; None for all cores.
        head: Folder of an exported EAGLE-3 head for vLLM.
        drafters: More drafters of foredraft to measure.
        fresh: Forget finished cells.
        redo: Glob patterns of rows whose finished cells are forgotten.
    """

    target: str
    draft: str | None = None
    preset: str = "standard"
    minutes: float | None = None
    tokens: int | None = None
    parts: tuple[str, ...] = ()
    engines: tuple[str, ...] = ()
    only: tuple[str, ...] = ()
    urls: tuple[tuple[str, str], ...] = ()
    threads: int | None = None
    head: str | None = None
    drafters: tuple[str, ...] = ()
    fresh: bool = False
    redo: tuple[str, ...] = ()


def chosen_preset(options: Options) -> Preset:
    """The preset with what the options override.

    Raises:
        ConfigError: No preset has that name.
    """
    if options.preset not in PRESETS:
        raise ConfigError(f"{options.preset!r} is none", field="preset", remedy=f"use {', '.join(PRESETS)}")
    preset = PRESETS[options.preset]
    changes: dict[str, Any] = {"minutes": options.minutes, "tokens": options.tokens, "parts": options.parts}
    return replace(preset, **{name: value for name, value in changes.items() if value})


def store_of(target: str, fresh: bool = False) -> Store:
    """The unfinished or finished cells of a target's bench on this machine."""
    return Store(home() / "runs" / label(target) / "cells.jsonl", fresh)


def install(engines: Sequence[str], show: Show) -> None:
    """Makes the environments, one after the other; what cannot be made is said."""
    for engine in engines:
        if engine not in ENVIRONMENTS:
            continue
        try:
            ensure(engine, show.line)
            show.line(f"{engine}: ready")
        except UnavailableError as reason:
            show.line(f"{engine}: not available: {reason}")


def run(options: Options, show: Show, folder: Path | None) -> Results:
    """Measures until the plan is done or the time is up, and writes what there is, also after an interruption.

    Args:
        options: What to measure.
        show: Progress.
        folder: Root of a checkout to write ``benchmarks/results`` and ``docs`` in, or a folder for all of it.

    Raises:
        ConfigError, UnavailableError: An option or the target is at fault.
        KeyboardInterrupt: Passed on after the results were written.
    """
    started = time.monotonic()
    preset = chosen_preset(options)
    deadline = None if preset.minutes is None else started + 60 * preset.minutes
    threads = options.threads or cores()
    gguf = gguf_path(options.target)
    shape = shape_from_gguf(GGUFFile(gguf))
    contexts = [size for size in preset.contexts if size + preset.tokens + MARGIN <= shape.max_positions]
    preset = replace(preset, contexts=tuple(contexts))
    longest = max([*contexts, 1024]) + preset.tokens + MARGIN
    origin = provenance(measure=False)
    flags = origin["machine"]["cpu_flags"]
    setting = Setting(
        options.target,
        options.draft,
        threads,
        longest,
        show.line,
        options.head,
        options.drafters,
        bfloat16="avx512bw" in flags or "avx2" not in flags,
    )
    rows = _chosen(all_rows(setting, options.engines, options.urls), options.only)
    tokenizer = tokenizer_from_gguf(GGUFFile(gguf).metadata, str(gguf))
    if tokenizer is None:
        raise ConfigError("has no tokenizer", field="target", remedy="use a complete GGUF")
    store = store_of(options.target, options.fresh)
    for pattern in options.redo:
        show.line(f"{pattern}: {store.forget(pattern)} cells forgotten")
    bench = Bench(rows, _with_ids(tokenizer, contexts), store, show, threads, origin["commit"])
    bandwidths = [_bandwidth(threads)]
    try:
        size = gguf.stat().st_size
        bench.prepare(lambda row: _memory(row, size), lambda row: with_paths(row, setting))
        show.line(f"{len(bench.loaded)} rows loaded after {(time.monotonic() - started) / 60:.1f} min")
        finished = bench.run(plan(rows, preset), deadline)
        show.line("the plan is done" if finished else "the time is up; the same command goes on from here")
    finally:
        bench.close()
        bandwidths.append(_bandwidth(threads))
        store.add("run", origin | {"preset": options.preset, "threads": threads, "bandwidth": bandwidths})
        results = collect(options.target, store, traffic(gguf), folder)
        write(results, folder)
    return results


def report(target: str, folder: Path | None) -> Results:
    """Writes results and pages again from the finished cells."""
    results = collect(target, store_of(target), traffic(gguf_path(target)), folder)
    write(results, folder)
    return results


def _chosen(rows: Sequence[Row], patterns: Sequence[str]) -> list[Row]:
    """Rows whose name matches a pattern; each speculative row brings its plain one."""
    if not patterns:
        return list(rows)
    named = [row for row in rows if any(fnmatch(row.name, pattern) for pattern in patterns)]
    if not named:
        names = ", ".join(row.name for row in rows)
        raise ConfigError(f"no row matches {' or '.join(patterns)}", field="rows", remedy=f"choose from: {names}")
    wanted = {row.name for row in named} | {row.baseline for row in named}
    return [row for row in rows if row.name in wanted]


def _with_ids(tokenizer: Tokenizer, contexts: Sequence[int]) -> dict[str, tuple[Prompt, list[int]]]:
    every = [WARM_UP, *prompts(), *(long_prompt(size, tokenizer) for size in contexts)]
    return {prompt.id: (prompt, tokenizer.chat(prompt.messages)) for prompt in every}


def _memory(row: Row, size: int) -> int:
    """Bytes that loading a row takes at most: weights as the engine holds them while it converts them, and 1.2 GB."""
    return int(1.2e9 + (2.2 if row.engine in ("foredraft", "llama.cpp") else 7) * size)


def _bandwidth(threads: int) -> float:
    """Bytes a second with as many threads as the engines have."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        return read_bandwidth(seconds=1.0)
    finally:
        torch.set_num_threads(before)
