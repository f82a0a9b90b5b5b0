"""Stop drafting where the draft itself is unsure: a fixed threshold on its largest probability.

Source: Draft & Verify, section 3.3 (the static variant). The token at which confidence falls below
the threshold is kept and verified.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from ..core.contract import Budget
from ..errors import OptionError
from .base import Controller, ControlSession


@dataclass(frozen=True)
class Confidence(Controller, ControlSession):
    """Draft until the draft's largest probability falls below a threshold."""

    name: ClassVar[str] = "confidence"

    tokens: int = 12
    """Most tokens to draft for a row in one round (K), all guesses of a tree counted."""
    threshold: float = 0.6
    """Stop after a draft whose largest probability is below this, 0 (never) to 1 (after the first).
    It is taken among the tokens that the drafter scores, before temperature and penalties. In a
    tree a path's product counts. Drafters that look tokens up have none, and draft all they may."""

    def __post_init__(self) -> None:
        if self.tokens < 1:
            raise OptionError(
                f"tokens={self.tokens} leaves nothing to stop; use 1 or more, or draft='none'"
            )
        if not 0 <= self.threshold <= 1:
            raise OptionError(
                f"threshold={self.threshold} is no probability; use 0 (never) to 1 (one a round)"
            )

    def start(self) -> ControlSession:
        return self

    def budget(self, rooms: Sequence[int], beside: int = 0) -> Budget:
        return Budget([min(self.tokens, room) for room in rooms], self.threshold)
