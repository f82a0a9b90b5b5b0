"""What guesses cost, so that a drafter that knows their chances drafts those that are worth it.

A pass does not take longer by the same for each token: some come free with the ones before, and
the next one costs as much as all of these. So the price is one of numbers of guesses. Knows neither
seconds nor models.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate


@dataclass(frozen=True)
class Price:
    """`costs[count]`: what so many guesses of a row cost, 0 for none, in tokens that the same time
    would bring otherwise, times a `margin`: of guesses that seem worth it some are so by luck. More
    cost no less."""

    costs: Sequence[float]
    margin: float = 1.0

    @cached_property
    def floors(self) -> list[float]:
        """By the guesses that there are: with a chance of no more than this another one is in vain,
        and so are any number that are no likelier."""
        costs, every = self.costs, range(len(self.costs))
        return [
            min((costs[more] - costs[count]) / (more - count) for more in every[count + 1 :])
            for count in every[:-1]
        ]

    @cached_property
    def lowest(self) -> list[float]:
        """The lowest floor of so many guesses or more."""
        return list(accumulate(reversed(self.floors), min))[::-1]

    def goes_on(self, chance: float, count: int) -> bool:
        """Whether another guess may be worth it behind so many that are right with this chance,
        which is known well, so that it needs no margin."""
        return count < len(self.floors) and chance * self.margin > self.floors[count]

    def best(self, chances: Sequence[float]) -> int:
        """How many of the first of these guesses bring most beyond what they cost."""
        count, highest, gained = 0, 0.0, 0.0
        for more, chance in enumerate(chances, 1):
            gained += chance
            if gained - self.costs[more] > highest:
                count, highest = more, gained - self.costs[more]
        return count


def worthy(price: Price | None, chances: Sequence[float]) -> tuple[int, float]:
    """How many of the first of these guesses are to be drafted, all if they cost nothing, and how
    many of them are expected to be kept."""
    count = len(chances) if price is None else price.best(chances)
    return count, sum(chances[:count], 0.0)
