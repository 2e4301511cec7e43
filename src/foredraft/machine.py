"""What a figure was measured on: versions, processor, memory and its measured speed, devices, and where the code stood.

Every saved result carries :func:`provenance`. Nothing in it names the host, the user or a folder.
"""

from __future__ import annotations

import importlib
import os
import platform
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

PACKAGES = ("foredraft", "torch", "transformers", "tokenizers", "safetensors", "gguf", "numpy")
"""Distributions whose versions can change a figure."""

FLAGS = (
    *("avx2", "fma", "f16c", "avx_vnni", "avx512f", "avx512bw", "avx512_vnni", "avx512_bf16"),
    *("amx_tile", "amx_int8", "amx_bf16", "asimd", "asimddp", "i8mm", "bf16", "sve", "sve2"),
)
"""Processor features that matrix products use, as Linux spells them."""

BANDWIDTH_METHOD = "best of repeated torch sums over a float32 buffer larger than the caches, all torch threads"


@dataclass(frozen=True, slots=True)
class Facts:
    """The machine and the software.

    Attributes:
        versions: ``python`` and each of :data:`PACKAGES` that is installed.
        system: Kernel name and machine type, such as ``Linux x86_64``.
        cpu: Name of the processor.
        cpu_flags: Those of :data:`FLAGS` that it has.
        cores: Processors that this process may use (affinity and container quota).
        torch_threads: Threads of one torch operation.
        memory_total: Bytes of memory that this process may use.
        memory_free: Bytes free for use now, or None if the system does not tell.
        bandwidth: Measured speed of reading memory in bytes a second, or None if not measured.
        bandwidth_method: How.
        devices: ``cpu`` and the accelerators that torch sees.
        kernels: Whether foredraft's own processor kernels can be used.
        kernels_reason: Why not, if they cannot.
    """

    versions: dict[str, str]
    system: str
    cpu: str
    cpu_flags: tuple[str, ...]
    cores: int
    torch_threads: int
    memory_total: int | None
    memory_free: int | None
    bandwidth: float | None
    bandwidth_method: str | None
    devices: tuple[str, ...]
    kernels: bool
    kernels_reason: str | None


def facts(*, measure: bool = True) -> Facts:
    """Looks at the machine; ``measure`` also times its memory, which takes half a second."""
    name, flags = _processor()
    total, free = _memory()
    reason = _kernels_missing()
    return Facts(
        versions=_versions(),
        system=f"{platform.system()} {platform.machine()}",
        cpu=name,
        cpu_flags=flags,
        cores=cores(),
        torch_threads=torch.get_num_threads(),
        memory_total=total,
        memory_free=free,
        bandwidth=read_bandwidth() if measure else None,
        bandwidth_method=BANDWIDTH_METHOD if measure else None,
        devices=_devices(),
        kernels=reason is None,
        kernels_reason=reason,
    )


def vectors(flags: Sequence[str]) -> str:
    """The widest instructions among ``cpu_flags`` that the kernels have code for; else all flags."""
    names = {"avx512_vnni": "AVX-512 with VNNI", "avx2": "AVX2"}
    known = next((said for flag, said in names.items() if flag in flags), "")
    return known or ", ".join(flags) or "no vector instructions"


def provenance(*, measure: bool = True) -> dict[str, Any]:
    """Where a result comes from, ready for JSON: ``command``, ``date`` (UTC), ``commit``, ``dirty`` and ``machine``.

    ``commit`` is None outside a git checkout of foredraft; ``dirty`` says whether tracked files differ from it.
    Folders in the command line are cut down to the last name.
    """
    commit, dirty = _git()
    return {
        "command": command_line(sys.argv),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": commit,
        "dirty": dirty,
        "machine": asdict(facts(measure=measure)),
    }


def command_line(argv: list[str]) -> str:
    """The command as one would type it, without the folders of this machine."""
    if not argv:
        return ""
    program = Path(argv[0])
    # Started as ``python -m package``: argv[0] is the file, which says less than the module.
    name = f"python -m {program.parent.name}" if program.name == "__main__.py" else program.name
    return " ".join([name, *(shlex.quote(_without_folders(arg)) for arg in argv[1:])])


