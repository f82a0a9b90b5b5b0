"""Draft the number of tokens that brings the most tokens per second, by lately measured costs.

0 drafts are one of the choices. A drafter that does not pay is left alone, but for a rare look
whether it would by now. One that pays is left out now and then, to learn what a plain round costs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from ..core.contract import Budget, Outcome, RoundTime
from ..errors import OptionError
from .base import Controller, ControlSession
from .costs import MOST, CostModel, best, first_length, shared
from .looks import Checks, Looks, Standing


@dataclass(frozen=True)
class CostAware(Controller):
    """Pick the draft length with the most expected tokens per second, each round; of several rows
    each its own."""

    name: ClassVar[str] = "cost-aware"

    most: int = MOST
    """Never draft more tokens than this for a row in one round, all guesses of a tree counted. How
    many it drafts follows from what they cost and bring here: a token is added while its own chance
    pays for what it adds to the pass."""

    def __post_init__(self) -> None:
        if self.most < 1:
            raise OptionError(
                f"most={self.most} leaves nothing to choose; use 1 or more, or draft='none'"
            )

    def start(self) -> ControlSession:
        return CostAwareSession(self.most)


class CostAwareSession(ControlSession):
    """At work on one drafter; `costs` can be looked at."""

    def __init__(self, most: int, prior: CostModel | None = None) -> None:
        self._most = most
        self.costs = CostModel(prior)
        self._looks, self._checks, self._standing = Looks(), Checks(), Standing()
        self._asked: Sequence[int] = ()
        self._rows: Sequence[int] = ()
        self._reading = 0
        self._plain = False  # whatever single rows might gain
        self.stands = 0

    def drop(self, row: int) -> None:
        self.costs.forget(row)

    def about(self, rows: Sequence[int], reading: int = 0) -> None:
        self._rows, self._reading = rows, reading

    def budget(self, rooms: Sequence[int], beside: int = 0) -> Budget:
        most = min(self._most, max(rooms))
        tokens = self._choose(len(rooms), most, beside)
        self._asked = [min(tokens, room) for room in rooms]
        if not self._plain:
            self._asked = shared(self.costs, self._rows, rooms, most, beside) or self._asked
        count = max(self._asked)
        price = self.costs.price(len(rooms), count, most, beside) if tokens else None
        return Budget(self._asked, price=price)

    def _choose(self, rows: int, most: int, beside: int) -> int:
        self._plain, self.stands = False, 0
        if not self.costs.passes.known or most == 0:
            return 0
        if not self.costs.drafting.known:
            return first_length(rows, most)
        rates = self.costs.rates(rows, most, beside)
        tokens, together = best(rates), self.costs.together(rows, self._reading, beside)
        if tokens == 0 or rates[tokens] < together:
            tried = best(rates, least=1)
            look = not self._reading and self._looks.due(rates[0], rates[tried])
            self._plain = not look and (tokens > 0 or self._reading > 0)
            return tried if look else 0
        self._plain = self._checks.due(rates, tokens)
        if self._plain:
            return 0
        self.stands = self._standing.after(self.costs, rows, tokens)
        return tokens

    def learn(self, outcome: Outcome, time: RoundTime) -> None:
        self.costs.observe(outcome, time, self._asked)
        self._checks.learn(outcome)
        self._looks.learn(outcome, time)
