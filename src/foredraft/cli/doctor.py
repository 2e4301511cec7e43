"""``foredraft doctor``: what this machine offers, what is missing, and what to do about it."""

from __future__ import annotations

import os
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Literal

from rich.text import Text

from foredraft.cli.console import print_indented, print_json, stdout
from foredraft.cli.session import JsonOption, spinner

if TYPE_CHECKING:
    from foredraft.machine import Facts

LITTLE_MEMORY = 2e9
"""Free bytes below which the demo's model, its cache and torch get tight."""


@dataclass(frozen=True, slots=True)
class Check:
    """One finding; a warning has a remedy."""

    name: str
    level: Literal["ok", "warn"]
    found: str
    remedy: str = ""


def ok(name: str, found: str) -> Check:
    return Check(name, "ok", found)


def size(nbytes: float | None) -> str:
    return "unknown" if nbytes is None else f"{nbytes / 1e9:.1f} GB"


def examine(facts: Facts) -> list[Check]:
    """Judges the facts; each check stands for itself."""
    checks = [
        ok("versions", ", ".join(f"{name} {version}" for name, version in facts.versions.items())),
        ok("system", facts.system),
        ok("processor", f"{facts.cpu} ({', '.join(facts.cpu_flags) or 'no vector features found'})"),
        _threads(facts),
        _memory(facts),
        ok("memory speed", f"{size(facts.bandwidth)}/s read, measured"),
        ok("devices", ", ".join(facts.devices)),
    ]
    return [*checks, _kernels(facts), _default_model(facts)]


def _threads(facts: Facts) -> Check:
    found = f"{facts.cores} usable, {facts.torch_threads} torch thread{'s' * (facts.torch_threads != 1)}"
    if facts.torch_threads > facts.cores:
        return Check(
            "cores", "warn", found, f"set OMP_NUM_THREADS={facts.cores}: more threads than cores slow each other"
        )
    return ok("cores", found)


def _memory(facts: Facts) -> Check:
    found = f"{size(facts.memory_free)} free of {size(facts.memory_total)}"
    if facts.memory_free is not None and facts.memory_free < LITTLE_MEMORY:
        return Check("memory", "warn", found, "close other programs, or lower --max-context and --max-batch")
    return ok("memory", found)


def _kernels(facts: Facts) -> Check:
    from foredraft.kernels.library import SWITCH, isa_name

    chosen = os.environ.get(SWITCH, "auto")
    if facts.kernels and isa_name() == "portable":
        other = f"unset {SWITCH}" if chosen == "portable" else f"set {SWITCH}=off: torch is faster on this processor"
        return Check("kernels", "warn", "foredraft's own, without vector instructions: the same bits, slowly", other)
    if facts.kernels:
        return ok("kernels", f"foredraft's own, with {isa_name().upper()}")
    remedy = f"unset {SWITCH}" if chosen == "off" else "install foredraft again on Linux with a C++ compiler"
    remedy += "; torch needs more time and memory, and near-ties may fall otherwise when it verifies a draft"
    return Check("kernels", "warn", f"torch's only ({facts.kernels_reason or 'not built'})", remedy)


def _default_model(facts: Facts) -> Check:
    from foredraft.models import catalog

    entry = catalog.entries()[0]
    status = catalog.status(entry, verify=True)
    if not status.installed:
        return Check("default model", "warn", f"{entry.name} is not here", f"run: foredraft models fetch {entry.name}")
    if not status.verified:
        remedy = f"delete {status.path} and run: foredraft models fetch {entry.name}"
        return Check("default model", "warn", f"{entry.name} has the wrong hash", remedy)
    found = f"{entry.name}, {entry.nbytes / 1e6:.0f} MB, hash right"
    if facts.bandwidth:
        # Each token of plain decoding reads every weight once.
        found += f"; memory allows {facts.bandwidth / entry.nbytes:.0f} plain tok/s at most"
    return ok("default model", found)


def doctor(json: JsonOption = False) -> None:
    """Check this installation: versions, cores, memory and its measured speed, devices, kernels, default model."""
    with spinner("measuring …"):
        from foredraft.machine import facts

        found = facts()
        checks = examine(found)
    warnings = sum(check.level == "warn" for check in checks)
    if json:
        print_json({"ok": not warnings, "checks": [asdict(check) for check in checks], "facts": asdict(found)})
        return
    console = stdout()
    for check in checks:
        good = check.level == "ok"
        body = Text(check.found)
        if check.remedy:
            body.append(f"\n→ {check.remedy}", style="yellow")
        mark = Text("✓ ", style="green") if good else Text("! ", style="bold yellow")
        print_indented(console, body, label=Text.assemble(mark, (f"{check.name:<15}", "bold")), indent=0)
    console.print()
    verdict = f"{warnings} thing{'s' * (warnings != 1)} to look at, marked !" if warnings else "all well"
    console.print(Text(verdict, style="yellow" if warnings else "green"))
