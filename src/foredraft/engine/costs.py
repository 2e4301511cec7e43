"""What a pass costs, learnt from the passes themselves."""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Callable
from functools import lru_cache

from foredraft.drafters.timing import KEEP, DraftTimes, median

LEVEL_WEIGHT = 0.25
SHAPE_WEIGHT = 0.1
TRUST = 4.0  # one pass may move the estimates by at most this factor: a shared machine has outliers
ALIKE = 1.3  # two measurements further apart than this are no noise: the dearer was disturbed
MOST_TIMES = 10  # measurements that a shape remembers
MOST_PRIORS = 1000  # row counts whose priors are kept: means of ranges of rows move with every pass
DOUBT = 0.98  # what was measured once is believed a little less after every other pass


class PassCosts:
    """Seconds of a pass with what a step does around it, by its rows, kept as ``level · shape(rows)``.

    The level follows every pass quickly: it carries what changes for all row counts at once, such as a longer
    context, a hotter machine or another program on it. The shape (how much dearer n rows are than one) is learnt
    slowly, per row count; of large passes, per range of row counts. So what has not been run for a while stays
    comparable.

    A row count measured only once may have met a disturbance (a first call that compiles, a busy neighbour), and
    would never be run again if it seems dear. So its estimate sinks until it is worth a second try; if the two
    measurements are far apart, the smaller counts.

    Args:
        prior: Rows -> expected cost over that of one row, never decreasing; None where further rows are expected to be
            free. What was measured counts; between and beyond it, and before, the estimate follows the prior's shape.
    """

    def __init__(self, prior: Callable[[float], float] | None = None) -> None:
        self.prior = lru_cache(MOST_PRIORS)(prior or (lambda rows: 1.0))
        self.level = 0.0
        self.shape: dict[int, float] = {}
        self._times: dict[int, int] = {}
        self._once: dict[int, float] = {}  # shapes as measured, of row counts measured once
        self._means: dict[int, float] = {}  # rows of the passes that are kept under one row count
        self._keys: list[int] = []
        self._known: list[float] = []  # their means, ascending, and the shapes without bumps
        self._smooth: list[float] = []
        self._ratios: list[float] = []  # those over the prior's
        self._shapes: dict[float, float] = {}  # asked for since the last pass

    @property
    def largest(self) -> int:
        """Most rows of any measured pass."""
        return max(self.shape, default=0)

    def observe(self, rows: int, seconds: float) -> None:
        """Takes in one measured pass."""
        if seconds <= 0:
            return
        count, rows = rows, _near(rows)
        if not self.shape:
            self.level = seconds
        if rows not in self.shape:
            self.shape[rows] = self._once[rows] = seconds / self.level
        elif rows in self._once:
            first, second = sorted((self._once.pop(rows), seconds / self.level))
            self.shape[rows] = first if second > ALIKE * first else (first + second) / 2
        else:
            ratio = min(max(seconds / (self.level * self.shape[rows]), 1 / TRUST), TRUST)
            self.level *= ratio**LEVEL_WEIGHT
            self.shape[rows] *= ratio ** max(SHAPE_WEIGHT, 1 / (self._times[rows] + 1))
        times = self._times[rows] = min(self._times.get(rows, 0) + 1, MOST_TIMES)
        mean = self._means.get(rows, 0.0)
        self._means[rows] = mean + (count - mean) / times
        self._keys = sorted(self.shape)
        self._known = [self._means[n] for n in self._keys]
        self._doubt(rows)
        self._smooth = self._rising()
        self._ratios = [shape / self.prior(n) for shape, n in zip(self._smooth, self._known, strict=True)]
        self._shapes.clear()

    def _rising(self) -> list[float]:
        """The shapes without bumps: where more rows seem cheaper, both are given their mean, weighed by measurements.

        What was measured once is no more than what is known of further rows. The mean and not the lesser: the least of
        many measurements is cheap by luck, and drafting would go there, and lose.
        """
        blocks: list[tuple[float, int, int]] = []  # mean, measurements, row counts; the largest first
        for n in reversed(self._keys):
            mean, times, members = self.shape[n], self._times[n], 1
            if blocks and n in self._once:
                mean = min(mean, blocks[-1][0])
            while blocks and blocks[-1][0] < mean:
                other, weight, more = blocks.pop()
                mean, times, members = (
                    (mean * times + other * weight) / (times + weight),
                    times + weight,
                    members + more,
                )
            blocks.append((mean, times, members))
        return [mean for mean, _, members in reversed(blocks) for _ in range(members)]

    def _doubt(self, rows: int) -> None:
        """Lets row counts measured once sink, though not under what fewer rows cost."""
        floor = self.shape[self._keys[0]]
        for n in self._keys:
            if n in self._once and n != rows:
                self.shape[n] = min(self.shape[n], max(self.shape[n] * DOUBT, floor))
            floor = max(floor, self.shape[n])

    def estimate(self, rows: float) -> float | None:
        """Seconds of a pass of ``rows`` rows, a mean perhaps; None before any pass was measured.

        Measured cost over prior is linear between measured row counts; beyond them it follows the last slope,
        unless that falls. A pass of more rows that was measured cheaper caps the estimate, so that one disturbed
        measurement cannot stand for long.
        """
        if not self._known:
            return None
        shape = self._shapes.get(rows)
        if shape is None:
            shape = self._shapes[rows] = self._shape(rows)
        return self.level * shape

    def _shape(self, rows: float) -> float:
        known, values = self._known, self._smooth
        at = bisect_left(known, rows)
        if at < len(known) and known[at] == rows:
            return values[at]
        if at == 0 or len(known) == 1:
            return self._ratios[0] * self.prior(rows)
        beyond = at == len(known)
        at = min(at, len(known) - 1)
        left, right = self._ratios[at - 1], self._ratios[at]
        slope = (right - left) / (known[at] - known[at - 1])
        ratio = right + (rows - known[at]) * (max(slope, 0.0) if beyond else slope)
        shape = max(values[at - 1], ratio * self.prior(rows))
        return shape if beyond else min(shape, values[at])


