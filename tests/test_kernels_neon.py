"""The NEON kernels give the portable path's bits, on ARM or under an emulator of it."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
from pathlib import Path

import pytest

CSRC = Path(__file__).parents[1] / "src/foredraft/kernels/csrc"
CHECK = Path(__file__).with_name("check_neon.cpp")
NATIVE = platform.machine() == "aarch64"
COMPILER = shutil.which("c++" if NATIVE else "aarch64-linux-gnu-g++")
EMULATOR = [] if NATIVE else ["qemu-aarch64", "-L", "/usr/aarch64-linux-gnu", "-cpu"]


@pytest.mark.skipif(COMPILER is None, reason="needs an ARM compiler (Debian: g++-aarch64-linux-gnu)")
@pytest.mark.skipif(
    not NATIVE and shutil.which("qemu-aarch64") is None, reason="needs qemu-aarch64 (Debian: qemu-user)"
)
def test_neon_gives_the_portable_bits(tmp_path: Path) -> None:
    assert COMPILER is not None
    sources = [*sorted(CSRC.glob("linear*.cpp")), CSRC / "pack.cpp", CHECK]
    flags = ["-std=c++17", "-O2", "-ffp-contract=off", "-fno-math-errno", "-Wno-psabi", f"-I{CSRC}"]
    program = tmp_path / "check"
    subprocess.run([COMPILER, *flags, *map(str, sources), "-o", str(program)], check=True, env=os.environ)
    new = subprocess.run(
        [*EMULATOR, *([] if NATIVE else ["max"]), program], capture_output=True, text=True, check=False
    )
    assert (new.returncode, new.stdout.strip()) == (0, "1848 products equal"), new.stderr
    if not NATIVE:  # a processor without dot products is told apart
        old = subprocess.run([*EMULATOR, "cortex-a72", program], capture_output=True, text=True, check=False)
        assert old.returncode == 2, old.stdout


@pytest.mark.skipif(NATIVE or COMPILER is None, reason="needs a cross compiler")
def test_the_whole_library_compiles_for_arm(tmp_path: Path) -> None:
    assert COMPILER is not None
    others = [str(path) for path in sorted(CSRC.glob("*.cpp")) if not path.name.startswith("linear")]
    subprocess.run([COMPILER, "-std=c++17", "-fPIC", "-fopenmp", "-Wno-psabi", "-c", *others], check=True, cwd=tmp_path)
