"""A study survives being killed, is shared by workers, and is refused for another model."""

from __future__ import annotations

import platform
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from selfspec.errors import OptionError
from selfspec.tune.search import Halves
from selfspec.tune.study import finished, sampled, study_in

optuna = pytest.importorskip("optuna")
LAYERS = 4
BEST = frozenset({1, 2, 6})
WORKER = """
import os, sys, time
from selfspec.tune.study import sampled, study_in
place, sampler, dies_at, trials, pause = sys.argv[1], sys.argv[2], *map(int, sys.argv[3:6])
asked = 0
def values(halves):
    global asked
    asked += 1
    if asked == dies_at:
        os._exit(9)
    if pause:
        folder = place.split("///")[-1].rpartition("/")[0]
        open(f"{folder}/{os.getpid()}.count", "w").write(str(asked))
    time.sleep(pause / 1000)
    yield -len(halves ^ {1, 2, 6})
study = study_in(place, sampler, "a toy")
for _ in sampled(study, 4, values, trials, time.perf_counter() + 900):
    pass
"""


def _values(halves: Halves) -> Iterator[float]:
    yield -len(halves ^ BEST)


def _until(seconds: float = 900) -> float:
    return time.perf_counter() + seconds


def _worker(
    place: str, sampler: str, dies_at: int, trials: int, pause: int = 0
) -> subprocess.Popen[bytes]:
    words = [place, sampler, str(dies_at), str(trials), str(pause)]
    return subprocess.Popen([sys.executable, "-c", WORKER, *words])


@pytest.mark.parametrize("sampler", ["tpe", "gp"])
def test_samplers_find_the_best_set(sampler: str) -> None:
    """A sampler that minimises, or a set that is read wrongly from its trial."""
    study = study_in("", sampler, "a toy")
    tried = []
    for each in sampled(study, 2, lambda h: [-len(h ^ {1, 2})], 60, _until()):
        tried.append(each)
        if each.halves == {1, 2}:
            break
    assert tried[-1].halves == {1, 2}


@pytest.mark.parametrize("sampler", ["tpe", "gp"])
def test_a_killed_study_goes_on_to_the_same_result(tmp_path: Path, sampler: str) -> None:
    """A resumed search that draws other sets, counts the trial that died, or begins anew."""
    unbroken = study_in("", sampler, "a toy")
    list(sampled(unbroken, LAYERS, _values, 16, _until()))
    place = str(tmp_path / "study.log")
    assert _worker(place, sampler, dies_at=12, trials=16).wait(900) == 9
    study = study_in(place, sampler, "a toy")
    before = finished(study, LAYERS)
    assert 0 < len(before) < len(finished(unbroken, LAYERS))
    list(sampled(study, LAYERS, _values, 16, _until()))
    assert finished(study, LAYERS) == finished(unbroken, LAYERS)
    assert len({each.halves for each in finished(unbroken, LAYERS)}) > 6, "one set, again and again"


@pytest.mark.parametrize("place", ["study.log", "sqlite:///{}/study.db"], ids=["file", "database"])
def test_workers_share_a_study(tmp_path: Path, place: str) -> None:
    """Workers that each do all the work, or try the same sets in step."""
    address = place.format(tmp_path) if "://" in place else str(tmp_path / place)
    study_in(address, "tpe", "a toy")  # tables are made once, not by both at the same time
    workers = [_worker(address, "tpe", 0, 20, pause=150) for _ in range(2)]
    assert [worker.wait(900) for worker in workers] == [0, 0]
    study = study_in(address, "tpe", "a toy")
    done = [trial for trial in study.trials if trial.state.name in ("COMPLETE", "PRUNED")]
    assert 20 <= len(done) <= 21
    shares = [int(file.read_text()) for file in tmp_path.glob("*.count")]
    assert len(shares) == 2 and min(shares) >= 3, "one worker did all the work"


