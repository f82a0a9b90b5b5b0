"""What a round costs and what a draft brings, measured while it runs; the draft length with the most tokens per second follows.

Every number is a running one: medians of the last few times (other work on the machine makes spikes), decaying shares of what
was accepted. What earlier requests found is a `prior`: the shape of the costs and the chances to begin with, which this
request's own numbers overrule within a few rounds. Knows neither models nor drafters.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from statistics import median

from ..contract import Outcome, RoundTime

REMEMBERED = 9  # times of one size whose median counts
FADING = 0.97  # what a round weighs in comparison with the next one
TRUST = 4.0  # how many rounds an expectation weighs
FIRST_CHANCE, FALLOFF = 0.4, 0.75  # of the first draft to be kept, and of each further one as a share, while nothing is known
FIRST_LOOK, LAST_LOOK = 8, 1024  # rounds until something that did not pay is tried again; twice as many each time
GROWTH = 0.02  # what one more token adds to a pass, as a share, while nothing is known: little, so that more is tried


class Curve:
    """Seconds by size: medians where measured; elsewhere the prior's, scaled to what was measured nearest, or a straight line.

    `growth` is what each unit beyond the measured sizes adds, as a share; None if seconds are in proportion to size.
    """

    def __init__(self, growth: float | None, prior: Curve | None = None) -> None:
        self._growth, self._prior = growth, prior
        self._times: dict[int, deque[float]] = {}
        self._medians: dict[int, float] = {}

    def observe(self, size: int, seconds: float) -> None:
        self._times.setdefault(size, deque(maxlen=REMEMBERED)).append(seconds)
        self._medians[size] = median(self._times[size])
        if self._prior:
            self._prior.observe(size, seconds)

    @property
    def known(self) -> bool:
        return bool(self._medians) or (self._prior is not None and self._prior.known)

    def __call__(self, size: int) -> float:
        if size in self._medians:
            return self._medians[size]
        prior = self._prior if self._prior and self._prior.known else None
        if not self._medians:
            return prior(size) if prior else 0.0
        if prior:
            nearest = min(self._medians, key=lambda known: abs(known - size))
            return prior(size) * self._medians[nearest] / prior(nearest)
        return self._line(size)

    def _line(self, size: int) -> float:
        below = max((known for known in self._medians if known < size), default=None)
        above = min((known for known in self._medians if known > size), default=None)
        if below is None or above is None:
            end = below or above
            assert end is not None
            share = size / end if self._growth is None else 1 + self._growth * max(0, size - end)
            return self._medians[end] * share
        share = (size - below) / (above - below)
        return (1 - share) * self._medians[below] + share * self._medians[above]


class Share:
    """How often something happens, lately."""

    def __init__(self) -> None:
        self._hits = self._tries = 0.0

    def add(self, hit: bool) -> None:
        self._tries = FADING * self._tries + 1
        self._hits = FADING * self._hits + hit

    def expected(self, otherwise: float) -> float:
        """`otherwise` is what to expect while little is known."""
        return (TRUST * otherwise + self._hits) / (TRUST + self._tries)


class CostModel:
    """Tokens per second by the number of drafts a row, for one drafter in one request."""

    def __init__(self, prior: CostModel | None = None) -> None:
        self._prior = prior
        self.passes: Curve = Curve(GROWTH, prior.passes if prior else None)  # by tokens of all rows
        self.drafting: Curve = Curve(None, prior.drafting if prior else None)  # by drafts of the longest row, from 1 on
        self._found = Share()  # of the rounds in which it was asked, those in which it had something to say
        self._kept: list[Share] = []  # by place in the draft

    def observe(self, outcome: Outcome, time: RoundTime, asked: bool) -> None:
        """One round; `asked` says whether anything was to be drafted."""
        made = [len(tokens) for tokens in outcome.draft.tokens]
        self.passes.observe(sum(made) + len(made), time.verify + time.host)
        if asked:
            self.drafting.observe(max(1, *made), time.draft)
            self._count(made, outcome.accepted)

    def _count(self, made: Sequence[int], accepted: Sequence[Sequence[int]]) -> None:
        self._found.add(any(made))
        for count, kept in zip(made, accepted, strict=True):
            self._kept += [Share() for _ in range(len(self._kept), count)]
            for place in range(count):
                self._kept[place].add(place in kept)
        if self._prior:
            self._prior._count(made, accepted)

    @property
    def coverage(self) -> float:
        """How often there is a draft at all."""
        return self._found.expected(self._prior.coverage if self._prior else 1.0)

    def chances(self, count: int) -> list[float]:
        """Of each place in a draft, how likely it is kept. What is not known yet falls off from the place before."""
        before = self._prior.chances(count) if self._prior else []
        found: list[float] = []
        for place in range(count):
            otherwise = before[place] if before else found[-1] * FALLOFF if found else FIRST_CHANCE
            found.append(self._kept[place].expected(otherwise) if place < len(self._kept) else otherwise)
        return found

    def rates(self, rows: int, most: int) -> list[float]:
        """Expected tokens per second of all rows, by the number of drafts a row, from 0 on; only once a pass was measured."""
        plain, coverage = self.passes(rows), self.coverage
        rates, gained = [rows / plain], 0.0
        for count, chance in enumerate(self.chances(most), start=1):
            gained += chance
            drafted = self.passes(rows * (count + 1)) + self.drafting(count)
            seconds = coverage * drafted + (1 - coverage) * (plain + self.drafting(1))
            rates.append(rows * (1 + coverage * gained) / seconds)
        return rates


class Looks:
    """When to look again at what did not pay: rarely, and ever more so."""

    def __init__(self, first: int = FIRST_LOOK) -> None:
        self._waited, self._wait = 0, first

    def due(self) -> bool:
        """Asked once a round in which it seems not to pay."""
        self._waited += 1
        if self._waited < self._wait:
            return False
        self._waited, self._wait = 0, min(LAST_LOOK, max(FIRST_LOOK, 2 * self._wait))
        return True


def best(rates: Sequence[float], least: int = 0) -> int:
    """The number of drafts with the highest rate."""
    return max(range(least, len(rates)), key=rates.__getitem__)
