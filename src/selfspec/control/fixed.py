"""The plainest controller: the same number of drafts every round."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from ..core.contract import Budget
from ..errors import OptionError
from .base import Controller, ControlSession
from .looks import STANDS


@dataclass(frozen=True)
class FixedLength(Controller, ControlSession):
    """Always the same number of drafts a round, less where a row has no room for them."""

    name: ClassVar[str] = "fixed"
    stands = STANDS

    tokens: int = 4
    """Tokens to draft for a row in one round (K), all guesses of a tree counted. 0 drafts none."""

    def __post_init__(self) -> None:
        if self.tokens < 0:
            raise OptionError(f"cannot draft {self.tokens} tokens; use 0 (plain decoding) or more")

    def start(self) -> ControlSession:
        return self

    def budget(self, rooms: Sequence[int], beside: int = 0) -> Budget:
        return Budget([min(self.tokens, room) for room in rooms])
