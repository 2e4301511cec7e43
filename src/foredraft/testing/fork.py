"""Runs a function once for every outcome of its random numbers, each outcome with its exact probability.

The function is the real one. It is handed :class:`Uniform` objects instead of floats: numbers that are not known yet
beyond an interval. When such a number is compared with a constant that falls into its interval, the comparison has two
outcomes; :func:`outcomes` replays the function until every combination has been seen. Nothing is sampled and nothing
is discretised: probabilities are lengths of intervals, in float64.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NoReturn, TypeVar

T = TypeVar("T")


class Fork:
    """The branch points of one run: those already decided are replayed, a new one takes its first option."""

    def __init__(self, script: Sequence[int]) -> None:
        self.weight = 1.0
        self.taken: list[int] = []
        self.options: list[int] = []
        self._script = script

    def decide(self, weights: Sequence[float]) -> int:
        """Index of the branch to take; ``weights`` are the probabilities of the branches, given the run so far."""
        at = len(self.taken)
        branch = self._script[at] if at < len(self._script) else 0
        self.taken.append(branch)
        self.options.append(len(weights))
        self.weight *= weights[branch]
        return branch


def outcomes(run: Callable[[Fork], T]) -> Iterator[tuple[T, float]]:
    """Every result of ``run`` with its probability; results may repeat, probabilities sum to one."""
    script: list[int] = []
    while True:
        fork = Fork(script)
        result = run(fork)
        if fork.weight > 0.0:
            yield result, fork.weight
        script = fork.taken
        while script and script[-1] + 1 == fork.options[len(script) - 1]:
            script.pop()
        if not script:
            return
        script[-1] += 1


class Uniform:
    """A uniform number on ``[0, 1)``, known only as far as comparisons have asked.

    It can be compared with numbers and multiplied or divided by positive ones, which is all that inverse-CDF draws
    and acceptance tests do. Anything else raises TypeError: a function that does more cannot be enumerated.
    """

    __array_ufunc__ = None  # numpy numbers on the left leave the comparison to us
    __hash__ = None  # type: ignore[assignment]

    def __init__(self, fork: Fork, interval: list[float] | None = None, scale: float = 1.0) -> None:
        self._fork = fork
        self._interval = [0.0, 1.0] if interval is None else interval  # shared by all multiples of this number
        self._scale = scale

    def _below(self, bound: Any) -> bool:
        """Whether the number is below a constant. Equality has probability zero."""
        low, high = self._interval
        cut = float(bound) / self._scale
        if not cut > low:  # also for NaN: every comparison with it is false
            return False
        if cut >= high:
            return True
        share = (cut - low) / (high - low)
        if self._fork.decide((share, 1.0 - share)) == 0:
            self._interval[1] = cut
            return True
        self._interval[0] = cut
        return False

    def __lt__(self, bound: Any) -> bool:
        return self._below(bound)

    __le__ = __lt__

    def __gt__(self, bound: Any) -> bool:
        # "u > NaN" is false like any other comparison with NaN.
        return float(bound) == float(bound) and not self._below(bound)

    __ge__ = __gt__

    def __mul__(self, factor: Any) -> Uniform:
        if not float(factor) > 0.0:
            raise TypeError("a Uniform can only be scaled by a positive number")
        return Uniform(self._fork, self._interval, self._scale * float(factor))

    __rmul__ = __mul__

    def __truediv__(self, divisor: Any) -> Uniform:
        return self * (1.0 / float(divisor))

    def __eq__(self, other: object) -> NoReturn:
        raise TypeError("a Uniform can be compared with < and > only")

    def __float__(self) -> NoReturn:
        raise TypeError("this uniform number has no value yet: compare it or scale it, but do not convert it")
