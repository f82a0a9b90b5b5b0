"""Who of several rows drafts, where they began together: who waits for all of them waits for the
last one. Tokens that bring a row ahead of the others end nothing sooner, and are of use only if it
falls back later. So it may be ahead by few tokens where guesses are dear, and by many where they
cost next to nothing. A server's rows come one after the other, and nobody waits for all of them.
Knows neither models nor drafters.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from ..core.contract import Outcome
from ..core.price import Price

AHEAD = 2.0  # tokens, where guesses cost as much as tokens


class Together:
    """How far rows have come that began together."""

    def __init__(self) -> None:
        self._gained = Counter[int]()  # tokens of each row
        self._apart = False  # one of them came later

    def admit(self, row: int) -> None:
        self._apart = self._apart or any(self._gained.values())
        self._gained[row] = 0

    def drop(self, row: int) -> None:
        del self._gained[row]

    def learn(self, outcome: Outcome) -> None:
        """Rounds that nobody is told of bring each row one token, so that none gets ahead."""
        for row in outcome.rows:
            self._gained[row.row] += len(row.kept)

    def held_back(
        self, rows: Sequence[int], asked: Sequence[int], price: Price | None
    ) -> Sequence[int]:
        """What each of these rows is asked for, which is nothing if it is too far ahead. `price`:
        of guesses for all of them."""
        cost = price.costs[1] if price and any(asked) else 0.0
        if self._apart or not cost or len(rows) != len(asked):
            return asked
        gained = [self._gained[row] for row in rows]
        furthest = min(gained) + AHEAD / cost
        return [0 if own > furthest else most for own, most in zip(gained, asked, strict=True)]
