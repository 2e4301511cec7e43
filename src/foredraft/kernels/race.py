"""A request's random numbers, and the coupled rule's draw in one call, without a row of noise in memory."""

from __future__ import annotations

from ctypes import c_double

import torch
from torch import Tensor

from foredraft.kernels import library


def race(p_row: Tensor, seed: int, position: int) -> int:
    """``argmin_x E_x / p_x`` for the noise that ``RequestNoise(seed)`` has at ``position``.

    Args:
        p_row: ``[V]`` probabilities, float32 or float64, on the CPU.

    Returns:
        The token, or -1 if the row has no mass or holds NaN.

    Raises:
        ConfigError: The compiled kernels are not in use (:func:`foredraft.kernels.available`).
    """
    row = p_row.detach().contiguous()
    wide = row.dtype == torch.float64
    compiled, threads = library.library(), torch.get_num_threads()
    return int(compiled.fd_race(row.data_ptr(), wide, row.shape[0], seed, position, threads, library.isa()))


def uniforms(seed: int, purpose: int, first: int, anchor: int, count: int) -> list[float]:
    """``RequestNoise(seed).uniform(purpose, position, anchor)`` of ``count`` positions from ``first`` on."""
    u = (c_double * count)()
    library.library().fd_uniforms(seed, purpose, first, anchor, count, u)
    return list(u)
