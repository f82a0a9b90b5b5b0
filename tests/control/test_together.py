"""Rows that began together: who of them drafts."""

from __future__ import annotations

import pytest

from selfspec.control.together import AHEAD, Together
from selfspec.core.price import Price
from worlds import outcome_of

ROWS, ASKED = [0, 1, 2], [3, 2, 1]


def after(*kept: int, rows: int = 3) -> Together:
    """Rows of which each has gained so many tokens by guesses."""
    together = Together()
    for row in range(rows):
        together.admit(row)
    together.learn(outcome_of([9] * rows, kept))
    return together


def price_of(cost: float) -> Price:
    return Price([0.0, cost, 2 * cost])


@pytest.mark.parametrize(
    ("kept", "cost", "held"),
    [
        ((0, 2, 3), AHEAD / 2, [3, 2, 0]),
        ((4, 2, 0), AHEAD / 2, [0, 2, 1]),
        ((4, 3, 0), AHEAD / 2, [0, 0, 1]),
        ((9, 9, 9), AHEAD / 2, ASKED),
        ((0, 9, 9), AHEAD / 9, ASKED),
        ((0, 9, 9), 0.0, ASKED),
    ],
)
def test_rows_that_are_ahead_wait(kept: tuple[int, ...], cost: float, held: list[int]) -> None:
    """Guesses of rows that others keep waiting, which end nothing sooner; or none where they cost
    next to nothing, though a row may fall back."""
    assert after(*kept).held_back(ROWS, ASKED, price_of(cost)) == held


def test_a_row_that_left_holds_nobody_back() -> None:
    """Rows that wait for one that has ended, or for one whose number is another's by now."""
    together = after(0, 5, 5)
    together.drop(0)
    assert together.held_back([1, 2], [2, 1], price_of(1.0)) == [2, 1]


def test_rows_that_came_later_are_not_waited_for() -> None:
    """On a server a request that held back all who came before it."""
    together = after(5, 5, rows=2)
    together.admit(2)
    assert together.held_back(ROWS, ASKED, price_of(1.0)) == ASKED


def test_what_guesses_cost_may_be_unknown() -> None:
    """A batch that fails, or waits, before anything was measured; and one that asks nobody."""
    together = after(0, 5, 5)
    assert together.held_back(ROWS, ASKED, None) == ASKED
    assert together.held_back(ROWS, [0, 0, 0], Price([0.0])) == [0, 0, 0]
    assert together.held_back([], ASKED, price_of(1.0)) == ASKED
