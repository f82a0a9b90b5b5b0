"""When a choice is made anew, and when against what seems best: a look at what did not pay, a plain
round among rounds with drafts. What is chosen from is in costs.py. Knows neither models nor
drafters.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from ..core.contract import Outcome, RoundTime
from .costs import CLOSE, CostModel
from .curves import ENOUGH

# Rounds until something that did not pay is tried again, doubled each time.
FIRST_LOOK, LAST_LOOK = 8, 128
SOONER = 8  # what divides this wait when a look paid. Not all of it: one draft can be lucky
LOSS = 0.002  # of all time, the most that looks at one thing may lose
HIGHEST_LOSS = 0.01  # the same once it has waited for long
# For how many more rounds a choice for one row stands that neither looks, checks nor tries another
# size, once some were made. Several rows take so long that choosing anew is little beside it.
STANDS = 7
# Rounds with drafts between two plain ones: if in doubt, if it is close, else.
AT_ONCE, SOON, SELDOM = 2, 32, 128
NEAR = 8  # numbers of rows that differ by less than such a part of them cost about the same


class Looks:
    """When to look again at what did not pay: ever more rarely, until a look pays, and so that
    looks lose little of all time."""

    def __init__(self, first: int = FIRST_LOOK) -> None:
        self._waited, self._wait = 0, first  # in rounds
        self._seconds, self._last = 0.0, 0.0  # since the last look, and of that look
        self._bar: float | None = None

    def due(self, otherwise: float, expected: float | None = None, cost: float = 0.0) -> bool:
        """Asked if it seems not to pay in a round. `otherwise`: tokens per second without it.
        `expected`: with it, if that is known. `cost`: seconds of a look, while there was none."""
        self._waited += 1
        if self._waited < self._wait:
            return False
        if expected is not None:
            loss = (self._last or cost) * (1 - expected / otherwise)
            if self._seconds * (LOSS if self._waited < 2 * LAST_LOOK else HIGHEST_LOSS) < loss:
                return False
        self._waited, self._wait = 0, min(LAST_LOOK, max(FIRST_LOOK, 2 * self._wait))
        self._bar = otherwise
        return True

    def wait(self, time: RoundTime, asked: bool = True) -> None:
        """Told after a round of others. `asked`: whether `due` was, before it."""
        self._waited += not asked
        self._seconds += time.draft + time.verify + time.host

    def pass_over(self, rounds: Sequence[float]) -> None:
        """Told of the seconds of rounds in which nobody asked."""
        self._waited += len(rounds)
        self._seconds += sum(rounds)

    def learn(self, outcome: Outcome, time: RoundTime) -> None:
        """Told after every other round. If that was a look and it paid, the next is soon."""
        if self._bar is None:
            return self.wait(time)
        self._seconds, self._last = 0.0, time.draft + time.verify + time.host
        if sum(len(row.kept) for row in outcome.rows) > self._bar * self._last:
            self._wait = max(FIRST_LOOK, self._wait // SOONER)
        self._bar = None


class Standing:
    """For how many more rounds choices stand that neither look nor check."""

    def __init__(self) -> None:
        self._choices = 0  # so far that did

    def after(self, costs: CostModel, rows: int, tokens: int, weighs: bool = False) -> int:
        """Of a choice to draft so many tokens. `weighs`: or as many of them as are worth it, so
        that sizes differ anyway."""
        if rows > 1 or not (weighs or costs.passes.of(1).settled(1 + tokens)):
            return 0
        self._choices += 1
        return min(STANDS, (1 << (self._choices - 1)) - 1)


class Checks:
    """When to do without drafts though they pay, to know the other side of every comparison."""

    def __init__(self, plain: Counter[int] | None = None) -> None:
        """`plain`: rounds without drafts by number of rows, in earlier requests too."""
        self._plain = Counter[int]() if plain is None else plain
        self._own: set[int] = set()  # numbers of rows that had one in this request
        self._drafted = 0  # rounds with drafts since the last one without

    def unknown(self, rows: int) -> bool:
        """Whether it is still to be found out what several rows take without drafts. All that
        drafts gain is told from it, and a single round may be a spike, so there are some at first.
        Other texts of other lengths do not say it: where keys and values take most of a round, one
        more token is cheap."""
        if rows == 1:
            return False
        near = any(abs(number - rows) * NEAR <= rows for number in self._own)
        seen = self._plain[rows]
        return not near or (seen < ENOUGH and self._drafted >= AT_ONCE * seen)

    def due(self, rates: Sequence[float], tokens: int) -> bool:
        """`rates`: expected by the number of drafts, of which `tokens` are to be made."""
        gain = rates[tokens] / rates[0]
        # More than if all were kept and drafting were free: what is known of plain rounds is wrong.
        if gain > 1 + tokens:
            return self._drafted >= AT_ONCE
        return self._drafted >= (SOON if gain < CLOSE else SELDOM)

    def learn(self, outcome: Outcome) -> None:
        self._drafted = self._drafted + 1 if outcome.drafted else 0
        if not outcome.drafted:
            self._plain[len(outcome.rows)] += 1
            self._own.add(len(outcome.rows))
