"""Seconds by size, from few measurements: medians of the last few times, since other work on the
machine makes spikes. A size that was measured only once or twice, or long ago, is tried again if it
could pay. Where seconds go with size they lie on a line through all sizes: of many that are each
known a little, whichever was luckiest would seem best. What earlier requests measured is a `prior`,
which this request's own numbers overrule within a few rounds. Knows neither tokens nor drafts.
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Sequence
from itertools import combinations
from statistics import median

REMEMBERED = 9  # times of one size whose median counts
ENOUGH = 3  # times that outvote a spike
AGREE = 1.1  # two times that differ by less are no spikes
STALE = 128  # times of other sizes after which those of a size are forgotten
SHORTEST = 1e-9  # seconds: a clock may stand still, but nothing is free
ALIKE = 0.01  # a median that moves by less than this share counts as unmoved
ANEW = 16  # times after which all answers are made anew, since some may be of old news by now
EXACT = 16  # sizes from here on are measured together with those next to them, an eighth apart


class Curve:
    """Seconds by size: medians where measured. Elsewhere the prior's, scaled to the nearest
    measured size, or without a prior straight lines.

    `growth`: the least share that each unit beyond measured sizes adds. None: all lie on one line.
    """

    def __init__(self, growth: float | None, prior: Curve | None = None) -> None:
        self._growth, self._prior = growth, prior
        self._believed: set[int] = set()  # sizes whose first time counts already
        self._times: dict[int, deque[float]] = {}
        self._medians: dict[int, float] = {}
        self._sizes: list[int] = []  # that were measured, in order
        self._count = 0
        self._last: dict[int, int] = {}  # the count when each size was measured last
        self._estimates: dict[int, float] = {}  # answers since the last time was taken
        self._trusted: tuple[list[int], list[float]] | None = None  # sizes and seconds, likewise
        self._line: tuple[float, float] | None = None  # start and slope, likewise

    def observe(self, size: int, seconds: float, believe: bool = False) -> bool:
        """Another time of a size. Says whether that changes any answer. `believe`: of a larger size
        than the least it counts at once. To try that again would be costly, and if it was a spike
        only that size is left alone for a while."""
        size = _together(size)
        if believe:
            self._believed.add(size)
        times = self._times.setdefault(size, deque(maxlen=REMEMBERED))
        if self._count - self._last.get(size, self._count) >= STALE:
            times.clear()
        times.append(max(seconds, SHORTEST))
        self._count += 1
        self._last[size] = self._count
        known, now = self._medians.get(size), median(times)
        alike = known is not None and abs(now - known) <= ALIKE * known and len(times) > ENOUGH
        if alike and self._count % ANEW:
            return False
        self.forget()
        self._medians[size] = now
        if size not in self._sizes:  # last: whatever interrupts this, a size here has a median
            insort(self._sizes, size)
        return True

    def forget(self) -> None:
        """What the answers were made of has changed."""
        self._estimates.clear()
        self._trusted = None
        self._line = None

    @property
    def measured(self) -> bool:
        return bool(self._sizes)

    @property
    def known(self) -> bool:
        return self.measured or (self._prior is not None and self._prior.known)

    @property
    def largest(self) -> int:
        """The largest size that was measured, by earlier requests too; 0 if none was."""
        own = self._sizes[-1] if self._sizes else 0
        return max(own, self._prior.largest) if self._prior else own

    def __call__(self, size: int) -> float:
        size = _together(size)
        if size not in self._estimates:
            self._estimates[size] = self._estimate(size)
        return self._estimates[size]

    def between(self, size: float) -> float:
        """Seconds of a size that is an average of several."""
        below = int(size)
        seconds, share = self(below), size - below
        return seconds + share * (self(below + 1) - seconds) if share else seconds

    def _estimate(self, size: int) -> float:
        """The size's own median, if it is to be trusted. Else the lower of it and what others
        suggest: a single time that was a spike must not rule a size out for good."""
        return self._known(size) if self._growth is not None else self._on_line(size)

    def _known(self, size: int) -> float:
        """No more tokens are cheaper than fewer: what is to be trusted rises with size, and what is
        not lies between."""
        if self._trusted is None:
            sizes = [each for each in self._sizes if self.settled(each)]
            medians = [self._medians[each] for each in sizes]
            weights = [len(self._times[each]) for each in sizes]
            self._trusted = sizes, rising(medians, weights)
        sizes, seconds = self._trusted
        at = bisect_left(sizes, size)
        if at < len(sizes) and sizes[at] == size:
            return seconds[at]
        below = seconds[at - 1] if at else 0.0
        above = seconds[at] if at < len(sizes) else math.inf
        return min(max(self._lone(size), below), above)

    def _lone(self, size: int) -> float:
        """Of a size that is not to be trusted, or was not measured."""
        own = self._medians.get(size)
        suggested = self._suggested(size)
        if own is None or suggested is None:
            return own or suggested or 0.0
        return min(own, suggested)

    def settled(self, size: int) -> bool:
        """Whether a size was measured lately, and often enough that it was no spike."""
        size = _together(size)
        times = self._times.get(size, ())
        if self._count - self._last.get(size, 0) >= STALE:
            return False
        if times and size in self._believed and size > self._sizes[0]:
            return True
        return len(times) >= ENOUGH or (len(times) > 1 and max(times) < AGREE * min(times))

    def _on_line(self, size: int) -> float:
        """What the line through all sizes says: the prior's, as much higher or lower as this
        request's times are, or one through its own."""
        if self._line is None:
            weights = [len(self._times[each]) for each in self._sizes]
            if self._prior and self._prior.known:
                ratios = [self._medians[each] / self._prior(each) for each in self._sizes]
                enough = self._believed or sum(weights) >= ENOUGH
                self._line = 0.0, middle(ratios, weights) if enough else 1.0
            else:
                self._line = straight(self._sizes, list(map(self._known, self._sizes)), weights)
        start, slope = self._line
        if self._prior and self._prior.known:
            return slope * self._prior(size)
        return start + slope * size

    def _suggested(self, size: int) -> float | None:
        """What the other sizes, and earlier requests, say of this one."""
        at = bisect_left(self._sizes, size)
        after = at + (size in self._medians)
        below = self._sizes[at - 1] if at else None
        above = self._sizes[after] if after < len(self._sizes) else None
        if self._prior and self._prior.known:
            if below is None and above is None:
                return None if size in self._medians else self._prior(size)
            nearest = min((s for s in (below, above) if s is not None), key=lambda s: abs(s - size))
            return self._prior(size) * self._medians[nearest] / self._prior(nearest)
        return self._nearest(size, below, above)

    def _nearest(self, size: int, below: int | None, above: int | None) -> float | None:
        """By the nearest sizes. Between two, the lower of a line and of growth from below: there
        may be a step between them, or a spike above. Beyond them all it goes on as it went so far,
        since what was never tried must not look too cheap."""
        medians = self._medians
        if below is None:
            share = 1.0 if above is None or self._growth is not None else size / above
            return None if above is None else medians[above] * share
        if self._growth is None:
            grown = medians[below] * size / below
        else:
            grown = medians[below] * (1 + self._growth * (size - below))
        if above is not None:
            share = (size - below) / (above - below)
            return min(grown, (1 - share) * medians[below] + share * medians[above])
        least = self._sizes[0]
        if self._growth is not None and below > least:
            so_far = (medians[below] - medians[least]) / (below - least)
            grown = max(grown, medians[below] + so_far * (size - below))
        return grown


