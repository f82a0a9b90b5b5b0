"""A tuning from begin to end: text, costs, probes, search, turns, verdict.

What can be predicted is predicted, and only the best few are timed. The time is divided before it
begins, so a short budget gives a rougher answer and not half of one. Ctrl-C ends the search, and
what was found by then is timed and kept.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from ..core.files import is_there
from ..core.machine import this_machine
from ..errors import OptionError, ResourceError
from ..exits.part import KIND as PREDICTORS
from ..exits.part import find_predictors
from ..llm import LLM
from ..model.copies import copy_in
from ..profile import GENERAL, SCHEMA, Profile, Way, named
from ..trained.files import part_folder, shipped_part, signature
from . import candidates
from .candidates import Candidate, Plain, Prediction
from .kept_costs import costs_of
from .neighbours import climbed
from .options import OPTUNAS, Setting, TuneOptions
from .probe import Probe, Text
from .rounds import host_of
from .saying import Say, seldom
from .search import Halves, Tried, by_likeness, far_apart, grown, runs, split
from .skip_sets import SkipSets
from .steps import Steps
from .study import finished, sampled, study_in
from .texts import ASKED, chosen, digest_of, digest_of_question, own_texts, prompts_of
from .timing import Trials
from .verdict import answer, training, words

if TYPE_CHECKING:
    import optuna

SCREENED = 3  # texts that a set is timed on while searching
FINALISTS = 2  # skip sets, exits and copies that are timed
MOST_COSTS = 30.0  # seconds, for the parts of a pass
LOOKED, CLOSE = 2, 3  # prompts of a look at all ways, and how many are timed further
MOST_TURNS = 12  # behind these only other questions would say more


@dataclass
class Found:
    """What a tuning knows, as it goes."""

    steps: Steps | None = None
    predicted: list[tuple[Way, Prediction]] = field(default_factory=list)
    """Every candidate's best number of drafts, and what it should bring."""
    tried: list[Tried] = field(default_factory=list)
    """Skip sets in the order in which they were looked at."""
    seconds: list[float] = field(default_factory=list)
    """When each of the last ones was looked at, from the search's begin; others come from a
    study."""
    ways: list[Way] = field(default_factory=list)
    """Those that were timed."""
    verdict: str = ""
    answer: str = ""
    notes: list[str] = field(default_factory=list)
    """What was found without being named."""
    stopped: bool = False
    """Whether Ctrl-C ended it before its time."""


