"""What a round costs and what a draft brings, and the draft length that follows from both.

Costs are running medians (curves.py), chances decaying shares of what was accepted. What earlier
requests measured is a `prior`, which this request's own numbers overrule within a few rounds. Knows
neither models nor drafters.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import NamedTuple

from ..core.contract import Outcome, RoundTime
from ..core.price import Price
from ..core.tree import Tree
from .curves import Curves
from .shares import FADING, Places, Share

MOST = 48  # drafts for a row in one round, beyond which nothing was seen to pay
FIRST_CHANCE = 0.4  # of the first draft, while nothing is known
# Drafts of a drafter's first try, when nothing is known of what they cost: of a row, of all rows.
FIRST_LENGTH, FIRST_TOKENS = 2, 8
# While nothing is known: what one more token adds to a pass. Little, so that more is tried.
GROWTH = 0.02
# The same of a guess of several rows, in tokens: a few likely ones tell what passes take.
FIRST_PRICE = 0.5
FURTHER = 2  # times the largest pass that was measured: no larger one is tried
WORSE = 0.7  # of the best rate so far: where looking further ends
CLEARLY_MORE = 0.25  # tokens, of a pass: fewer more of them are lost in what passes differ by
RARE = 0.02  # of the rounds with a draft: places that are filled in fewer of them change nothing
HARDLY = 1.03  # what drafts have to gain, since all of this is measured and may be a little wrong
CLOSE = 1.1  # a drafter that gains less than this is compared with plain rounds more often
# What a guess of a lone row has to bring, as a multiple of what it costs: times without their
# spikes are too low, and of guesses that seem worth it some are so by luck. Of several rows some
# guess nothing, so that those of the others cost less than their price says.
PAYING = 1.3


class CostModel:
    """Tokens per second by the number of drafts a row, for one drafter in one request."""

    def __init__(
        self, prior: CostModel | None = None, likely: float = FIRST_CHANCE, fading: float = FADING
    ) -> None:
        """`likely`: that a first draft is kept, while nothing is known."""
        self._prior, self._likely = prior, likely
        # by tokens of all rows; and by drafts of a row, from 1 on
        self.passes: Curves = Curves(GROWTH, prior.passes if prior else None)
        self.drafting: Curves = Curves(None, prior.drafting if prior else None)
        # both by how long requests' texts were
        self._behind: dict[int, tuple[Curves, Curves]] = {}
        self._found = Share()  # of the rounds in which it was asked, those with a draft
        # Of each place that was asked for: is a guess kept there, and is there one at all?
        self._kept: Places = Places(likely, fading, prior._kept if prior else None)
        self._there: Places = Places(1.0, fading, prior._there if prior else None)
        self._rates: dict[tuple[int, int, int], list[float]] = {}  # answers since the last round
        self._tested = Share()  # of the guesses that were tested, those kept
        self._own: dict[int, Share] = {}  # the same of each row

    def begin(self, length: int) -> None:
        """What passes and drafts take behind texts that are about so long is told from earlier
        requests with such texts, as long ones would make drafts look dear behind short ones. Before
        any they are thought to take what they take behind shorter texts, so that they are tried."""
        if self._prior:
            known, about = self._prior._behind, length.bit_length()
            passes, drafting = known.setdefault(about, (Curves(GROWTH), Curves(None)))
            timed = [key for key in known if key <= about and known[key][1].known]
            self.passes = Curves(GROWTH, passes)
            self.drafting = Curves(None, known[max(timed, default=about)][1], drafting)

    def observe(self, outcome: Outcome, time: RoundTime, asked: Sequence[int]) -> None:
        """One round. `asked`: how much each row was to draft, nothing if others were asked."""
        rows, size, seconds, _ = pass_of(outcome, time)
        changed = self.passes.observe(rows, size, seconds)
        if changed or any(asked):
            self._rates.clear()
        if any(asked):
            drafts = [len(row.draft.tree) - 1 for row in outcome.rows]
            # rows that were asked for as much end by themselves: what so many take on average
            some = round(sum(drafts) / rows) if len(set(asked)) == 1 else max(drafts)
            self.drafting.observe(rows, max(1, some), time.draft)
            paths = {row.row: row.path for row in outcome.rows}
            self._learn({row.row: row.draft.tree for row in outcome.rows}, paths, asked)

    def hear(self, passes: Sequence[Pass]) -> None:
        """Passes in which nobody drafted, or another did. Of what that one's took only sizes count
        that were not tried with this one."""
        for each in passes:
            new = not each.drafted or not self.passes.of(each.rows).settled(each.tokens)
            if new and self.passes.observe(each.rows, each.tokens, each.seconds):
                self._rates.clear()

    def tried(
        self, trees: Mapping[int, Tree], paths: Mapping[int, Sequence[int]], asked: int
    ) -> None:
        """Guesses by row that were not verified, and those of them that came true. So many were
        `asked` for."""
        self._rates.clear()
        self._learn(trees, paths, [asked] * len(paths))

    def _learn(
        self, trees: Mapping[int, Tree], paths: Mapping[int, Sequence[int]], asked: Sequence[int]
    ) -> None:
        """Guesses by row, and those of them that were kept. `asked`: how many, in the rows' order
        of `paths`."""
        guessed = [len(trees[row]) - 1 for row in paths]
        self._count(asked, guessed, list(paths.values()))
        for row, path in paths.items():
            kept, guesses = len(path) - 1, len(trees[row]) - 1
            if guesses:
                self._test(row, kept, kept < guesses)

    def _test(self, row: int, kept: int, failed: bool) -> None:
        """So many guesses of a row were kept, and whether the next one was not."""
        for share in (self._tested, self._own.setdefault(row, Share())):
            share.fade()
            for hit in [True] * kept + [False] * failed:
                share.add(hit)

    def forget(self, row: int) -> None:
        """The row has ended. Its number may be another's."""
        self._own.pop(row, None)

    def _count(
        self, asked: Sequence[int], guessed: Sequence[int], paths: Sequence[Sequence[int]]
    ) -> None:
        """Of each row what was asked for, how much of it there was, and what was kept."""
        self._found.fade()
        self._found.add(any(guessed))
        if any(guessed):
            self._kept.count(zip(asked, (path[1:] for path in paths), strict=True))
            self._there.count(zip(asked, (range(1, n + 1) for n in guessed), strict=True))
        if self._prior:
            self._prior._rates.clear()
            self._prior._count(asked, guessed, paths)

    @property
    def known(self) -> bool:
        """Whether any pass and any draft was timed."""
        return self.passes.known and self.drafting.known

    @property
    def coverage(self) -> float:
        """How often there is a draft at all."""
        return self._found.expected(self._prior.coverage if self._prior else 1.0)

    def chances(self, count: int) -> list[float]:
        """How likely each of the first places in a draft is kept."""
        return [self._kept[place] for place in range(count)]

    def rates(self, rows: int, most: int, beside: int = 0) -> list[float]:
        """Expected tokens per second of these rows by the number of drafts a row, from 0 on as far
        as it could pay, once a pass was measured. `beside`: tokens of other rows in the same
        pass."""
        # room shrinks from round to round, and fewer drafts are no other question
        key = rows, max(most, MOST), beside
        if key not in self._rates:
            self._rates[key] = self._all_rates(*key)
        return self._rates[key][: most + 1]

    def _all_rates(self, rows: int, most: int, beside: int) -> list[float]:
        """The same, worked out."""
        passes, drafting, coverage = self.passes.of(rows), self.drafting.of(rows), self.coverage
        plain = passes(rows + beside)
        nothing = (1 - coverage) * (plain + drafting(1))
        highest, reach = rows / plain, FURTHER * passes.largest
        rates, gained, there = [highest], 0.0, 0.0
        for place in range(most):
            gained += self._kept[place]
            there += self._there[place]
            size = rows * (1 + there) + beside
            if place and (size > reach or self._there[place] < RARE):
                break
            seconds = coverage * (passes.between(size) + drafting.between(there)) + nothing
            rates.append(rows * (1 + coverage * gained) / seconds)
            highest = max(highest, rates[-1])
            if rates[-1] < WORSE * highest:
                break  # ever more drafts would only be worse
        return rates

    def rate_of(self, expected: float, count: int, beside: int = 0) -> float:
        """Tokens per second of a lone row in a round with so many guesses, of which so many are
        expected to be kept."""
        seconds = self.passes.of(1)(1 + count + beside) + self.drafting.of(1)(max(1, count))
        return (1 + expected) / seconds

    def price(
        self, rows: int, count: int, most: int, beside: int = 0, otherwise: float = 0.0
    ) -> Price | None:
        """What up to so many guesses of each row cost, drafting them and in the pass, by the tokens
        per second that are to be expected if each may draft at `most`, or `otherwise`. None while
        nothing is known of it and a row is alone."""
        if not self.known:
            return Price([FIRST_PRICE * n for n in range(count + 1)]) if rows > 1 else None
        passes = self.passes.of(rows)
        worth = max(otherwise, *self.rates(rows, most, beside)) / rows
        margin = PAYING if rows == 1 else 1.0
        drafting = self.drafting.of(rows)
        seconds = [passes(rows * (1 + n) + beside) + drafting(n) for n in range(1, count + 1)]
        plain = passes(rows + beside) + drafting(1)  # it is asked in any case
        dearest = accumulate([plain, *seconds], max)
        return Price([margin * worth * (each - plain) for each in dearest], margin)

    def supposed(self, rows: int, most: int, beside: int, share: float) -> float:
        """The most tokens per second that drafts of these rows would bring: what to think of it
        while it was hardly timed. If it never was, a draft takes the `share` of a pass without
        drafts that it reads, and all of it where passes take longer with every token."""
        passes, gained, found = self.passes.of(rows), 0.0, [0.0]
        drafting = self.drafting.of(rows) if self.drafting.known else None
        plain = passes(rows + beside)
        if share:
            growth = min(1.0, passes(2 * rows + beside) / plain - 1)
            share += (1 - share) * max(0.0, growth)
        for count in range(1, most + 1):
            size = rows * (count + 1) + beside
            if size > FURTHER * passes.largest and count > 1:
                break
            gained += self._kept[count - 1]
            seconds = drafting(count) if drafting else count * share * plain
            found.append(rows * (1 + gained) / (passes(size) + seconds))
        return max(found)

    def needed(self, rows: int, beside: int = 0) -> float:
        """How often a guess that is drafted for nothing has to be kept to pay for what it adds to a
        pass. 0 while no clearly larger pass was measured."""
        passes, size = self.passes.of(rows), rows + beside
        more = passes.largest - size
        if more < CLEARLY_MORE * size:
            return 0.0
        plain = passes(size)
        return (passes(passes.largest) - plain) / more * rows / plain

    def together(self, rows: int, reading: int, beside: int = 0) -> float:
        """Tokens per second without drafts of these rows and of those whose prompts are still being
        read, once they write too: what a second is worth that would bring that about sooner. 0 if
        nobody is read."""
        every = rows + reading
        return every / self.passes.of(every)(every + beside) if reading else 0.0

    def allotted(
        self, rows: Sequence[int], rooms: Sequence[int], most: int, beside: int = 0
    ) -> list[int]:
        """How many drafts each of these rows should get. One more is given where it is likeliest
        to be kept, for as long as more tokens are to be expected per second."""
        chances, coverage, count = self.chances(most), self.coverage, len(rows)
        passes, drafting = self.passes.of(count), self.drafting.of(count)
        odds = [self._odds(row) for row in rows]
        plain, reach = passes(count + beside), FURTHER * passes.largest
        nothing = (1 - coverage) * (plain + drafting(1))
        offers = [(-likelier(chances[0], by), at) for at, by in enumerate(odds) if rooms[at]]
        heapq.heapify(offers)
        counts, gained, highest = [0] * count, 0.0, HARDLY * count / plain
        chosen = list(counts)
        while offers:
            chance, index = heapq.heappop(offers)
            counts[index] += 1
            gained -= max(chance, -1.0)
            size = count + sum(counts) + beside
            if size > reach and sum(counts) > count:
                break
            seconds = coverage * (passes(size) + drafting(max(counts))) + nothing
            rate = (count + coverage * gained) / seconds
            if rate > highest:
                highest, chosen = rate, list(counts)
            elif rate < WORSE * highest and sum(counts) > count:
                break
            place = counts[index]
            if place < min(rooms[index], most):
                heapq.heappush(offers, (-likelier(chances[place], odds[index]), index))
        return chosen

    def _odds(self, row: int) -> float:
        """The odds of a row's guesses, lately, as a multiple of those of all."""
        everybody = self._tested.expected(self._likely)
        own = self._own.get(row)
        if own is None:
            return 1.0
        here = own.expected(everybody)
        return here * (1 - everybody) / (everybody * (1 - here))


