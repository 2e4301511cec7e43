"""How much memory a cache may take by default."""

from __future__ import annotations

import os
from pathlib import Path

import torch

_SHARE = 4
"""A cache takes at most one part in so many of what is free."""


def default_cache_bytes(device: torch.device) -> int:
    """A quarter of the free memory of ``device``, at least 64 MiB."""
    return max(free_bytes(device) // _SHARE, 64 * 2**20)


def free_bytes(device: torch.device) -> int:
    """Memory that can still be had: of the GPU, or of the machine within its container's limit."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    free = _available()
    limit, used = (_number(Path("/sys/fs/cgroup") / name) for name in ("memory.max", "memory.current"))
    return free if limit is None or used is None else min(free, max(limit - used, 0))


def _available() -> int:
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass  # not Linux
    if hasattr(os, "sysconf") and "SC_AVPHYS_PAGES" in os.sysconf_names:
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return 4 * 2**30


def _number(path: Path) -> int | None:
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return None
