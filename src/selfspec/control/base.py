"""What a controller is: it says each round how many tokens to draft, and learns what came of it.

Any controller works with any drafter. A frozen dataclass: its fields are the options.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar

from ..core.contract import Budget, Outcome, RoundTime
from ..core.sampling import Sampler


class ControlSession(ABC):
    """A controller at work on one generation."""

    stands = 0
    """For how many more rounds of the same rows the last budget stands. It is told what became of
    these only when it is asked for the next one."""

    def admit(self, row: int, prompt: Sequence[int], sampler: Sampler) -> None:  # noqa: B027
        """A row begins. Most controllers treat all rows alike."""

    def drop(self, row: int) -> None:  # noqa: B027
        """A row has ended."""

    def about(self, rows: Sequence[int], reading: int = 0) -> None:  # noqa: B027
        """Told before `budget` which rows it is for, in its order, and of how many others prompts
        are being read, which every second spent on drafts keeps waiting."""

    @abstractmethod
    def budget(self, rooms: Sequence[int], beside: int = 0) -> Budget:
        """`rooms`: how many drafts each row could still use. 0 drafts are plain decoding. `beside`:
        at least this many tokens of other rows are in the same pass."""

    @property
    def rests(self) -> int:
        """For how many rounds from the next one on it asks for no drafts whatever `budget` is told,
        nor wants to learn from them, if no prompts are being read."""
        return 0

    def passed_over(self, rows: int, tokens: int, seconds: float) -> None:  # noqa: B027
        """Told after each such round of so many rows what it took. `tokens`: all of its pass."""

    def learn(self, outcome: Outcome, time: RoundTime) -> None:  # noqa: B027
        """Told after every round what became of the draft and what it cost. Rounds for which a
        budget stood are told together, without their tensors: a pass empties the processor's
        caches, so that Python costs several times as much as right after more of its kind."""


class Controller(ABC):
    """A way to decide how much to draft."""

    name: ClassVar[str]

    @abstractmethod
    def start(self) -> ControlSession:
        """Begin a generation."""