class Pass(NamedTuple):
    """What a round's pass took."""

    rows: int
    tokens: int  # those of others in it included
    seconds: float
    drafted: bool = False  # whether any of them were guesses


def pass_of(outcome: Outcome, time: RoundTime) -> Pass:
    rows, drafted = len(outcome.rows), outcome.drafted
    return Pass(rows, drafted + rows + time.beside, time.verify + time.host, drafted > 0)


def likelier(chance: float, odds: float) -> float:
    """The chance whose odds are so many times those of this one."""
    return chance * odds / (1 - chance + chance * odds)


def first_length(rows: int, most: int) -> int:
    """How much to draft for each row when nothing is known of what it costs."""
    return min(most, FIRST_LENGTH, max(1, FIRST_TOKENS // rows))


def best(rates: Sequence[float], least: int = 0, gain: float = HARDLY) -> int:
    """The number of drafts with the highest rate. None if that is not a `gain` over without."""
    found = max(range(least, len(rates)), key=rates.__getitem__)
    return found if rates[found] > gain * rates[least] else least


def shared(
    costs: CostModel, rows: Sequence[int], rooms: Sequence[int], most: int, beside: int
) -> list[int] | None:
    """A budget that rows share by their chances. None: nothing to share, or too little known."""
    if len(rooms) < 2 or len(rows) != len(rooms) or most == 0 or not costs.known:
        return None
    found = costs.allotted(rows, rooms, most, beside)
    return found if any(found) else None
