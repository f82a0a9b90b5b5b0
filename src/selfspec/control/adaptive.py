"""Draft & Verify's adaptive draft exit: a confidence threshold that follows the acceptance.

After every round: rate <- b1 rate + (1 - b1) rate_now (the first round counts in full); wanted =
gamma + eps if rate <= alpha, else gamma - eps; gamma <- b2 gamma + (1 - b2) wanted. Source: Draft &
Verify, equations 5 and 6, with its defaults. Rows of a batch share a threshold. rate_now is
accepted over drafted of all of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from ..core.contract import Budget, Outcome, RoundTime
from ..errors import OptionError
from .base import Controller, ControlSession


@dataclass(frozen=True)
class Adaptive(Controller):
    """Draft until confidence falls below a threshold that follows the acceptance."""

    name: ClassVar[str] = "adaptive"

    tokens: int = 12
    """Most tokens to draft for a row in one round (K), all guesses of a tree counted."""
    threshold: float = 0.6
    """Stop after a draft whose largest probability is below this, 0 to 1, at first (gamma). It is
    taken among the tokens that the drafter scores, before temperature and penalties. In a tree a
    path's product counts. Drafters that look tokens up have none and draft all that they may."""
    target: float = 0.9
    """Share of accepted drafts to keep (alpha). Below it the threshold rises, above it falls."""
    step: float = 0.01
    """How far the wanted threshold lies above or below the present one (epsilon)."""
    rate_memory: float = 0.5
    """Share of the earlier acceptance in the running one (beta 1)."""
    threshold_memory: float = 0.9
    """Share of the present threshold in the next one (beta 2)."""

    def __post_init__(self) -> None:
        if self.tokens < 1:
            raise OptionError(
                f"tokens={self.tokens} leaves nothing to stop; use 1 or more, or draft='none'"
            )
        for option in ("threshold", "target", "step", "rate_memory", "threshold_memory"):
            if not 0 <= getattr(self, option) <= 1:
                raise OptionError(f"{option}={getattr(self, option)} is outside 0 to 1")

    def start(self) -> ControlSession:
        return AdaptiveThreshold(self)


class AdaptiveThreshold(ControlSession):
    """At work; `threshold` and `rate` can be looked at."""

    def __init__(self, options: Adaptive) -> None:
        self._options = options
        self.threshold = options.threshold
        self.rate: float | None = None

    def budget(self, rooms: Sequence[int], beside: int = 0) -> Budget:
        return Budget([min(self._options.tokens, room) for room in rooms], self.threshold)

    def learn(self, outcome: Outcome, time: RoundTime) -> None:
        if not outcome.drafted:
            return
        options, now = self._options, outcome.accepted / outcome.drafted
        if self.rate is not None:
            now = options.rate_memory * self.rate + (1 - options.rate_memory) * now
        self.rate = now
        wanted = self.threshold + (options.step if self.rate <= options.target else -options.step)
        kept = options.threshold_memory * self.threshold
        self.threshold = min(1.0, max(0.0, kept + (1 - options.threshold_memory) * wanted))
