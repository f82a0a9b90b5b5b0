"""The search finds the best set of small problems whose best set is known."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from selfspec.errors import OptionError
from selfspec.tune.search import Halves, grown, sampled, split, study_in

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


@pytest.mark.parametrize("sampler", ["tpe", "gp"])
def test_samplers_find_the_best_set(sampler: str) -> None:
    """A sampler that minimises, or a set that is read wrongly from its trial."""
    pytest.importorskip("optuna")
    study = study_in("", sampler, "a toy")
    tried = []
    for each in sampled(study, 2, lambda halves: -len(halves ^ {1, 2}), 60, _until(60)):
        tried.append(each)
        if each.halves == {1, 2}:
            break
    assert tried[-1].halves == {1, 2}


def test_a_killed_study_goes_on(tmp_path: Path) -> None:
    """A study that begins anew, loses trials, or mixes two models."""
    pytest.importorskip("optuna")
    place = str(tmp_path / "study.log")
    first = list(sampled(study_in(place, "tpe", "a toy"), LAYERS, _value, 5, _until(60)))
    study = study_in(place, "tpe", "a toy")
    assert [trial.value for trial in study.trials if trial.value is not None] == [
        each.value for each in first
    ]
    list(sampled(study, LAYERS, _value, 9, _until(60)))
    assert len(study_in(place, "tpe", "a toy").trials) == 9
    with pytest.raises(OptionError, match="is of a toy, and this is another"):
        study_in(place, "tpe", "another")


def test_a_set_is_split_into_attention_and_mlp() -> None:
    """MLP halves that are off by the number of layers."""
    assert split(frozenset({1, 3, 4, 7}), LAYERS) == ((1, 3), (0, 3))
