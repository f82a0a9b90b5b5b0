"""Medians of rounds, and paired ratios with an interval. Knows no benchmark."""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable, Sequence
from typing import TypeVar

from selfspec.bench.tables import number
from selfspec.bench.timing import Ratio, paired

T = TypeVar("T")


def ratio(
    first: Sequence[float | None], second: Sequence[float | None], draws: int = 2000
) -> Ratio | None:
    """Median of first/second over the rounds that both finished; None when there is no such round.

    Drift between rounds does not widen the interval. With fewer than about six rounds it is
    narrower than its name says: it cannot show what was never seen.
    """
    quotients = [a / b for a, b in paired(first, second)]
    return resampled(quotients, statistics.median, draws) if quotients else None


def resampled(sample: Sequence[T], of: Callable[[Sequence[T]], float], draws: int = 2000) -> Ratio:
    """A figure of a sample, with the 95% interval of the same figure of samples drawn from it. The
    draws are seeded: the same JSON makes the same table."""
    chance = random.Random(len(sample))
    values = sorted(of(chance.choices(sample, k=len(sample))) for _ in range(draws))
    return Ratio(of(sample), values[int(0.025 * draws)], values[int(0.975 * draws)])


def median(seconds: Sequence[float | None]) -> float | None:
    """Median of the finished rounds."""
    finished = [value for value in seconds if value is not None]
    return statistics.median(finished) if finished else None


def milliseconds(seconds: float | None, digits: int = 1) -> str:
    return number(None if seconds is None else seconds * 1e3, digits)
