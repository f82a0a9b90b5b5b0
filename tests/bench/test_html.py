"""The frame and the pieces of our pages."""

from __future__ import annotations

import re

import pytest

from selfspec.bench.html import (
    Bar,
    Bars,
    Cell,
    Curves,
    Facts,
    Heading,
    Heat,
    Line,
    Paragraph,
    Table,
    page,
    ticks,
)

EVIL = '<script>alert("x")</script>'


def test_everything_given_is_escaped() -> None:
    """A model's name or a token with a tag in it would become part of the page."""
    pieces = [
        Heading(EVIL),
        Paragraph(EVIL),
        Facts({EVIL: EVIL}),
        Table([EVIL], [[EVIL]]),
        Bars([Bar(EVIL, 1.0, note=EVIL)]),
        Heat(EVIL, [EVIL], [(EVIL, [Cell(EVIL, title=EVIL)])]),
        Curves([Line(EVIL, [(0, 1)]), Line("b", [(1, 2)])], EVIL, EVIL),
    ]
    whole = page(EVIL, EVIL, pieces)
    assert (
        "<script" not in whole and 'alert("x")' not in whole and whole.count("&lt;script&gt;") >= 15
    )


def test_a_page_is_one_file_for_both_schemes_and_narrow_screens() -> None:
    """A stylesheet or font from elsewhere would be missing in ten years; without a viewport a phone
    shows a desktop page."""
    whole = page("a", "b", [])
    assert not re.search(r"https?:|url\(|@import|<link", whole)
    assert (
        "prefers-color-scheme: dark" in whole
        and "max-width: 640px" in whole
        and 'name="viewport"' in whole
    )


def test_bars_share_a_scale_and_show_their_interval() -> None:
    """Each bar on its own scale would make a loser look like a winner."""
    drawn = Bars([Bar("a", 2.0, 1.8, 2.4), Bar("b", 0.6)]).html()
    widths = [float(each) for each in re.findall(r'class="fill" style="width:([\d.]+)%', drawn)]
    assert widths[0] / widths[1] == pytest.approx(2.0 / 0.6, rel=1e-3) and max(widths) < 100
    left, wide = re.search(r'whisker" style="left:([\d.]+)%;width:([\d.]+)%', drawn).groups()
    assert (
        float(left) / widths[0] == pytest.approx(1.8 / 2.0, rel=1e-3)
        and float(left) + float(wide) < 100
    )
    assert "--good" in drawn and "--bad" in drawn


def test_strength_stays_within_bounds() -> None:
    """A strength above 1 is an invalid colour, and the cell would have none."""
    found = re.findall(
        r"calc\(([\d.]+) \*",
        Heat("", ["a", "b"], [("x", [Cell("1", 7.0), Cell("2", -3.0)])]).html(),
    )
    assert found == ["1.000", "0.000"]


@pytest.mark.parametrize(
    ("low", "high"), [(0, 1), (0, 1.9), (3, 61), (0.92, 0.997), (1e-6, 3e-6), (5, 5), (-2, 2)]
)
def test_ticks_are_round_and_inside(low: float, high: float) -> None:
    """An endless loop or a single tick on small spans."""
    found = ticks(low, high, 5)
    assert all(low - 1e-9 <= tick <= high + 1e-9 for tick in found) and found == sorted(found)
    assert len(found) == 1 if low == high else 2 <= len(found) <= 7


def test_a_curve_of_one_point_and_of_none() -> None:
    """Division by an empty span."""
    assert "circle" in Curves([Line("a", [(3, 3)])], "x", "y").html()
    assert "Nothing was measured" in Curves([Line("a", [])], "x", "y").html()
