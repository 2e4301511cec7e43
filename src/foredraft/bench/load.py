"""Who uses the processors while a cell is measured, and how much memory is free. Linux tells; elsewhere None."""

from __future__ import annotations

import os
from pathlib import Path

from foredraft.machine import facts


def free_memory() -> int | None:
    """Bytes free for use."""
    return facts(measure=False).memory_free


def cpu_seconds(pid: int) -> tuple[float, float] | None:
    """Processor seconds used so far by the whole machine, and by one process and the children it has waited for."""
    try:
        tick = os.sysconf("SC_CLK_TCK")
        machine = Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:]
        busy = sum(int(value) for n, value in enumerate(machine[:8]) if n not in (3, 4))
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return busy / tick, sum(map(int, fields[11:15])) / tick
    except (OSError, ValueError, AttributeError):
        return None
