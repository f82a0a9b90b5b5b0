"""Draft as many tokens as bring the most tokens per second, by what passes and drafts cost here and what was accepted lately.

0 drafts are one of the choices, so a drafter that does not pay is left alone, but for a rare look whether it would by now.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from ..contract import Budget, Outcome, RoundTime
from ..errors import OptionError
from .base import Controller, Controlling
from .costs import CostModel, Looks, best

CLOSE = 1.1  # where drafting is expected to gain less than this, a plain round now and then keeps the comparison honest
HONEST = 32  # rounds between those


@dataclass(frozen=True)
class CostAware(Controller):
    """Pick the draft length with the most expected tokens per second, each round."""

    name: ClassVar[str] = "cost-aware"

    most: int = 12
    """The most drafts a round."""

    def __post_init__(self) -> None:
        if self.most < 1:
            raise OptionError(f"most={self.most} leaves nothing to choose; use 1 or more, or draft='none' for plain decoding")

    def start(self) -> Controlling:
        return Choosing(self.most)


class Choosing(Controlling):
    """At work on one drafter; `costs` can be looked at."""

    def __init__(self, most: int) -> None:
        self._most = most
        self.costs = CostModel()
        self._looks = Looks()
        self._since_plain = 0  # rounds since one without drafts
        self._asked = False

    def budget(self, rooms: Sequence[int]) -> Budget:
        tokens = self._choose(len(rooms), min(self._most, max(rooms)))
        self._asked = tokens > 0
        return Budget([min(tokens, room) for room in rooms])

    def _choose(self, rows: int, most: int) -> int:
        if not self.costs.passes.known or most == 0:
            return 0
        rates = self.costs.rates(rows, most)
        tokens = best(rates)
        if tokens == 0:
            return best(rates, least=1) if self._looks.due() else 0
        return 0 if rates[tokens] < CLOSE * rates[0] and self._since_plain >= HONEST else tokens

    def learn(self, outcome: Outcome, time: RoundTime) -> None:
        self.costs.observe(outcome, time, self._asked)
        self._since_plain = self._since_plain + 1 if outcome.draft.total else 0