class Tuning:
    """At work on one model. `run` does everything; `found` can be looked at any time."""

    def __init__(
        self,
        llm: LLM,
        options: TuneOptions,
        asked: Sequence[str] = (),
        say: Say | None = None,
        task: str = GENERAL,
        setting: Setting | None = None,
    ) -> None:
        self._setting = setting or Setting()
        self._task = named(task)
        self._llm, self._options = llm, options
        self._say = seldom(say or (lambda stage, share: None))
        self._questions = chosen(asked)
        self._read, self._timed = (prompts_of(llm, texts) for texts in self._questions)
        self._end = time.perf_counter() + 60 * options.minutes
        self._how = options.max_new_tokens, self._setting.batch, self._setting.temperature
        self.found = Found()

    def run(self) -> Profile:
        """Everything, in order."""
        model, found = self._llm.model, self.found
        self._say("the model writes", 0.0)
        texts = own_texts(self._llm, self._read, self._options.max_new_tokens)
        self._digest = digest_of(texts)
        self._study = self._open_study()
        ways = [] if model.chains_only else self._predicted(texts)
        ways += self._from_text() if self._setting.allows("text") else []
        ways += self._by_predictors() if self._setting.allows("exits") else []
        ways += self._climbed(ways)
        late = time.perf_counter() > self._end
        trials = self._time(ways)
        found.ways = sorted(map(trials.timed, ways), key=lambda way: -(way.measured or 0.0))
        could = training(found.steps, model.layers, self._plain) if found.steps else None
        found.answer = answer(found.ways)
        busy = trials.busy or bool(found.steps and found.steps.busy)
        searched = self._options.search != "none" and self._setting.allows("skips")
        found.verdict = words(
            found.ways,
            could,
            exact=trials.exact,
            busy=busy,
            short=late
            or trials.turns <= 2
            or (searched and not model.chains_only and not found.tried),
            stopped=found.stopped,
        )
        return self._profile()

    # --------------------------------------------------------------------------------- candidates

    def _predicted(self, texts: Sequence[Text]) -> list[Way]:
        """The best of the ways that run parts of the model, by costs and probe."""
        llm, options = self._llm, self._options
        probe = Probe(llm.model, texts)
        context = sum(len(text.ids) for text in texts) / len(texts)
        share = min(MOST_COSTS, 6.0 * options.minutes)  # a tenth of the time
        weights, tick = llm.info.weights, lambda part: self._say("costs", part)
        steps, before = costs_of(llm.model, weights, share, tick)
        self.found.steps = steps
        if before:
            self.found.notes.append(
                "What passes cost was measured here before, and whole passes of now agree."
            )
        self._plain = Plain(context, host_of(llm.model), self._setting.batch)
        looks: dict[str, Callable[[], list[Way]]] = {
            "copies": lambda: self._copies(probe),
            "exits": lambda: self._exits(probe, steps),
            "skips": lambda: self._skips(probe, steps),
        }
        if options.search == "none" or llm.model.layers < 2:
            del looks["skips"]
        ways: list[Way] = []
        for kind, look in looks.items():
            if self._setting.allows(kind) and not self.found.stopped:
                try:
                    ways += look()
                except KeyboardInterrupt:
                    self._stop()
        return ways

    def _stop(self) -> None:
        """Ctrl-C: what was found by now is timed."""
        self.found.stopped = True
        self._say("stopped; what was found is timed", 0.0)

    def _predict(self, candidate: Candidate, probe: Probe, phases: Sequence[int]) -> Prediction:
        agreement = probe.agreement(candidate.model, candidate.plan, phases)
        steps = self.found.steps
        assert steps is not None, "costs were measured before"
        return candidate.predicted(agreement, steps, self._llm.model.layers, self._plain)

    def _way(self, candidate: Candidate, prediction: Prediction) -> Way:
        way = candidate.way(prediction.tokens, prediction.gain)
        self.found.predicted.append((way, prediction))
        return way

    def _best(self, offers: Sequence[Candidate], probe: Probe, count: int) -> list[Way]:
        """Those with the highest predicted gain, that beat plain decoding at all."""
        if len(offers) > count + 1:  # few chains of each say which are worth a closer look
            rough = [self._predict(each, probe, (0,)).gain for each in offers]
            ranks = sorted(range(len(offers)), key=lambda index: -rough[index])
            offers = [offers[index] for index in ranks[: count + 1]]
        found = [(self._predict(each, probe, probe.everywhere), each) for each in offers]
        found.sort(key=lambda pair: -pair[0].gain)
        ways = [(prediction.gain, self._way(each, prediction)) for prediction, each in found]
        return [way for gain, way in ways[:count] if gain > 1]

    def _copies(self, probe: Probe) -> list[Way]:
        """The model's copies in fewer bits, alone and with guesses for them."""
        model, ways = self._llm.model, []
        for weights in ("int8", "int4") if model.ops.kernel == "native" else ():
            try:
                copy = copy_in(model, weights)
            except (OptionError, ResourceError):  # no smaller, or no room
                continue
            self._say(f"the copy in {weights}", 0.0)
            own, _ = costs_of(copy, weights, min(MOST_COSTS, 3.0 * self._options.minutes))
            candidate = candidates.copied(copy, own, weights)
            ways += self._best([candidate], probe, 1)
            options = {"weights": weights}
            ways.append(Way("quantised", options, "fixed", {"tokens": 7}))
        return ways

    def _exits(self, probe: Probe, steps: Steps) -> list[Way]:
        """The best exit: of every few layers, then of those around the best of these."""
        model = self._llm.model
        stride = max(1, model.layers // 10)
        self._say("exits", 0.0)

        def rough(layer: int) -> float:
            return self._predict(candidates.exiting(model, steps, layer), probe, (0,)).gain

        best = max(range(stride, model.layers, stride), key=rough, default=1)
        around = range(max(1, best - stride + 1), min(model.layers, best + stride))
        offers = [candidates.exiting(model, steps, layer) for layer in around]
        return self._best(offers, probe, 1)

    def _skips(self, probe: Probe, steps: Steps) -> list[Way]:
        """The skip sets with the highest predicted gain, of all that the time allows."""
        sets = SkipSets(self._llm.model, steps, probe, self._plain)
        if self._study is not None:
            sets.go_on(finished(self._study, self._llm.model.layers))

        def values(halves: Halves) -> Iterator[float]:
            if self._options.timed:
                return self._timed_gains(halves)
            return sets.values(halves, early=self._options.search != "grown")

        begin = time.perf_counter()
        end = begin + 0.6 * (self._end - begin)
        try:
            start = [*by_likeness(probe.cosines), *runs(self._llm.model.layers)]
            for tried in self._searched(values, sets.kept, end, start):
                self.found.tried.append(tried)
                self.found.seconds.append(time.perf_counter() - begin)
                best = max(each.value for each in self.found.tried)
                share = (time.perf_counter() - begin) / max(1e-9, end - begin)
                self._say(
                    f"{len(self.found.tried)} skip sets, best {best:.2f}, {self._left(end)} left",
                    min(1.0, share),
                )
        except KeyboardInterrupt:
            self._stop()
        finalists = far_apart(self.found.tried, 2 * FINALISTS)
        return self._best([sets.candidate(tried.halves) for tried in finalists], probe, FINALISTS)

    @staticmethod
    def _left(end: float) -> str:
        seconds = max(0, round(end - time.perf_counter()))
        return f"{seconds // 60}:{seconds % 60:02d}"

    def _searched(
        self,
        values: Callable[[Halves], Iterator[float]],
        kept: Callable[[Halves], float],
        end: float,
        start: Sequence[Halves],
    ) -> Iterator[Tried]:
        options, layers = self._options, self._llm.model.layers
        if options.search == "grown":

            def value(halves: Halves) -> float:
                return list(values(halves))[-1]

            found = grown(layers, value, kept, end, start=start)
            yield from itertools.islice(found, options.trials or None)
            return
        assert self._study is not None, "it was opened before anything was measured"
        self.found.tried += finished(self._study, layers)
        yield from sampled(self._study, layers, values, options.trials or 10**6, end)

    def _open_study(self) -> optuna.Study | None:
        """Optuna's, if it is to search: another model's is refused before minutes of work."""
        options, info = self._options, self._llm.info
        if options.search not in OPTUNAS or not self._setting.allows("skips"):
            return None
        about = f"{info.name}, {self._llm.model.layers} layers, {info.weights}"
        about = f"{about}, timed={options.timed}, texts {self._digest}"
        name = "skips" if self._task == GENERAL else f"skips for {self._task}"
        return study_in(options.study, options.search, about, name)

    def _timed_gains(self, halves: Halves) -> Iterator[float]:
        """Measured speed over plain decoding's, with the paper's adaptive length, prompt by
        prompt."""
        attention, mlp = split(halves, self._llm.model.layers)
        way = Way("layer-skip", {"attention": attention, "mlp": mlp}, "adaptive")
        trials = Trials(self._llm, self._read[:SCREENED], self._options.max_new_tokens)
        for _ in trials.answers([way]):
            yield trials.gain(way).value

    def _from_text(self) -> Iterator[Way]:
        """Ways whose drafts cannot be probed: guesses from the text, and trained parts that come
        with the package for this model."""
        yield Way("hybrid", {}, "cost-aware")
        yield Way("auto", self._setting.auto_options)
        if shipped_part("draft-head", self._llm.model) is not None:
            yield Way("draft-head", {}, "cost-aware")

    def _climbed(self, ways: Sequence[Way]) -> list[Way]:
        """What is reached from the fastest way by one change after another, timed on texts that
        were read, since the others judge. Nothing if there is no time, or no change is faster."""
        end = time.perf_counter() + 0.4 * (self._end - time.perf_counter())
        steps: list[Way] = []

        def speeds(offers: Sequence[Way]) -> list[float]:
            trials = Trials(self._llm, self._read[:2], *self._how)
            trials.turn(offers)
            said = f"neighbours of {offers[-1].draft}" if steps else "all ways once"
            self._say(f"{said}, {self._left(end)} left", 0.0)
            return [trials.gain(way).value for way in offers]

        if self.found.stopped or self._options.search == "none":
            return []
        try:
            for way in climbed(ways, speeds, end, self._setting.allows("copies")):
                steps.append(way)
        except KeyboardInterrupt:
            self._stop()
        return [way for way in steps[-1:] if way not in ways]

    def _by_predictors(self) -> list[Way]:
        """Exits that differ from token to token, where there are predictors for them."""
        model, folder = self._llm.model, self._setting.predictors
        if folder:
            find_predictors(folder, model)  # of another model: better said now than in a turn
            part = str(part_folder(folder).expanduser().resolve())  # a profile is used elsewhere
            return [Way("dynamic-exit", {"part": part}, "cost-aware")]
        if shipped_part(PREDICTORS, model) is None:
            return []
        self.found.notes.append(
            "dynamic-exit is timed with the predictors that come with this model"
        )
        return [Way("dynamic-exit", {}, "cost-aware")]

    # ------------------------------------------------------------------------------------- turns

    def _time(self, ways: Sequence[Way]) -> Trials:
        """A look at all ways, then turns of the fastest: as many as fit, and once more if the
        machine was busy meanwhile. Ways that were looked at only get no speed."""
        first, again = Trials(self._llm, self._timed[:LOOKED], *self._how), self.found.stopped
        if not self._turn(first, ways) and again:
            return first
        close = sorted(ways, key=lambda way: -(first.speed(way) or way.predicted or 0.0))[:CLOSE]
        # auto is kept: it learns, and begins slowly
        close += [way for way in ways if way.draft == "auto" and way not in close]
        trials = self._turns(close, first)
        if trials.busy and not self.found.stopped:
            self._say("the machine was busy: once more", 0.0)
            quieter = self._turns(close, first)
            quieter.exact &= trials.exact
            trials = quieter if quieter.turns and quieter.spread < trials.spread else trials
        trials.exact &= first.exact
        return trials

    def _turns(self, ways: Sequence[Way], first: Trials) -> Trials:
        """Turns of these ways, as many as there is time for: one at least, two of few prompts."""
        trials = Trials(self._llm, self._timed, *self._how, before=first)
        begin, spent = time.perf_counter(), 0.0
        left = 0.0 if self.found.stopped else max(0.0, self._end - begin)
        least = 1 if len(self._timed) >= ASKED else 2
        while trials.turns < least or (
            trials.turns < MOST_TURNS and spent + spent / trials.turns < left
        ):
            if not self._turn(trials, ways):
                break
            spent = time.perf_counter() - begin
            words = f"{len(ways)} ways in turns with plain decoding, {self._left(self._end)} left"
            self._say(words, min(1.0, spent / max(left, spent)))
        return trials

    def _turn(self, trials: Trials, ways: Sequence[Way]) -> bool:
        """One of them. Ctrl-C keeps the prompts that were answered in every way."""
        try:
            trials.turn(ways)
        except KeyboardInterrupt:
            trials.drop_begun()
            self._stop()
            return False
        return True

    def _profile(self) -> Profile:
        llm, name = self._llm, self._llm.info.name
        if is_there(Path(name)):  # where it lies says nothing elsewhere
            name = Path(name).resolve().name
        ways = tuple(way for way in self.found.ways if (way.measured or 0.0) > 1)
        return Profile(
            SCHEMA,
            self._task,
            name,
            signature(llm.model),
            llm.info.weights,
            this_machine(),
            self._digest,
            self.found.verdict,
            ways,
            tuple(digest_of_question(text) for texts in self._questions for text in texts),
        )