def cores() -> int:
    """Processors that this process may use: its affinity, cut down to the container's quota if there is one."""
    count = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota = _read("/sys/fs/cgroup/cpu.max").split()
    if len(quota) == 2 and quota[0].isdigit():
        count = min(count, max(1, int(quota[0]) // int(quota[1])))
    return count


def read_bandwidth(seconds: float = 0.5, nbytes: int = 1 << 28, device: str = "cpu") -> float:
    """Measured speed of reading memory, bytes a second: how fast weights can come in at best.

    Args:
        seconds: How long to repeat; the best pass counts, because another program can only slow one down.
        nbytes: Size of the buffer; much more than the last-level cache.
        device: A torch device.
    """
    free = _memory()[1]
    if device == "cpu" and free is not None:
        nbytes = min(nbytes, free // 4)
    buffer = torch.ones(max(nbytes // 4, 1 << 16), dtype=torch.float32, device=device)
    buffer.sum().item()
    best = float("inf")
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        start = time.perf_counter()
        buffer.sum().item()  # .item() waits for an accelerator
        best = min(best, time.perf_counter() - start)
    return buffer.numel() * 4 / best


_PATH = re.compile(r"https?://\S+|(?<![\w./\\-])(?:~\w*|\.{1,2}|[A-Za-z]:)?(?:[/\\]+[^\s=,/\\]+)+[/\\]*")
"""A web address (kept), or a path that is absolute or starts with ``~``, ``.`` or ``..``."""


def _without_folders(argument: str) -> str:
    """``--out=/home/me/run.json`` becomes ``--out=…/run.json``; hub ids such as ``Qwen/Qwen2`` stay."""

    def last_name(found: re.Match[str]) -> str:
        text = found[0]
        if text.startswith("http"):
            return text
        if Path(os.path.expanduser(text)) == Path(os.path.expanduser("~")):
            return "~"
        return "…/" + re.split(r"[/\\]+", text.rstrip("/\\"))[-1]

    return _PATH.sub(last_name, argument)


def _versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return found


def _processor() -> tuple[str, tuple[str, ...]]:
    text = _read("/proc/cpuinfo")
    fields = {k.strip().lower(): v.strip() for k, _, v in (line.partition(":") for line in text.splitlines())}
    name = fields.get("model name") or _mac_processor() or platform.processor() or platform.machine() or "unknown"
    present = set((fields.get("flags") or fields.get("features") or "").split())
    return name, tuple(flag for flag in FLAGS if flag in present)


def _mac_processor() -> str:
    if platform.system() != "Darwin":
        return ""
    return _run(["sysctl", "-n", "machdep.cpu.brand_string"]) or ""


def _memory() -> tuple[int | None, int | None]:
    """Total and free bytes, within the container's limit if there is one."""
    lines = dict(re.findall(r"^(\w+):\s+(\d+) kB", _read("/proc/meminfo"), re.MULTILINE))
    total = int(lines["MemTotal"]) * 1024 if "MemTotal" in lines else None
    free = int(lines["MemAvailable"]) * 1024 if "MemAvailable" in lines else None
    if total is None and hasattr(os, "sysconf") and "SC_PHYS_PAGES" in os.sysconf_names:
        total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    limit = _read("/sys/fs/cgroup/memory.max").strip()
    if total is not None and limit.isdigit() and int(limit) < total:
        total = int(limit)
        used = _read("/sys/fs/cgroup/memory.current").strip()
        if free is not None and used.isdigit():
            free = max(0, min(free, total - int(used)))
    return total, free


def _devices() -> tuple[str, ...]:
    found = ["cpu"]
    if torch.cuda.is_available():
        found += [f"cuda:{i} {torch.cuda.get_device_name(i)}" for i in range(torch.cuda.device_count())]
    if torch.backends.mps.is_available():
        found.append("mps")
    return tuple(found)


def _kernels_missing() -> str | None:
    """Why foredraft's processor kernels cannot be used, or None if they can."""
    try:
        kernels = importlib.import_module("foredraft.kernels")
        if kernels.available():
            return None
        return str(kernels.why_unavailable())
    except (ImportError, AttributeError, OSError) as error:
        return f"not built ({type(error).__name__})"


def _git() -> tuple[str | None, bool | None]:
    """The commit of the checkout that this file is tracked in, and whether tracked files differ from it."""
    here = Path(__file__).resolve()
    git = ["git", "-C", str(here.parent)]
    if _run([*git, "ls-files", "--error-unmatch", here.name]) is None:
        return None, None
    commit = _run([*git, "rev-parse", "HEAD"])
    changes = _run([*git, "status", "--porcelain", "--untracked-files=no"])
    return commit, bool(changes) if changes is not None else None


def _run(command: list[str]) -> str | None:
    """What a command prints, stripped; None if it is missing, fails or hangs."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


def _read(path: str) -> str:
    try:
        return Path(path).read_text(errors="replace")
    except OSError:
        return ""
