"""The coupled rule's draw in one call, without a row of noise in memory."""

from __future__ import annotations

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
    return int(library.library().fd_race(row.data_ptr(), wide, row.shape[0], seed, position))