def _near(rows: int) -> int:
    """The row count under which a pass is kept: itself up to 8, then four to an octave.

    Passes of a large batch have a new number of rows in nearly every step. Kept apart, each would be measured once or
    twice, and the cheapest of many such measurements is cheap by luck: drafting would go there, and lose.
    """
    step = 1 << max((rows - 1).bit_length() - 3, 0)
    return (rows + step // 2) // step * step


class DraftCosts:
    """Seconds of drafting.

    A drafter that was not asked in the step before has a prompt or plain tokens to read first. What it takes then is
    no price but a bound of it, and counts as a price only where nothing else can be had.

    Attributes:
        times: Of drafts by their length.
    """

    ENOUGH = 3

    def __init__(self) -> None:
        self.times = DraftTimes()
        self._recent: deque[float] = deque(maxlen=KEEP)
        self._bound = (1, 0.0)  # the latest: tokens and seconds
        self._bounds = 0

    def observe(self, depth: int, seconds: float) -> None:
        """Takes in one draft of requests that were all drafted for in the step before."""
        self._recent.append(seconds / depth)
        self.times.observe(depth, seconds)

    def observe_bound(self, depth: int, seconds: float) -> None:
        """Takes in one draft that others did not lead up to."""
        self._bound = (depth, seconds)
        self._bounds += 1

    @property
    def unsure(self) -> bool:
        """Whether the price rests on so little that one disturbance may have made it."""
        return self.per_token is not None and len(self._recent) < self.ENOUGH

    @property
    def per_token(self) -> float | None:
        """A token's share of the latest drafts; None before drafting was measured."""
        bound = self._bound[1] / self._bound[0]
        if self._recent:
            price = median(self._recent)
            return min(price, bound) if self._bounds else price
        return bound if self._bounds > self.ENOUGH else None

    @property
    def line(self) -> tuple[float, float]:
        """Seconds before the first token, and seconds a token; zeros before drafting was measured."""
        if not self.times:
            return 0.0, self.per_token or 0.0
        setup, each = self.times.setup, self.times.each
        depth, seconds = self._bound
        if self._bounds and seconds < setup + depth * each:
            share = seconds / (setup + depth * each)
            return share * setup, share * each
        return setup, each
