"""Builds the CPU kernels: a plain C library beside the Python files, loaded with ctypes.

It needs neither torch nor Python headers. Without a C++ compiler the installation goes on and the package
computes with torch alone (``foredraft.kernels.why_unavailable()`` says so).
"""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

SOURCES = sorted(str(path) for path in Path("src/foredraft/kernels/csrc").glob("*.cpp"))
HEADERS = sorted(str(path) for path in Path("src/foredraft/kernels/csrc").glob("*.h"))

# Contraction stays off: every fused multiply-add is written out, so that all instruction sets give the same bits.
COMPILE = ["-std=c++17", "-O3", "-fPIC", "-fopenmp", "-ffp-contract=off", "-fno-math-errno", "-Wall", "-Wno-psabi"]


class BuildKernels(build_ext):
    """Compiles and links by hand: `-fopenmp` for the compiler but not for the linker, and a fixed file name."""

    def get_ext_filename(self, fullname: str) -> str:
        return os.path.join(*fullname.split(".")) + ".so"

    def build_extension(self, ext: Extension) -> None:
        target = Path(self.get_ext_fullpath(ext.name))
        try:
            self._compile(ext, target)
        except (OSError, subprocess.CalledProcessError) as error:
            print(f"warning: the CPU kernels were not built, torch will do their work: {error}", file=sys.stderr)

    def get_outputs(self) -> list[str]:
        return [path for path in super().get_outputs() if Path(path).exists()]

    def _compile(self, ext: Extension, target: Path) -> None:
        compiler = shlex.split(os.environ.get("CXX", "c++"))
        work = Path(self.build_temp)
        work.mkdir(parents=True, exist_ok=True)
        target.parent.mkdir(parents=True, exist_ok=True)
        objects = [str(work / (Path(source).stem + ".o")) for source in ext.sources]
        running = [
            subprocess.Popen([*compiler, *COMPILE, "-c", source, "-o", made])
            for source, made in zip(ext.sources, objects, strict=True)
        ]
        codes = [process.wait() for process in running]
        for process, code in zip(running, codes, strict=True):
            if code:
                raise subprocess.CalledProcessError(code, process.args)
        subprocess.run([*compiler, "-shared", *objects, "-o", str(target)], check=True)


extension = Extension("foredraft.kernels._foredraft_kernels", SOURCES, depends=HEADERS, optional=True)
setup(ext_modules=[extension] if sys.platform == "linux" else [], cmdclass={"build_ext": BuildKernels})
