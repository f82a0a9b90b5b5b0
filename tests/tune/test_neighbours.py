"""Climbing from the fastest way of drafting over ways beside it."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence

from selfspec.draft.registry import resolve
from selfspec.profile import Way
from selfspec.tune.neighbours import OPTIONS, climbed, neighbours

COPY = Way("quantised", {"weights": "int4"}, "fixed", {"tokens": 7}, predicted=2.0, measured=1.9)
SKIP = Way("layer-skip", {"attention": [3], "mlp": [4]}, "fixed", {"tokens": 1})


def test_neighbours_differ_in_one_thing_and_can_be_used() -> None:
    """An option that no drafter has, no drafts at all, or speeds of another way."""
    for way in (COPY, SKIP, Way("hybrid", {}, "cost-aware"), Way("early-exit", {"layer": 2})):
        found = list(neighbours(way))
        assert len({str(each) for each in found}) == len(found) and str(way) not in map(str, found)
        for each in found:
            resolve(**each.options)
            assert each.measured is None and each.predicted is None
            same_draft = each.draft_options == way.draft_options
            same_rule = (each.control, each.control_options) == (way.control, way.control_options)
            assert same_draft or same_rule, each
    assert {"tokens": 0} not in [each.control_options for each in neighbours(SKIP)]
    assert not list(neighbours(Way("auto")))


def test_no_copy_drafts_unless_it_may() -> None:
    """A copy, which takes memory, for somebody who asked for skip sets alone."""
    assert any("weights" in each.draft_options for each in neighbours(SKIP))
    assert not any("weights" in each.draft_options for each in neighbours(SKIP, copies=False))
    asked: list[Way] = []

    def speeds(ways: Sequence[Way]) -> list[float]:
        asked.extend(ways)
        return [1.0 if str(way) == str(SKIP) else 0.9 for way in ways]

    for copies in (True, False):
        asked.clear()
        list(climbed([SKIP], speeds, math.inf, copies))
        assert any("weights" in each.draft_options for each in asked) == copies


def test_climbing_ends_at_the_best_that_can_be_reached() -> None:
    """A search that stops at the first step, that goes down, or that times a way twice for
    nothing."""
    asked: list[str] = []

    def speeds(ways: Sequence[Way]) -> list[float]:
        asked.extend(map(str, ways))
        return [_speed(way) for way in ways]

    steps = list(climbed([COPY, SKIP], speeds, math.inf))
    assert steps[0] == COPY
    assert [_speed(way) for way in steps] == sorted(map(_speed, steps))
    last = steps[-1]
    assert last.control_options == {"tokens": 11} and last.draft_options["unsure"] == 0.4
    others = [each for each in asked if each not in map(str, steps)]
    assert len(others) == len(set(others))
    assert not list(climbed([COPY], speeds, time.perf_counter() - 1))
    assert set(OPTIONS) >= {way.draft for way in (COPY, SKIP)}


def _speed(way: Way) -> float:
    """Best with 11 drafts and a second choice from 0.4 on."""
    if way.draft != "quantised" or way.control != "fixed":
        return 1.0
    away = abs(way.control_options["tokens"] - 11)
    return 3.0 - 0.1 * away + 0.5 * (way.draft_options.get("unsure") == 0.4)
