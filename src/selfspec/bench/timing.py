"""Who is faster, told fairly: contestants take turns, and warm-up is dropped.

On a shared machine speed drifts by tens of percent within minutes. Contestants measured one after
the other would be given different machines. Taking turns (A B C, B C A, C A B ...) gives each the
same share of every mood, and comparing within a round cancels it. Does not know what is being
timed: a contestant is any function that returns the seconds of one turn.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Literal

from ..errors import OptionError

Contestant = Callable[[], float]
Clock = Callable[[], float]
Verdict = Literal["faster", "equal", "slower"]


class ContestantFailed(Exception):
    """Raised by a contestant that cannot go on: it retires with this reason, the others go on."""


@dataclass
class Timings:
    """Seconds of each contestant by round; None marks the rounds that a failed one did not
    finish."""

    seconds: dict[str, list[float | None]] = field(default_factory=dict)
    failures: dict[str, str] = field(default_factory=dict)

    def of(self, name: str) -> list[float]:
        """The rounds that a contestant finished."""
        return [value for value in self.seconds[name] if value is not None]


@dataclass(frozen=True)
class Ratio:
    """How many times as much one is as another, with a 95% interval."""

    value: float
    low: float
    high: float


def timed(action: Callable[[], object], clock: Clock = time.perf_counter) -> Contestant:
    """A contestant out of an action: the wall time of one call."""

    def turn() -> float:
        start = clock()
        action()
        return clock() - start

    return turn


def interleave(
    contestants: Mapping[str, Contestant],
    rounds: int,
    warmup: int = 1,
    on_turn: Callable[[str], None] | None = None,
    on_round: Callable[[Timings], None] | None = None,
    skipped: int = 0,
) -> Timings:
    """Let the contestants take turns for `rounds` rounds after `warmup` unmeasured ones; each round
    starts one further on, the first one after the `skipped` ones of an earlier sitting.

    `on_turn` hears of every turn taken (a progress bar), `on_round` gets what was measured so far
    (so that a kill loses one round).
    """
    if rounds < 1 or warmup < 0:
        raise OptionError(
            f"rounds={rounds}, warmup={warmup}: nothing would be measured. Give at least 1 round "
            "and 0 warm-up rounds."
        )
    names = list(contestants)
    timings = Timings({name: [] for name in names})
    for number in range(-warmup, rounds):
        start = (number + warmup + skipped) % len(names) if names else 0
        measured: dict[str, float] = {}
        for name in [*names[start:], *names[:start]]:
            if name not in timings.failures:
                try:
                    measured[name] = contestants[name]()
                except ContestantFailed as failure:
                    timings.failures[name] = str(failure)
            if on_turn is not None:
                on_turn(name)
        if number >= 0:
            for name in names:
                timings.seconds[name].append(measured.get(name))
            if on_round is not None:
                on_round(timings)
    return timings


def paired(
    first: Sequence[float | None], second: Sequence[float | None]
) -> list[tuple[float, float]]:
    """The rounds that both finished; one that never began has none."""
    return [(a, b) for a, b in zip_longest(first, second) if a is not None and b is not None]