def rising(values: Sequence[float], weights: Sequence[int]) -> list[float]:
    """The nearest values that do not fall: what falls is averaged with what stands before it."""
    blocks: list[tuple[float, int, int]] = []  # value, weight, how many
    for value, weight in zip(values, weights, strict=True):
        block = value, weight, 1
        while blocks and blocks[-1][0] > block[0]:
            before, heavy, count = blocks.pop()
            total = heavy + block[1]
            block = (before * heavy + block[0] * block[1]) / total, total, count + block[2]
        blocks.append(block)
    return [value for value, _, count in blocks for _ in range(count)]


def middle(values: Sequence[float], weights: Sequence[int]) -> float:
    """The median of values that count several times."""
    pairs = sorted(zip(values, weights, strict=True))
    half = sum(weights) / 2
    for value, weight in pairs:
        half -= weight
        if half <= 0:
            return value
    return 0.0


def straight(
    sizes: Sequence[int], seconds: Sequence[float], weights: Sequence[int]
) -> tuple[float, float]:
    """Start and slope of the line nearest to most points: the median of all slopes between two,
    then of where it starts (Theil and Sen). It does not fall, and starts at 0 or above."""
    points = list(zip(sizes, seconds, weights, strict=True))
    pairs = list(combinations(points, 2))
    if not pairs:
        return 0.0, (seconds[0] / sizes[0] if points else 0.0)
    slopes = [(high - low) / (more - less) for (less, low, _), (more, high, _) in pairs]
    slope = max(0.0, middle(slopes, [one * other for (_, _, one), (_, _, other) in pairs]))
    start = middle([time - slope * size for size, time, _ in points], weights)
    if start < 0:
        return 0.0, middle([time / size for size, time, _ in points], weights)
    return start, slope


