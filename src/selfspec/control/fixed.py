"""The plainest controller: the same number of drafts every round."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..contract import Budget
from ..errors import OptionError


@dataclass(frozen=True)
class FixedLength:
    """Always `tokens` drafts a round, less where a row has no room for them."""

    tokens: int = 4

    def __post_init__(self) -> None:
        if self.tokens < 0:
            raise OptionError(f"cannot draft {self.tokens} tokens; use 0 (plain decoding) or more")

    def budget(self, rooms: Sequence[int]) -> Budget:
        """`rooms`: how many drafts each unfinished row could still use."""
        return Budget([min(self.tokens, room) for room in rooms])
