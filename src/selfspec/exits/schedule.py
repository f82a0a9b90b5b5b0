"""At which layers is a token looked at? Predictors cost time, and most of them never fire.

Two levels, as published (SpecEE, section 5): *offline* keeps the layers where exits were frequent
when the predictors were fitted. *Online* keeps those near the exits of a text's last tokens, since
neighbours leave at similar depths. "both" is their union. Knows neither models nor predictors.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, get_args

from ..errors import OptionError

Level = Literal["all", "offline", "online", "both"]


@dataclass(frozen=True)
class Schedule:
    """Which of the fitted layers are looked at."""

    level: Level = "both"
    offline: float = 0.5
    """Offline: the fewest layers that hold this share of all exits seen when fitting."""
    last: int = 5
    """Online: of so many last tokens of a text the exits count."""
    near: int = 2
    """Online: layers up to so far from one of these exits are looked at."""

    def __post_init__(self) -> None:
        if self.level not in get_args(Level):
            raise OptionError(
                f"schedule level {self.level!r} is not known; use {', '.join(get_args(Level))}"
            )
        if not 0 < self.offline <= 1:
            raise OptionError(
                f"offline={self.offline} is no share of exits; use more than 0, up to 1 (all)"
            )
        if self.last < 1 or self.near < 0:
            raise OptionError(
                f"last={self.last} and near={self.near} leave nothing to go by; use last 1 or "
                "more, near 0 or more"
            )

    def frequent(self, layers: Sequence[int], exits: Sequence[float]) -> frozenset[int]:
        """The fewest layers that hold the offline share of exits; all where none was seen."""
        wanted, held = self.offline * sum(exits), 0.0
        if not wanted:
            return frozenset(layers)
        kept: list[int] = []
        for share, layer in sorted(zip(exits, layers, strict=True), key=lambda e: (-e[0], e[1])):
            if held >= wanted or not share:
                break
            kept.append(layer)
            held += share
        return frozenset(kept)


@dataclass
class Looks:
    """One text's looks: the schedule at work. `frequent` is what offline keeps."""

    schedule: Schedule
    layers: Sequence[int]
    frequent: frozenset[int]
    _recent: deque[int] = field(init=False)

    def __post_init__(self) -> None:
        self._recent = deque(maxlen=self.schedule.last)

    def next(self) -> list[int]:
        """The layers at which the next token is looked at, ascending. Until a text has exits to go
        by, all are."""
        level = self.schedule.level
        if level == "offline":
            return [layer for layer in self.layers if layer in self.frequent]
        if level == "all" or not self._recent:
            return list(self.layers)
        kept = {*self.frequent} if level == "both" else set[int]()
        near = self.schedule.near
        for layer in self._recent:
            kept.update(range(layer - near, layer + near + 1))
        return [layer for layer in self.layers if layer in kept]

    def left(self, layer: int) -> None:
        """A token of the text left after so many layers."""
        self._recent.append(layer)
