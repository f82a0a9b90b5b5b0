"""The search finds the best set of small problems whose best set is known."""

from __future__ import annotations

import time

from selfspec.tune.search import Halves, Tried, by_likeness, far_apart, grown, runs, split

LAYERS = 4
BEST = frozenset({1, 2, 6})


def _value(halves: Halves) -> float:
    """Highest at BEST; each half too many or too few costs the same."""
    return -len(halves ^ BEST)


def _kept(halves: Halves) -> float:
    return -len(halves - BEST)


def _until(seconds: float) -> float:
    return time.perf_counter() + seconds


def test_growing_finds_the_best_set() -> None:
    """An order by the wrong end, a search that ends at the single halves."""
    tried = list(grown(LAYERS, _value, _kept, _until(20)))
    assert max(tried, key=lambda each: each.value).halves == BEST


def test_exchanges_find_what_growing_misses() -> None:
    """A harm that misleads: alone, the halves of the best set look worst."""
    tried = []
    for each in grown(LAYERS, _value, lambda halves: -_kept(halves), _until(20), width=1):
        tried.append(each)
        if each.halves == BEST:
            break
    assert tried[-1].halves == BEST


def test_growing_begins_with_sets_that_are_given() -> None:
    """A warm start that is ignored, and a set that is judged twice."""
    asked: list[Halves] = []

    def value(halves: Halves) -> float:
        asked.append(halves)
        return _value(halves)

    found = grown(LAYERS, value, _kept, _until(20), start=[BEST])
    assert next(found).halves == BEST
    list(found)
    assert len(asked) == len(set(asked))


def test_likeness_says_where_to_begin() -> None:
    """The halves that change most, all halves, or none."""
    sets = by_likeness([0.1, 0.9, 0.8, 0.2, 0.7, 0.3, 0.6, 0.4])
    assert sets == [{1}, {1, 2}, {1, 2, 4, 6}]
    assert by_likeness([0.5, 0.6]) == [] and by_likeness([0.5, 0.6, 0.7]) == [{2}]


def test_runs_are_whole_layers_one_after_another() -> None:
    """Halves of other layers, layers alone or all, so many runs that nothing else is looked at."""
    assert {1, 2, LAYERS + 1, LAYERS + 2} in runs(LAYERS)
    for halves in runs(LAYERS):
        attention, mlp = split(halves, LAYERS)
        assert attention == mlp == tuple(range(attention[0], attention[-1] + 1)) and mlp[0] > 0
    found = runs(80)
    assert len(found) == len(set(found)) < 80 and max(map(len, found)) < 2 * 79
    assert runs(1) == []


def test_growing_finds_layers_that_only_go_together() -> None:
    """Two layers of which no half may be left out alone: no single step leads there from one of
    them, nor from anywhere else."""
    one, both = (frozenset({*layers, *(LAYERS + n for n in layers)}) for layers in ({2}, {2, 3}))
    values = {one: 1.0, both: 2.0}

    def value(halves: Halves) -> float:
        return values.get(halves, -float(len(halves)))

    for start in (runs(LAYERS), [one]):
        tried = list(grown(LAYERS, value, lambda halves: -len(halves), _until(20), start=start))
        assert max(tried, key=lambda each: each.value).halves == both


def test_sets_that_are_timed_are_unlike() -> None:
    """A second set that is the best one but for a half, which only noise can tell from it."""
    tried = [
        Tried(frozenset({1, 2}), 1.0),
        Tried(frozenset({1, 2, 3, 4, 5, 6}), 2.0),
        Tried(frozenset({1, 2, 3, 4, 5}), 1.9),
        Tried(frozenset({1, 2, 3, 7, 8, 6}), 1.8),
    ]
    assert far_apart(tried, 9) == [tried[1], tried[3], tried[0]]
    assert far_apart(tried, 1) == [tried[1]] and far_apart([], 2) == []


def test_a_set_is_split_into_attention_and_mlp() -> None:
    """MLP halves that are off by the number of layers."""
    assert split(frozenset({1, 3, 4, 7}), LAYERS) == ((1, 3), (0, 3))
