"""Loading: one OpenMP runtime in the process, and clear reasons when there is no library."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from foredraft.errors import ConfigError
from foredraft.kernels import available, isa_name, library, why_unavailable

CHECK = """
import torch
from foredraft.kernels import PackedLinear, available, isa_name, why_unavailable
torch.set_num_threads(2)
y = PackedLinear.from_float(torch.ones(64, 64))(torch.ones(2, 64))
assert (y == 64).all()
files = {line.split()[-1] for line in open("/proc/self/maps")}
print(available(), isa_name(), repr(why_unavailable()), sum("gomp" in file or "iomp" in file for file in files))
"""


def run(switch: str) -> str:
    environment = {**os.environ, library.SWITCH: switch}
    done = subprocess.run([sys.executable, "-c", CHECK], env=environment, capture_output=True, text=True, check=False)
    return done.stdout.strip() or done.stderr


def test_the_reason_and_the_state_agree() -> None:
    assert available() == (why_unavailable() == "")
    assert (isa_name() == "torch") == (not available())


@pytest.mark.skipif(not available(), reason="no compiled kernels")
@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="needs /proc")
def test_torchs_openmp_is_the_only_one() -> None:
    assert run("auto") == f"True {isa_name()} '' 1"


@pytest.mark.skipif(isa_name() not in ("avx2", "avx512"), reason="needs vector instructions")
def test_at_most_avx2() -> None:
    assert run("avx2").startswith("True avx2 ")


def test_switched_off() -> None:
    assert run("off").startswith("False torch 'switched off by FOREDRAFT_KERNELS=off'")


def test_unknown_switch_is_refused() -> None:
    assert "FOREDRAFT_KERNELS: unknown value 'fast'; use auto, avx2, portable or off" in run("fast")


def test_asking_for_a_missing_library(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    library._load.cache_clear()
    monkeypatch.setattr(library, "LIBRARY", tmp_path / "none.so")
    try:
        assert not available()
        with pytest.raises(ConfigError, match="was not built"):
            library.library()
        (tmp_path / "none.so").write_bytes(b"not a library")
        library._load.cache_clear()
        assert "does not load" in why_unavailable()
    finally:
        library._load.cache_clear()