def test_a_set_that_begins_badly_is_pruned() -> None:
    """Texts that are read though the first one has said enough; a good set that is pruned."""
    read: list[tuple[Halves, int]] = []

    def values(halves: Halves) -> Iterator[float]:
        for step in (0, 1):
            read.append((halves, step))
            yield -len(halves ^ BEST)

    study = study_in("", "tpe", "a toy")
    kept = list(sampled(study, LAYERS, values, 40, _until()))
    pruned = [t for t in study.trials if t.state.name == "PRUNED" and t.intermediate_values]
    assert pruned and len(read) == 2 * len(kept) + len(pruned)
    worst = min(each.value for each in kept[-10:])
    assert all(trial.intermediate_values[0] <= max(worst, -2) for trial in pruned)


def test_a_gaussian_process_hears_of_sets_that_began_badly() -> None:
    """Sets that are pruned and asked for again, since that sampler looks at whole trials alone."""

    def values(halves: Halves) -> Iterator[float]:
        for share in (0.5, 1.0):
            yield -share * len(halves ^ BEST)

    study = study_in("", "gp", "a toy")
    kept = list(sampled(study, LAYERS, values, 30, _until()))
    begun = [trial for trial in study.trials if len(trial.intermediate_values) == 1]
    assert begun and {trial.state.name for trial in begun} == {"COMPLETE"}
    assert len(kept) == sum(bool(trial.intermediate_values) for trial in study.trials)


@pytest.mark.parametrize("content", ["nonsense\n" * 3, '{"op_code": 99}\n' * 2, "{}\n{}\n"])
def test_a_study_that_is_none_is_an_error(tmp_path: Path, content: str) -> None:
    """A traceback from Optuna's inside."""
    place = tmp_path / "study.log"
    place.write_text(content)
    with pytest.raises(OptionError, match="cannot be read"):
        study_in(str(place), "tpe", "a toy")
    with pytest.raises(OptionError, match="cannot be read"):
        study_in("nowhere://x", "tpe", "a toy")


def test_another_models_study_is_refused(tmp_path: Path) -> None:
    """Two workers with different models on one study."""
    place = str(tmp_path / "study.log")
    list(sampled(study_in(place, "tpe", "a toy"), LAYERS, _values, 3, _until()))
    with pytest.raises(OptionError, match="is of a toy, and this is another"):
        study_in(place, "tpe", "another")


def _ended(place: str) -> list[tuple[object, object]]:
    trials = study_in(place, "tpe", "a toy").trials
    return [(t.params, t.values) for t in trials if t.state.name in ("COMPLETE", "PRUNED")]


def test_a_study_killed_at_any_trial_is_that_of_one_run(tmp_path: Path) -> None:
    """Sets that are asked for twice since the dice begin anew, and trials that a killed process
    began, counted as if they had ended."""
    whole, broken = str(tmp_path / "whole.log"), str(tmp_path / "broken.log")
    list(sampled(study_in(whole, "tpe", "a toy"), LAYERS, _values, 24, _until()))
    for trials in (3, 9, 16, 24):
        list(sampled(study_in(broken, "tpe", "a toy"), LAYERS, _values, trials, _until()))
        if trials < 24:  # a trial begins, and its process is killed while it writes
            study = study_in(broken, "tpe", "a toy")
            study.set_user_attr("worker " + platform.node() + " 1 1.0", True)
            study.ask({"attention 0": optuna.distributions.CategoricalDistribution([False, True])})
            with open(broken, "a") as log:
                log.write('{"op_code": 4, "work')
    assert _ended(broken) == _ended(whole) and len(_ended(whole)) == 24
    assert len({str(params) for params, _ in _ended(whole)}) > 12


def test_a_trial_of_another_worker_is_left_to_it(tmp_path: Path) -> None:
    """Two workers that give up each other's trials, or look at the same sets."""
    place, seen = str(tmp_path / "study.log"), list[Halves]()
    own = [sampled(study_in(place, "tpe", "a toy"), LAYERS, _values, 8, _until()) for _ in "ab"]

    def meanwhile(halves: Halves) -> Iterator[float]:  # the other worker is at a set while we begin
        if len(seen) < 3:
            seen.extend(next(each).halves for each in own)
        yield from _values(halves)

    other = sampled(study_in(place, "tpe", "a toy"), LAYERS, meanwhile, 8, _until())
    seen.append(next(other).halves)
    assert len(set(seen)) == 3
    states = [trial.state.name for trial in study_in(place, "tpe", "a toy").trials]
    assert "FAIL" not in states
