"""Rounds as they would have been at another pace of the machine."""

from __future__ import annotations

import pytest

from selfspec.control.pace import HEARD, Pace
from selfspec.core.contract import RoundTime


def told(pace: Pace, by: float, rounds: int) -> RoundTime:
    """Rounds that take so many times as long; the last one as it is taken."""
    for _ in range(rounds):
        time = pace.even(RoundTime(0.2 * by, 1.5 * by, 0.5 * by, beside=3), expected=2.0)
    return time


def test_a_machine_that_slows_down_looks_as_before() -> None:
    """Only a part of a round's time that is evened, tokens beside that get lost, or a machine that
    may slow down once."""
    pace = Pace()
    for by in (1.0, 1.4, 0.7, 1.0):
        time = told(pace, by, HEARD)
        assert (time.draft, time.verify, time.host) == pytest.approx((0.2, 1.5, 0.5))
        assert time.beside == 3


def test_a_few_slow_rounds_are_no_slow_machine() -> None:
    """A spike that makes what follows look quick."""
    pace = Pace()
    told(pace, 1.0, HEARD)
    assert told(pace, 5.0, HEARD // 2).verify == pytest.approx(7.5)


def test_rounds_of_unknown_cost_say_nothing_and_are_evened_too() -> None:
    """A size that was never measured taken for one that costs nothing, or left at another pace."""
    pace = Pace()
    assert pace.even(RoundTime(1.0, 9.0, 0.0), expected=None).verify == 9.0
    told(pace, 2.0, HEARD)
    assert pace.even(RoundTime(1.0, 9.0, 0.0), expected=None).verify == pytest.approx(4.5)


def test_a_clock_that_stands_still() -> None:
    """A division by a pace of nothing."""
    pace = Pace()
    for _ in range(2 * HEARD):
        time = pace.even(RoundTime(0.0, 0.0, 0.0), expected=1e-9)
    assert (time.draft, time.verify) == (0.0, 0.0)
