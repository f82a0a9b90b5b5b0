"""Guesses that are worth their price."""

from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from selfspec.core.price import Price

chances = st.lists(st.floats(0.0, 1.0), max_size=12)
steps = st.lists(st.floats(0.0, 1.0), min_size=12, max_size=12)


def price_of(steps: list[float]) -> Price:
    costs = [0.0]
    for step in steps:
        costs.append(costs[-1] + step)
    return Price(costs)


@given(chances, steps)
def test_the_best_number_of_guesses_brings_most(chances: list[float], steps: list[float]) -> None:
    """The first number that pays taken for the best, or one too many or too few."""
    price = price_of(steps)
    gains = [sum(chances[:count]) - price.costs[count] for count in range(len(chances) + 1)]
    assert gains[price.best(chances)] == pytest.approx(max(gains))


@given(chances, steps)
@example([0.6654642456982783, 0.2970929961408731], [0.0, 0.2970929961408731, *[1.0] * 10])
def test_what_is_in_vain_would_not_have_been_drafted(
    chances: list[float], steps: list[float]
) -> None:
    """Growth that ends at a guess which is too dear alone, though more of its kind come free with
    it, or which would have paid by more than rounding."""
    price, falling = price_of(steps), sorted(chances, reverse=True)
    gains = [sum(falling[:count]) - price.costs[count] for count in range(len(falling) + 1)]
    for count, chance in enumerate(falling):
        if chance <= price.floors[count]:
            assert max(gains) == pytest.approx(max(gains[: count + 1]))
            break


def test_a_step_is_paid_by_all_that_stand_on_it() -> None:
    """Two guesses that are worth a step together refused one by one."""
    price = Price([0.0, 0.5, 0.5, 2.0])
    assert price.floors == [0.25, 0.0, 1.5]
    assert price.best([0.3]) == 0
    assert price.best([0.3, 0.3]) == price.best([0.3, 0.3, 0.9]) == 2
