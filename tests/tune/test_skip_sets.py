"""A skip set that is lucky with a few texts is not taken for the best."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from selfspec.tune import skip_sets
from selfspec.tune.candidates import Prediction
from selfspec.tune.search import Halves, Tried
from selfspec.tune.skip_sets import ALL, FEW, SkipSets

LUCKY, GOOD, POOR = frozenset({1}), frozenset({2}), frozenset({3})
GAINS = {(LUCKY, 1): 1.9, (LUCKY, FEW): 1.8, (LUCKY, ALL): 1.0, (GOOD, 1): 1.1, (GOOD, FEW): 1.5}
GAINS |= {(GOOD, ALL): 1.4, (POOR, 1): 0.4, (POOR, FEW): 0.5}


class Texts:
    """In the place of a probe: it hands on what it was asked, and notes it."""

    everywhere = range(8)

    def __init__(self) -> None:
        self.asked: list[tuple[Halves, int]] = []

    def agreement(self, model: Any, halves: Halves, phases: range, texts: int) -> Any:
        assert len(phases) == (1 if texts else 2)
        self.asked.append((halves, texts))
        key = halves, texts
        return SimpleNamespace(key=key, expected=lambda tokens: GAINS[key])


@pytest.fixture
def texts(monkeypatch: pytest.MonkeyPatch) -> Texts:
    def skipping(model: Any, steps: Any, *sides: tuple[int, ...]) -> Any:
        halves = frozenset(sides[0])

        def predicted(agreement: Any, *_: Any) -> Prediction:
            return Prediction(2, GAINS[agreement.key], 0.5)

        return SimpleNamespace(plan=halves, predicted=predicted)

    monkeypatch.setattr(skip_sets, "skipping", skipping)
    return Texts()


def test_what_seems_best_is_looked_at_on_all_texts(texts: Texts) -> None:
    """The winner of a few texts, whose luck nobody else can beat; all texts for every set, which
    leaves time for a few; a set that is looked at twice."""
    sets = SkipSets(SimpleNamespace(layers=8), None, texts, None)  # type: ignore[arg-type]
    assert [list(sets.values(each)) for each in (LUCKY, GOOD, POOR)] == [[1.0], [1.4], [0.5]]
    assert list(sets.values(LUCKY)) == [1.0] and sets.kept(GOOD) == 1.5
    assert texts.asked == [(LUCKY, FEW), (LUCKY, ALL), (GOOD, FEW), (GOOD, ALL), (POOR, FEW)]


def test_a_search_that_prunes_hears_of_one_text_first(texts: Texts) -> None:
    """One that is pruned by what it is worth at last."""
    sets = SkipSets(SimpleNamespace(layers=8), None, texts, None)  # type: ignore[arg-type]
    assert list(sets.values(GOOD, early=True)) == [1.1, 1.4]
    assert list(sets.values(POOR, early=True)) == [0.4, 0.5]


def test_a_search_that_goes_on_knows_the_best_so_far(texts: Texts) -> None:
    """A killed search that looks at the next sets on all texts, and so at other values than one
    that was never killed: it had forgotten how good the best was."""
    sets = SkipSets(SimpleNamespace(layers=8), None, texts, None)  # type: ignore[arg-type]
    sets.go_on([Tried(POOR, 0.5), Tried(GOOD, 1.4)])
    assert list(sets.values(POOR)) == [0.5] and texts.asked == [(POOR, FEW)]
    sets.go_on([])
    assert list(sets.values(POOR)) == [0.5] and texts.asked == [(POOR, FEW)]
