"""What a round costs and what a draft brings, and the draft length that follows from both.

Every number is a running one: medians of the last few times (other work on the machine makes
spikes) and decaying shares of what was accepted. A length that was measured only once or twice, or
long ago, is tried again if it could pay. What earlier requests measured is a `prior`, which this
request's own numbers overrule within a few rounds. Knows neither models nor drafters.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Sequence
from statistics import median

from ..core.contract import Outcome, RoundTime

REMEMBERED = 9  # times of one size whose median counts
ENOUGH = 3  # times that outvote a spike
STALE = 128  # times of other sizes after which those of a size are forgotten
SHORTEST = 1e-9  # seconds: a clock may stand still, but nothing is free
FADING = 0.97  # what a round weighs in comparison with the next one
TRUST = 4.0  # how many rounds an expectation weighs
# While nothing is known: the chance of the first draft, and each further one's share of that.
FIRST_CHANCE, FALLOFF = 0.4, 0.75
# Rounds until something that did not pay is tried again, doubled each time.
FIRST_LOOK, LAST_LOOK = 8, 128
SOONER = 8  # what divides this wait when a look paid. Not all of it: one draft can be lucky
FIRST_LENGTH = 2  # drafts of a drafter's first try, when nothing is known of what they cost
# While nothing is known: what one more token adds to a pass. Little, so that more is tried.
GROWTH = 0.02
WORSE = 0.7  # of the best rate so far: where looking further ends
CLOSE = 1.1  # a drafter that gains less than this is compared with plain rounds more often
# Rounds with drafts between two plain ones: if in doubt, if it is close, else.
AT_ONCE, SOON, SELDOM = 2, 32, 128


class Curve:
    """Seconds by size: medians where measured. Elsewhere the prior's, scaled to the nearest
    measured size, or without a prior a straight line.

    `growth`: the share that each unit beyond measured sizes adds. None: seconds go with size.
    """

    def __init__(self, growth: float | None, prior: Curve | None = None) -> None:
        self._growth, self._prior = growth, prior
        self._times: dict[int, deque[float]] = {}
        self._medians: dict[int, float] = {}
        self._sizes: list[int] = []  # that were measured, in order
        self._count = 0
        self._last: dict[int, int] = {}  # the count when each size was measured last
        self._estimates: dict[int, float] = {}  # answers since the last time was taken

    def observe(self, size: int, seconds: float) -> None:
        self._estimates.clear()
        times = self._times.setdefault(size, deque(maxlen=REMEMBERED))
        if self._count - self._last.get(size, self._count) >= STALE:
            times.clear()
        times.append(max(seconds, SHORTEST))
        self._count += 1
        self._last[size] = self._count
        self._medians[size] = median(times)
        if size not in self._sizes:  # last: whatever interrupts this, a size here has a median
            insort(self._sizes, size)
        if self._prior:
            self._prior.observe(size, seconds)

    @property
    def known(self) -> bool:
        return bool(self._medians) or (self._prior is not None and self._prior.known)

    def __call__(self, size: int) -> float:
        if size not in self._estimates:
            self._estimates[size] = self._estimate(size)
        return self._estimates[size]

    def _estimate(self, size: int) -> float:
        """The size's own median, if it is to be trusted. Else the lower of it and what others
        suggest: a single time that was a spike must not rule a size out for good."""
        own, fresh = self._medians.get(size), self._count - self._last.get(size, 0) < STALE
        if own is not None and fresh and len(self._times[size]) >= ENOUGH:
            return own
        suggested = self._suggested(size)
        if own is None or suggested is None:
            return own or suggested or 0.0
        return min(own, suggested)

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
        return self._line(size, below, above)

    def _line(self, size: int, below: int | None, above: int | None) -> float | None:
        """By the nearest sizes. Between two, the lower of a line and of growth from below: there
        may be a step between them, or a spike above."""
        medians, guesses = self._medians, []
        if below is not None:
            share = size / below if self._growth is None else 1 + self._growth * (size - below)
            guesses.append(medians[below] * share)
        if above is not None and below is not None:
            share = (size - below) / (above - below)
            guesses.append((1 - share) * medians[below] + share * medians[above])
        elif above is not None:
            guesses.append(medians[above] * (size / above if self._growth is None else 1))
        return min(guesses, default=None)


class Share:
    """How often something happens, lately."""

    def __init__(self) -> None:
        self._hits = self._tries = 0.0

    def fade(self) -> None:
        self._tries *= FADING
        self._hits *= FADING

    def add(self, hit: bool) -> None:
        self._tries += 1
        self._hits += hit

    def expected(self, otherwise: float) -> float:
        """`otherwise` is what to expect while little is known."""
        return (TRUST * otherwise + self._hits) / (TRUST + self._tries)


class CostModel:
    """Tokens per second by the number of drafts a row, for one drafter in one request."""

    def __init__(self, prior: CostModel | None = None, likely: float = FIRST_CHANCE) -> None:
        self._prior, self._likely = prior, likely  # likely: that a first draft is kept, at first
        self.passes: Curve = Curve(GROWTH, prior.passes if prior else None)  # by tokens of all rows
        # by drafts of the longest row, from 1 on
        self.drafting: Curve = Curve(None, prior.drafting if prior else None)
        self._found = Share()  # of the rounds in which it was asked, those with a draft
        self._kept: list[Share] = []  # by place asked for, which a shorter draft does not keep
        self._rates: dict[tuple[int, int, int], list[float]] = {}  # answers since the last round
        self._tested = Share()  # of the guesses that were tested, those kept
        self._own: dict[int, Share] = {}  # the same of each row

    def observe(self, outcome: Outcome, time: RoundTime, asked: Sequence[int]) -> None:
        """One round. `asked`: how much each row was to draft, nothing if others were asked."""
        made = [len(row.draft.tree) - 1 for row in outcome.rows]
        self._rates.clear()
        self.passes.observe(sum(made) + len(made) + time.beside, time.verify + time.host)
        if any(asked):
            self.drafting.observe(max(1, *made), time.draft)
            self._count(any(made), asked, [row.path for row in outcome.rows])
            for row, guesses in zip(outcome.rows, made, strict=True):
                if guesses:
                    self._test(row.row, row.accepted, row.accepted < guesses)

    def _test(self, row: int, kept: int, failed: bool) -> None:
        """So many guesses of a row were kept, and whether the next one was not."""
        for share in (self._tested, self._own.setdefault(row, Share())):
            share.fade()
            for hit in [True] * kept + [False] * failed:
                share.add(hit)

    def forget(self, row: int) -> None:
        """The row has ended. Its number may be another's."""
        self._own.pop(row, None)

    def _count(self, found: bool, asked: Sequence[int], paths: Sequence[Sequence[int]]) -> None:
        self._found.fade()
        self._found.add(found)
        if found:
            self._kept += [Share() for _ in range(len(self._kept), max(asked))]
            for share in self._kept:  # places that are not drafted any more fade too
                share.fade()
            for count, path in zip(asked, paths, strict=True):
                for place in range(count):
                    self._kept[place].add(place + 1 in path)
        if self._prior:
            self._prior._rates.clear()
            self._prior._count(found, asked, paths)

    @property
    def coverage(self) -> float:
        """How often there is a draft at all."""
        return self._found.expected(self._prior.coverage if self._prior else 1.0)

    def chances(self, count: int) -> list[float]:
        """How likely each place in a draft is kept. Unknown places fall off from the one before,
        as those before them did on average if that is less."""
        before = self._prior.chances(count) if self._prior else []
        chances: list[float] = []
        for place in range(count):
            chance = self._likely
            if chances:
                chance = chances[-1] * max(FALLOFF, chances[-1] ** (1 / place))
            chance = before[place] if before else chance
            known = place < len(self._kept)
            chances.append(self._kept[place].expected(chance) if known else chance)
        return chances

    def rates(self, rows: int, most: int, beside: int = 0) -> list[float]:
        """Expected tokens per second of these rows by the number of drafts a row, from 0 on as far
        as it could pay, once a pass was measured. `beside`: tokens of other rows in the same
        pass."""
        key = rows, most, beside
        if key in self._rates:
            return self._rates[key]
        plain, coverage = self.passes(rows + beside), self.coverage
        nothing = (1 - coverage) * (plain + self.drafting(1))
        rates, gained = [rows / plain], 0.0
        for count, chance in enumerate(self.chances(most), start=1):
            gained += chance
            verifying = self.passes(rows * (count + 1) + beside)
            seconds = coverage * (verifying + self.drafting(count)) + nothing
            rates.append(rows * (1 + coverage * gained) / seconds)
            if rates[-1] < WORSE * max(rates):
                break  # ever more drafts would only be worse
        self._rates[key] = rates
        return rates

    def allotted(
        self, rows: Sequence[int], rooms: Sequence[int], most: int, beside: int = 0
    ) -> list[int]:
        """How many drafts each of these rows should get. One more is given where it is likeliest
        to be kept, for as long as more tokens are to be expected per second."""
        chances, coverage, count = self.chances(most), self.coverage, len(rows)
        likelier = [self._likelier(row) for row in rows]
        plain = self.passes(count + beside)
        nothing = (1 - coverage) * (plain + self.drafting(1))
        offers = [(-chances[0] * by, index) for index, by in enumerate(likelier) if rooms[index]]
        heapq.heapify(offers)
        counts, gained, highest = [0] * count, 0.0, count / plain
        chosen = list(counts)
        while offers:
            chance, index = heapq.heappop(offers)
            counts[index] += 1
            gained -= max(chance, -1.0)
            verifying = self.passes(count + sum(counts) + beside)
            seconds = coverage * (verifying + self.drafting(max(counts))) + nothing
            rate = (count + coverage * gained) / seconds
            if rate > highest:
                highest, chosen = rate, list(counts)
            elif rate < WORSE * highest and sum(counts) > count:
                break
            place = counts[index]
            if place < min(rooms[index], most):
                likely = chances[place] * likelier[index] ** (place + 1)
                heapq.heappush(offers, (-likely, index))
        return chosen

    def _likelier(self, row: int) -> float:
        """By how much a row's guesses are kept more often than those of all, lately."""
        everybody = self._tested.expected(self._likely)
        own = self._own.get(row)
        return own.expected(everybody) / everybody if own else 1.0


