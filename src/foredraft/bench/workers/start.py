"""Runs a worker in an environment where foredraft is not installed: ``python start.py NAME``.

Only the name ``foredraft`` is made to lead here; nothing else of the environment that foredraft lives in is seen.
"""

from __future__ import annotations

import runpy
import sys
import types
from pathlib import Path

if __name__ == "__main__":
    package = types.ModuleType("foredraft")
    package.__path__ = [str(Path(__file__).resolve().parents[2])]
    sys.modules["foredraft"] = package
    sys.path.pop(0)  # this folder: its modules are no top-level ones
    runpy.run_module(f"foredraft.bench.workers.{sys.argv[1]}", run_name="__main__")