class Curves:
    """A curve for each number of rows: equally many tokens of more rows read more keys and values,
    and one token more for each row is more work.

    What rows of a number cost that was never seen is expected to go as that of the nearest number
    did. With `growth` sizes are tokens of all rows together, so the curves of all numbers follow
    one through all times, and a size that some rows have tried is known to all.
    """

    def __init__(
        self, growth: float | None, prior: Curves | None = None, told: Curves | None = None
    ) -> None:
        """`told`: hears of every time, instead of the prior."""
        self._growth, self._prior, self._told = growth, prior, told or prior
        self._by_rows: dict[int, Curve] = {}
        self._every = Curve(growth) if growth is not None and prior is None else None
        self._count = 0

    def observe(self, rows: int, size: int, seconds: float) -> bool:
        """Another time of a size, with so many rows. Says whether that changes any answer."""
        self._count += 1
        curve, told, several = self._by_rows.get(rows), self._told, rows > 1
        if curve is None:
            # Told first, so that the curve follows what other numbers of rows will take. A lone
            # row's own times say enough.
            if several and told and not self.of(rows).known:
                told.observe(rows, size, seconds)
                told = None
            expected = self.of(rows)
            prior = self._every or (expected if expected.known else None)
            curve = Curve(self._growth, prior)
        changed = curve.observe(size, seconds, several)
        self._by_rows[rows] = curve  # not before: whatever interrupts this, what is here has a time
        if self._every and self._every.observe(size, seconds, several):
            for each in self._by_rows.values():
                each.forget()
            changed = True
        if told and told.observe(rows, size, seconds):
            curve.forget()
            changed = True
        return changed

    @property
    def known(self) -> bool:
        return bool(self._by_rows) or (self._prior is not None and self._prior.known)

    @property
    def certain(self) -> bool:
        """Whether there are enough times, of earlier requests too, to outvote a spike."""
        return self._count >= ENOUGH or (self._prior is not None and self._prior.certain)

    def of(self, rows: int) -> Curve:
        """The curve of so many rows, or what stands for it while there is none."""
        if rows in self._by_rows:
            return self._by_rows[rows]
        if self._prior and self._prior.known:
            return self._prior.of(rows)
        if not self._by_rows:
            return Curve(self._growth)
        return self._by_rows[min(self._by_rows, key=lambda other: abs(other - rows))]


def _together(size: int) -> int:
    """The size that stands for those next to it."""
    if size < EXACT:
        return size
    step = 1 << (size.bit_length() - 4)
    return (size + step // 2) // step * step
