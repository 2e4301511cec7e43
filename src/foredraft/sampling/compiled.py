"""The law by the compiled kernels: which requests they can serve, and what they are told of one."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from foredraft.config import SamplingParams
from foredraft.kernels import law as kernel
from foredraft.sampling.processors import Bias, Paths, Penalties


class CompiledLaw:
    """Temperature, filters, and processors that touch a few entries of a row, in one call.

    Args:
        penalties: To be applied to the scores that it is given, as is ``bias``; None for none.
    """

    def __init__(self, params: SamplingParams, penalties: Penalties | None, bias: Bias | None) -> None:
        self._penalties = penalties
        self._bias = bias  # kept: the kernels read its arrays
        self.controls = controls = kernel.Controls(params.temperature, params.top_k, params.top_p, params.min_p, 1.0)
        if penalties is not None:
            controls.repetition = penalties.repetition
            controls.presence = penalties.presence
            controls.frequency = penalties.frequency
            controls.count = penalties.count.ctypes.data
        if bias is not None:
            controls.biased, controls.bias = bias.ids.ctypes.data, bias.values.ctypes.data
            controls.biased_n = len(bias.ids)

    @staticmethod
    def can(params: SamplingParams) -> bool:
        """Whether the kernels have all filters that are asked for. Typical-p is left to the reference."""
        return not params.greedy and params.typical_p >= 1.0

    def __call__(self, scores: Tensor, paths: Paths) -> Tensor | None:
        """``[n, V]`` scores that suit the kernels -> the ``[n, V]`` laws, or None to ask the reference."""
        return kernel.law(self.controls, scores, self._needed(paths))

    def chances(self, scores: Tensor, paths: Paths, tokens: Sequence[int]) -> list[float] | None:
        """The laws' probability of one token in each of the first rows, or None to ask the reference."""
        return kernel.chances(self.controls, scores, self._needed(paths), tokens)

    def draw(
        self, scores: Tensor, row: int, path: Sequence[int], u: float, weight: float, without: int
    ) -> tuple[int, float] | None:
        """:func:`foredraft.kernels.law.draw` from the law of one row, or None to ask the reference."""
        return kernel.law_draw(self.controls, scores, row, self._path(path), u, weight, without)

    def race(self, scores: Tensor, row: int, path: Sequence[int], seed: int, position: int) -> int | None:
        """:func:`foredraft.kernels.race.race` over the law of one row, or None to ask the reference."""
        return kernel.law_race(self.controls, scores, row, self._path(path), seed, position)

    def _path(self, path: Sequence[int]) -> Sequence[int]:
        needed = self._needed((path,))
        return needed[0] if needed else ()

    def _needed(self, paths: Paths) -> Paths | None:
        if self._penalties is None:
            return None
        seen = self._penalties.seen
        self.controls.seen, self.controls.seen_n = seen.ctypes.data, len(seen)
        return paths
