"""Who is faster, told fairly: contestants take turns, warm-up is dropped, medians and paired ratios
with an interval are given.

On a shared machine speed drifts by tens of percent within minutes. Contestants measured one after
the other would be given different machines; taking turns (A B C, B C A, C A B ...) gives each the
same share of every mood, and comparing within a round cancels it. Does not know what is being
timed: a contestant is any function that returns the seconds of one turn.
"""

from __future__ import annotations

import random
import statistics
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
    """Raised by a contestant that cannot go on: it retires with this reason and the others
    continue."""


@dataclass
class Timings:
    """Seconds of each contestant by round. A contestant that failed keeps the rounds it finished;
    None marks those it did not."""

    seconds: dict[str, list[float | None]] = field(default_factory=dict)
    failures: dict[str, str] = field(default_factory=dict)

    def of(self, name: str) -> list[float]:
        """The rounds that a contestant finished."""
        return [value for value in self.seconds[name] if value is not None]


@dataclass(frozen=True)
class Ratio:
    """How many times as long one contestant takes as another, with a 95% interval."""

    value: float
    low: float
    high: float

    def verdict(self, tolerance: float = 0.01) -> Verdict:
        """Whether the first is faster or slower than the second; equal when the interval comes
        within `tolerance` of 1."""
        if self.low > 1 + tolerance:
            return "slower"
        if self.high < 1 / (1 + tolerance):
            return "faster"
        return "equal"


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
) -> Timings:
    """Let the contestants take turns for `rounds` rounds after `warmup` unmeasured ones; each round
    starts one further on.

    `on_turn` hears of every turn taken (a progress bar), `on_round` gets what was measured so far
    (so that a kill loses one round).
    """
    if rounds < 1 or warmup < 0:
        raise OptionError(
            f"rounds={rounds}, warmup={warmup}: nothing would be measured. Give at least 1 round "
            f"and 0 warm-up rounds."
        )
    names = list(contestants)
    timings = Timings({name: [] for name in names})
    for number in range(-warmup, rounds):
        measured = _round(contestants, _rotated(names, number + warmup), timings.failures, on_turn)
        if number < 0:
            continue
        for name in names:
            timings.seconds[name].append(measured.get(name))
        if on_round is not None:
            on_round(timings)
    return timings


def _rotated(names: Sequence[str], by: int) -> list[str]:
    start = by % len(names) if names else 0
    return [*names[start:], *names[:start]]


def _round(
    contestants: Mapping[str, Contestant],
    order: Sequence[str],
    failures: dict[str, str],
    on_turn: Callable[[str], None] | None,
) -> dict[str, float]:
    measured = {}
    for name in order:
        if name not in failures:
            try:
                measured[name] = contestants[name]()
            except ContestantFailed as failure:
                failures[name] = str(failure)
        if on_turn is not None:
            on_turn(name)
    return measured


def paired(
    first: Sequence[float | None], second: Sequence[float | None]
) -> list[tuple[float, float]]:
    """The rounds that both finished; one that never began has none."""
    return [(a, b) for a, b in zip_longest(first, second) if a is not None and b is not None]


def ratio(
    first: Sequence[float | None],
    second: Sequence[float | None],
    resamples: int = 2000,
    confidence: float = 0.95,
) -> Ratio | None:
    """Median of first/second over the rounds that both finished, with a bootstrap interval; None
    when there is no such round.

    The rounds are resampled whole, so drift between rounds does not widen the interval. With fewer
    than about six rounds the interval is narrower than its name says: it cannot show what was never
    seen. The resampling is seeded: the same JSON makes the same table.
    """
    quotients = [a / b for a, b in paired(first, second)]
    if not quotients:
        return None
    chance = random.Random(len(quotients))
    medians = sorted(
        statistics.median(chance.choices(quotients, k=len(quotients))) for _ in range(resamples)
    )
    tail = (1 - confidence) / 2
    low, high = (
        medians[int(tail * resamples)],
        medians[min(resamples - 1, int((1 - tail) * resamples))],
    )
    return Ratio(statistics.median(quotients), low, high)


def median(seconds: Sequence[float | None]) -> float | None:
    """Median of the finished rounds."""
    finished = [value for value in seconds if value is not None]
    return statistics.median(finished) if finished else None


def decode_seconds(
    full: Sequence[float | None], first: Sequence[float | None], new_tokens: int
) -> list[float | None]:
    """Seconds a token after the first, round by round: (T(n) - T(1)) / (n - 1). What both share,
    prefill above all, cancels."""
    if new_tokens < 2:
        raise OptionError(
            f"new_tokens={new_tokens}: there is no token after the first to time. Give at least 2."
        )
    return [
        None if whole is None or one is None else (whole - one) / (new_tokens - 1)
        for whole, one in zip(full, first, strict=True)
    ]
