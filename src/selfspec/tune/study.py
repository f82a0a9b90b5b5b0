"""Optuna's part of the search: a study that survives being killed and may be shared by workers.

A study lies in a file or in a database. What its sampler asks for next depends on the seed and on
the trials before, so a killed search that goes on finds what an unbroken one finds. Sets that look
bad after a part of their texts are pruned. Knows no model.
"""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

from ..errors import OptionError, Unavailable
from .search import Halves, Tried

if TYPE_CHECKING:
    import optuna

Values = Callable[[Halves], Iterable[float]]
"""What a set is worth by a part of the texts, by more of them, by all: the last one counts."""
STALE = 5  # seconds after which a study's lock is that of a killed process
WATCHED = 8  # finished trials from which on one may be pruned


def study_in(place: str, sampler: str, about: str, name: str = "skips") -> optuna.Study:
    """The study of that name in that file or database, made or gone on with. "" keeps it in memory.
    `about` says what is searched: another model's is refused."""
    try:
        import optuna
        from optuna.storages import JournalStorage
        from optuna.storages.journal import JournalFileBackend, JournalFileSymlinkLock
    except ImportError as error:
        raise Unavailable(
            f"the search {sampler!r} is Optuna's ({error}); install it with pip install "
            "'selfspec[tune]', or leave --search as it is"
        ) from error
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    samplers = {"tpe": optuna.samplers.TPESampler, "gp": optuna.samplers.GPSampler}
    try:
        storage: Any = place or None
        if place and "://" not in place:
            _whole_lines(Path(place))
            lock = JournalFileSymlinkLock(place, grace_period=STALE)
            storage = JournalStorage(JournalFileBackend(place, lock))
        study = optuna.create_study(
            storage=storage,
            sampler=samplers[sampler](),
            pruner=optuna.pruners.MedianPruner(n_startup_trials=WATCHED),
            study_name=name,
            direction="maximize",
            load_if_exists=True,
        )
        known = study.user_attrs.get("about", about)
    except (KeyboardInterrupt, MemoryError):
        raise
    except Exception as error:
        raise OptionError(
            f"the study in {place} cannot be read ({type(error).__name__}: {error}); it is damaged "
            "or no study. Name another file, or a database's address"
        ) from error
    if known != about:
        raise OptionError(
            f"the study in {place} is of {known}, and this is {about}; their sets would be mixed. "
            "Name another study"
        )
    study.set_user_attr("about", about)
    return study


def _whole_lines(path: Path) -> None:
    """Cut off a line that a killed process did not end: Optuna would refuse all behind it. Another
    worker may be about to end it, so it is given a moment."""
    for _ in range(10):
        raw = path.read_bytes() if path.is_file() else b""
        if not raw or raw.endswith(b"\n"):
            return
        time.sleep(0.05)
    os.truncate(path, raw.rfind(b"\n") + 1)


def sampled(
    study: optuna.Study, layers: int, values: Values, trials: int, until: float, seed: int = 0
) -> Iterator[Tried]:
    """Sets that the study's sampler asks for, until there are `trials` in it or the time is up.

    What is drawn depends on the seed and on the trials before, so a study that was killed asks for
    the sets that it would have asked for, and workers that share one ask for different ones.
    """
    import optuna

    names = [name_of(half, layers) for half in range(2 * layers)]
    choices: dict[str, optuna.distributions.BaseDistribution] = {
        name: optuna.distributions.CategoricalDistribution([False, True]) for name in names
    }
    sampler: Any = type(study.sampler)
    # a Gaussian process does not look at pruned trials, and would ask for their like again: it is
    # told what they were worth so far
    counts_begun = issubclass(sampler, optuna.samplers.GPSampler)
    with _worker(study):
        while (count := _counted(study)) < trials and time.perf_counter() < until:
            study.sampler = sampler(seed=seed + count)
            trial = study.ask(choices)
            halves = frozenset(half for half, name in enumerate(names) if trial.params[name])
            found = values(halves) if 0 < len(halves) < 2 * layers - 1 else ()
            value, whole = _told(trial, found)
            if value is None or not (whole or counts_begun):
                study.tell(trial, state=optuna.trial.TrialState.PRUNED, skip_if_finished=True)
                continue
            study.tell(trial, value, skip_if_finished=True)
            yield Tried(halves, value)


def _told(trial: optuna.Trial, values: Iterable[float]) -> tuple[float | None, bool]:
    """A trial's last value, if there is one, and whether it is that of all texts: it may have been
    bad enough before."""
    value = None
    for step, value in enumerate(values):
        trial.report(value, step)
        if trial.should_prune():
            return value, False
    return value, True


def finished(study: optuna.Study, layers: int) -> list[Tried]:
    """What the study knows already, of this worker and of others."""
    names = [name_of(half, layers) for half in range(2 * layers)]
    return [
        Tried(frozenset(i for i, name in enumerate(names) if trial.params[name]), trial.value)
        for trial in study.trials
        if trial.state.name == "COMPLETE" and trial.value is not None
    ]


def _counted(study: optuna.Study) -> int:
    """Trials that have ended, or that somebody is at."""
    return sum(trial.state.name != "FAIL" for trial in study.get_trials(deepcopy=False))


@contextmanager
def _worker(study: optuna.Study) -> Iterator[None]:
    """Be one of those who work on the study. Whoever is alone gives up what killed ones began."""
    import optuna

    me, host = psutil.Process(), platform.node()
    others = [name for name, here in study.user_attrs.items() if here is True]
    if not any(_works(name, host) for name in others):
        for trial in study.get_trials(deepcopy=False):
            if trial.state is optuna.trial.TrialState.RUNNING:
                study.tell(trial.number, state=optuna.trial.TrialState.FAIL)
    name = f"worker {host} {me.pid} {me.create_time()}"
    study.set_user_attr(name, True)
    try:
        yield
    finally:
        study.set_user_attr(name, False)


def _works(name: str, host: str) -> bool:
    """Whether a worker lives, as far as can be said: of another machine's, nobody knows."""
    kind, where, pid, begun = name.rsplit(" ", 3) if name.count(" ") >= 3 else ("", "", "0", "0")
    if kind != "worker":
        return False
    try:
        return where != host or psutil.Process(int(pid)).create_time() == float(begun)
    except psutil.Error:
        return False


def name_of(half: int, layers: int) -> str:
    """As in a study: "attention 3", "mlp 3"."""
    return f"attention {half}" if half < layers else f"mlp {half - layers}"
