"""How often something happens, lately."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from selfspec.control import shares
from selfspec.control.shares import FADING, FALLOFF, TRUST, Places, Share

rounds = st.lists(
    st.lists(st.lists(st.booleans(), max_size=5), min_size=1, max_size=3), max_size=30
)


@given(rounds, st.sampled_from([1e100, 1.05]))
def test_places_fade_as_shares_do(rounds: list[list[list[bool]]], large: float) -> None:
    """Later rounds that weigh more are not the same as earlier ones that fade: a weight forgotten
    where numbers are made small again, or of a place that this round has not."""
    places, slow = Places(0.4), [Share() for _ in range(5)]
    seen = max((len(row) for each in rounds for row in each), default=0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shares, "LARGE", large)
        for each in rounds:
            true = ([at + 1 for at, hit in enumerate(row) if hit] for row in each)
            places.count(zip(map(len, each), true, strict=True))
            for share in slow:
                share.fade()
            for row in each:
                for share, hit in zip(slow, row, strict=False):
                    share.add(hit)
    expected: list[float] = []
    for place in range(seen):
        before = expected[-1] if expected else 0.0
        unknown = before * max(FALLOFF, before ** (1 / place)) if place else 0.4
        expected.append(slow[place].expected(unknown, TRUST))
    assert [places[place] for place in range(seen)] == pytest.approx(expected)


def test_what_always_was_so_goes_on_so_far() -> None:
    """Places beyond those that were asked for thought empty, so that nobody asks for them."""
    places = Places(1.0)
    places.count([(3, [1, 2, 3])])
    assert places[7] == 1.0
    places.count([(3, [1])])
    assert places[2] < places[0] == 1.0


def test_earlier_requests_are_expected_until_there_is_more() -> None:
    """A prior that outlives what this request says, or is not asked at all."""
    earlier = Places(0.4)
    for _ in range(50):
        earlier.count([(2, [1, 2])])
    now = Places(0.4, FADING, earlier)
    assert now[1] == earlier[1] > 0.9
    for _ in range(50):
        now.count([(2, [])])
    assert now[1] < 0.3 < earlier[1]
