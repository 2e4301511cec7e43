"""Loads the compiled kernels, if the installation has them, into torch's own thread pool.

The library links no OpenMP runtime of its own: its ``GOMP_*`` symbols resolve to the copy that torch has loaded
already, because two OpenMP pools in one process slow each other many times over.
"""

from __future__ import annotations

import ctypes
import functools
import os
from ctypes import c_double, c_int, c_long, c_size_t, c_uint64, c_void_p
from pathlib import Path

import torch  # noqa: F401  (must be loaded before the library: it brings the OpenMP runtime)

from foredraft.errors import ConfigError
from foredraft.kernels.structs import STRUCTS

LIBRARY = Path(__file__).with_name("_foredraft_kernels.so")
"""Where the build puts the library."""

ABI = 4
"""Must equal ``fd_abi()``: a library left over from an older build is refused, not called."""

SWITCH = "FOREDRAFT_KERNELS"
"""Environment variable: ``auto`` (default: the best that the CPU has), ``avx2`` (at most that), ``portable`` (no vector
instructions) or ``off`` (torch only).
"""

_NAMES = ("portable", "avx2", "avx512", "neon")

_SIGNATURES: dict[str, tuple[object, list[object]]] = {
    "fd_abi": (c_int, []),
    "fd_isa": (c_int, []),
    "fd_format": (c_int, [c_int]),
    "fd_packed_bytes": (c_size_t, [c_int, c_long, c_long]),
    "fd_pack": (None, [c_int, c_void_p, c_long, c_long, c_void_p]),
    "fd_rows": (None, [c_int, c_void_p, c_long, c_void_p, c_long, c_void_p]),
    "fd_pass": (None, [c_void_p, c_void_p]),
    "fd_head": (None, [c_void_p, c_void_p]),
    "fd_race": (c_long, [c_void_p, c_int, c_long, c_uint64, c_uint64, c_int, c_int]),
    "fd_uniforms": (None, [c_uint64, c_uint64, c_uint64, c_uint64, c_long, c_void_p]),
    "fd_law": (
        c_long,
        [c_void_p, c_void_p, c_int, *[c_long] * 2, *[c_void_p] * 5, c_int, c_int],
    ),
    "fd_argmax": (c_long, [c_void_p, c_int, c_long, c_long, c_void_p, c_int, c_int]),
    "fd_masses": (None, [c_void_p, c_int, c_long, c_long, c_void_p, c_void_p, c_void_p, c_void_p, c_int, c_int]),
    "fd_draw": (
        c_long,
        [c_void_p, c_void_p, c_int, c_long, c_double, c_double, c_long, c_double, c_void_p, c_int],
    ),
    "fd_law_draw": (
        c_long,
        [c_void_p, c_void_p, c_int, c_long, c_void_p, c_long, c_double, c_long, c_double, c_void_p, c_int],
    ),
    "fd_law_race": (
        c_long,
        [c_void_p, c_void_p, c_int, c_long, c_void_p, c_long, c_uint64, c_uint64, c_int, c_int],
    ),
    "fd_ceiling": (c_long, [c_int, c_long]),
    "fd_suffix_new": (c_void_p, [c_long]),
    "fd_suffix_free": (None, [c_void_p]),
    "fd_suffix_begin": (None, [c_void_p]),
    "fd_suffix_bytes": (c_size_t, [c_void_p]),
    "fd_suffix_extend": (c_int, [c_void_p, c_void_p, c_long]),
    "fd_suffix_follow": (None, [c_void_p, c_void_p, c_void_p, c_long]),
    "fd_suffix_copy": (
        c_long,
        [c_void_p, c_void_p, c_long, c_double, c_double, c_int, *[c_void_p] * 5],
    ),
    "fd_struct_size": (c_size_t, [c_int]),
    "fd_linear": (
        None,
        [c_int, c_void_p, c_long, c_long, c_void_p, c_long, c_long, c_void_p, c_void_p, c_long, c_int, c_int, c_int],
    ),
}


@functools.cache
def _load() -> tuple[ctypes.CDLL | None, str]:
    """The library and an empty string, or ``None`` and why."""
    mode = _mode()
    if mode == "off":
        return None, f"switched off by {SWITCH}=off"
    if not LIBRARY.exists():
        return None, f"{LIBRARY.name} was not built (no C++ compiler when foredraft was installed?)"
    try:
        library = ctypes.CDLL(str(LIBRARY))
        for name, (result, arguments) in _SIGNATURES.items():
            function = getattr(library, name)
            function.restype, function.argtypes = result, arguments
    except (OSError, AttributeError) as error:
        return None, f"{LIBRARY.name} does not load: {error}"
    if library.fd_abi() != ABI:
        return None, f"{LIBRARY.name} is of another version (ABI {library.fd_abi()}, {ABI} is wanted); install again"
    if [library.fd_struct_size(i) for i in range(len(STRUCTS))] != [ctypes.sizeof(struct) for struct in STRUCTS]:
        return None, f"{LIBRARY.name} lays out its structs differently; install again"
    if mode != "portable" and library.fd_isa() < 1:
        lacks = "this CPU has neither AVX2 and FMA nor NEON with dot products"
        return None, f"{lacks}, and without them torch is faster ({SWITCH}=portable insists)"
    return library, ""


def _mode() -> str:
    mode = os.environ.get(SWITCH, "auto")
    if mode not in ("auto", "avx2", "portable", "off"):
        raise ConfigError(f"unknown value {mode!r}", field=SWITCH, remedy="use auto, avx2, portable or off")
    return mode


def available() -> bool:
    """Whether the compiled kernels are in use; if not, torch does the same sums more slowly."""
    return _load()[0] is not None


def why_unavailable() -> str:
    """The reason in one sentence; empty if the kernels are in use."""
    return _load()[1]


def library() -> ctypes.CDLL:
    """The loaded library. Raises ConfigError if there is none."""
    loaded, reason = _load()
    if loaded is None:
        raise ConfigError(f"the compiled kernels are not in use: {reason}", field="kernels")
    return loaded


@functools.cache
def isa() -> int:
    """Instruction set in use: 3 is NEON with byte dot products, 2 AVX-512 with them (VNNI), 1 AVX2 with FMA, 0 none.
    All give the same bits.
    """
    best, mode = int(library().fd_isa()), _mode()
    if mode == "portable":
        return 0
    return min(best, 1) if mode == "avx2" and best < 3 else best


def isa_name() -> str:
    """``"avx512"``, ``"avx2"``, ``"neon"``, ``"portable"``, or ``"torch"`` if the library is not in use."""
    return _NAMES[isa()] if available() else "torch"


__all__ = ["ABI", "LIBRARY", "SWITCH", "available", "isa", "isa_name", "library", "why_unavailable"]