class Looks:
    """When to look again at what did not pay: ever more rarely, until a look pays."""

    def __init__(self, first: int = FIRST_LOOK) -> None:
        self._waited, self._wait = 0, first
        self._bar: float | None = None

    def due(self, otherwise: float) -> bool:
        """Asked if it seems not to pay in a round. `otherwise`: tokens per second without it."""
        self._waited += 1
        if self._waited < self._wait:
            return False
        self._waited, self._wait = 0, min(LAST_LOOK, max(FIRST_LOOK, 2 * self._wait))
        self._bar = otherwise
        return True

    def learn(self, outcome: Outcome, time: RoundTime) -> None:
        """Told after every round. If that was a look and it paid, the next is soon."""
        seconds = time.draft + time.verify + time.host
        kept = sum(len(row.kept) for row in outcome.rows)
        if self._bar is not None and kept > self._bar * seconds:
            self._wait = max(FIRST_LOOK, self._wait // SOONER)
        self._bar = None


class Checks:
    """When to do without drafts though they pay, to know the other side of every comparison."""

    def __init__(self) -> None:
        self._drafted = 0  # rounds with drafts since the last one without

    def due(self, rates: Sequence[float], tokens: int) -> bool:
        """`rates`: expected by the number of drafts, of which `tokens` are to be made."""
        gain = rates[tokens] / rates[0]
        # More than if all were kept and drafting were free: what is known of plain rounds is wrong.
        if gain > 1 + tokens:
            return self._drafted >= AT_ONCE
        return self._drafted >= (SOON if gain < CLOSE else SELDOM)

    def learn(self, outcome: Outcome) -> None:
        self._drafted = self._drafted + 1 if outcome.drafted else 0


def best(rates: Sequence[float], least: int = 0) -> int:
    """The number of drafts with the highest rate."""
    return max(range(least, len(rates)), key=rates.__getitem__)


def shared(
    costs: CostModel, rows: Sequence[int], rooms: Sequence[int], most: int, beside: int
) -> list[int] | None:
    """A budget that several rows share by their chances. None: there is nothing to share, or too
    little is known."""
    known = costs.passes.known and costs.drafting.known
    if len(rooms) < 2 or len(rows) != len(rooms) or most == 0 or not known:
        return None
    found = costs.allotted(rows, rooms, most, beside)
    return found if any(found) else None
