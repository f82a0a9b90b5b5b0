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

from ..core.machine import this_machine
from ..errors import OptionError, ResourceError, nearest
from ..llm import LLM
from ..model.copies import copy_in
from ..profile import GENERAL, SCHEMA, Profile, Way
from ..trained.files import shipped_part, signature
from . import candidates
from .candidates import Candidate, Plain, Prediction
from .probe import Probe, Text
from .search import Halves, Tried, grown, sampled, split, study_in
from .steps import Steps, measure
from .texts import ASKED, BUILT_IN, digest_of, own_texts, prompts_of
from .timing import Trials, host_seconds
from .verdict import answer, training, words

SCREENED = 3  # texts that a skip set is probed on; the best are probed on all
FINALISTS = 2  # skip sets, exits and copies that are timed
SEARCHES = ("grown", "tpe", "gp", "none")
Say = Callable[[str, float], None]
"""Told the stage and the share of it that is done."""


@dataclass(frozen=True)
class TuneOptions:
    """How much to look at."""

    minutes: float = 5.0
    """About how long all of it may take."""
    max_new_tokens: int = 64
    """Tokens of each answer, of those that are probed and of those that are timed."""
    search: str = "grown"
    """How halves to leave out are searched: grown (half by half, by costs and probe), by Optuna
    (tpe, or gp: a Gaussian process, as in Draft & Verify), or none."""
    timed: bool = False
    """Judge skip sets by timed generations, as in Draft & Verify, instead of predictions."""
    trials: int = 0
    """Stop the search behind so many skip sets; 0 searches as long as there is time."""
    study: str = ""
    """Optuna's study: a file or a database's address. A killed search goes on with it, and several
    workers may share it."""

    def __post_init__(self) -> None:
        if self.search not in SEARCHES:
            raise OptionError(
                f"there is no search {self.search!r}; {nearest(self.search, SEARCHES)}"
            )
        if self.study and self.search not in ("tpe", "gp"):
            raise OptionError(
                f"study={self.study!r} is for Optuna's searches, and {self.search} is none; "
                "use tpe or gp"
            )
        if not 0.1 <= self.minutes <= 10_000:
            raise OptionError(
                f"minutes={self.minutes} is too little to measure anything, or more than a week; "
                "give 0.1 to 10000"
            )
        if self.max_new_tokens < 16:
            raise OptionError(
                f"max_new_tokens={self.max_new_tokens} is too short for a chain of drafts; give 16 "
                "or more"
            )


@dataclass
class Found:
    """What a tuning knows, as it goes."""

    steps: Steps | None = None
    predicted: list[tuple[Way, Prediction]] = field(default_factory=list)
    """Every candidate's best number of drafts, and what it should bring."""
    tried: list[Tried] = field(default_factory=list)
    """Skip sets in the order in which they were looked at."""
    ways: list[Way] = field(default_factory=list)
    """Those that were timed."""
    verdict: str = ""
    answer: str = ""


class Tuning:
    """At work on one model. `run` does everything; `found` can be looked at any time."""

    def __init__(
        self, llm: LLM, options: TuneOptions, asked: Sequence[str] = (), say: Say | None = None
    ) -> None:
        self._llm, self._options = llm, options
        self._say: Say = say or (lambda stage, share: None)
        prompts = prompts_of(llm, list(asked) or list(BUILT_IN))
        cut = max(1, min(ASKED, len(prompts) // 2))
        self._timed, self._read = prompts[-cut:], prompts[:-cut] or prompts
        self._end = time.perf_counter() + 60 * options.minutes
        self.found = Found()

    def run(self) -> Profile:
        """Everything, in order."""
        model, found = self._llm.model, self.found
        self._say("the model writes", 0.0)
        texts = own_texts(self._llm, self._read, self._options.max_new_tokens)
        ways = [] if model.whole else self._predicted(texts)
        ways += self._from_text()
        trials = self._time(ways)
        found.ways = sorted(map(trials.timed, ways), key=lambda way: -(way.measured or 0.0))
        could = training(found.steps, model.layers, self._plain) if found.steps else None
        found.answer = answer(found.ways)
        found.verdict = words(found.ways, could, trials.exact, trials.busy)
        return self._profile(digest_of(texts))

    # --------------------------------------------------------------------------------- candidates

    def _predicted(self, texts: Sequence[Text]) -> list[Way]:
        """The best of the ways that run parts of the model, by costs and probe."""
        llm, options = self._llm, self._options
        probe = Probe(llm.model, texts)
        context = sum(len(text.ids) for text in texts) / len(texts)
        share = 6.0 * options.minutes  # a tenth of the time
        steps = measure(llm.model, share, lambda part: self._say("costs", part))
        self.found.steps = steps
        self._plain = Plain(context, host_seconds(llm, texts[0].ids[: texts[0].prompt]))
        ways = [*self._copies(probe), *self._exits(probe, steps)]
        if options.search != "none" and llm.model.layers > 1:
            ways += self._skips(probe, steps)
        return ways

    def _predict(self, candidate: Candidate, probe: Probe, texts: int = 0) -> Prediction:
        phases = range(0, 8, 4) if not texts else (0,)
        agreement = probe.agreement(candidate.model, candidate.plan, phases, texts)
        steps = self.found.steps
        assert steps is not None, "costs were measured before"
        return candidate.predicted(agreement, steps, self._llm.model.layers, self._plain)

    def _way(self, candidate: Candidate, prediction: Prediction) -> Way:
        way = candidate.way(prediction.tokens, prediction.gain)
        self.found.predicted.append((way, prediction))
        return way

    def _best(self, offers: Sequence[Candidate], probe: Probe, count: int) -> list[Way]:
        """Those with the highest predicted gain, that beat plain decoding at all."""
        found = [(self._predict(each, probe), each) for each in offers]
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
            own = measure(copy, 3.0 * self._options.minutes)
            candidate = candidates.copied(copy, own, weights)
            ways += self._best([candidate], probe, 1)
            options = {"weights": weights}
            ways.append(Way("quantised", options, "fixed", {"tokens": 7}))
        return ways

    def _exits(self, probe: Probe, steps: Steps) -> list[Way]:
        model = self._llm.model
        stride = max(1, model.layers // 10)
        offers = [
            candidates.exiting(model, steps, layer) for layer in range(stride, model.layers, stride)
        ]
        self._say("exits", 0.0)
        return self._best(offers, probe, 1)

    def _skips(self, probe: Probe, steps: Steps) -> list[Way]:
        """The skip sets with the highest predicted gain, of all that the time allows."""
        model, layers = self._llm.model, self._llm.model.layers
        seen: dict[Halves, tuple[float, float]] = {}

        def look(halves: Halves) -> tuple[float, float]:
            if halves not in seen:
                candidate = candidates.skipping(model, steps, *split(halves, layers))
                agreement = probe.agreement(model, candidate.plan, texts=SCREENED)
                prediction = candidate.predicted(agreement, steps, layers, self._plain)
                seen[halves] = prediction.gain, agreement.expected(4)
            return seen[halves]

        begin = time.perf_counter()
        end = begin + 0.6 * (self._end - begin)
        timed = self._options.timed

        def value(halves: Halves) -> float:
            return self._timed_gain(halves) if timed else look(halves)[0]

        try:
            for tried in self._searched(value, lambda halves: look(halves)[1], end):
                self.found.tried.append(tried)
                best = max(each.value for each in self.found.tried)
                share = (time.perf_counter() - begin) / max(1e-9, end - begin)
                self._say(f"{len(self.found.tried)} skip sets, best {best:.2f}", min(1.0, share))
        except KeyboardInterrupt:
            self._say("stopped; what was found is timed", 1.0)
        order = sorted(self.found.tried, key=lambda tried: -tried.value)[: 2 * FINALISTS]
        offers = [
            candidates.skipping(model, steps, *split(tried.halves, layers)) for tried in order
        ]
        return self._best(offers, probe, FINALISTS)

    def _searched(
        self, value: Callable[[Halves], float], kept: Callable[[Halves], float], end: float
    ) -> Iterator[Tried]:
        options, layers = self._options, self._llm.model.layers
        if options.search == "grown":
            found = grown(layers, value, kept, end)
            return itertools.islice(found, options.trials or None)
        about = f"{self._llm.info.name}, {layers} layers, {self._llm.info.weights}"
        study = study_in(options.study, options.search, f"{about}, timed={options.timed}")
        return sampled(study, layers, value, options.trials or 10**6, end)

    def _timed_gain(self, halves: Halves) -> float:
        """Measured speed over plain decoding's, with the paper's adaptive length."""
        attention, mlp = split(halves, self._llm.model.layers)
        way = Way("layer-skip", {"attention": attention, "mlp": mlp}, "adaptive")
        trials = Trials(self._llm, self._read[:2], self._options.max_new_tokens)
        trials.turn([way])
        return trials.gain(way).value

    def _from_text(self) -> Iterator[Way]:
        """Ways whose drafts cannot be probed: guesses from the text, and trained parts that come
        with the package for this model."""
        yield Way("hybrid", {}, "cost-aware")
        yield Way("auto")
        if shipped_part("draft-head", self._llm.model) is not None:
            yield Way("draft-head", {}, "cost-aware")

    # ------------------------------------------------------------------------------------- turns

    def _time(self, ways: Sequence[Way]) -> Trials:
        """As many turns as fit, two at least: the first one warms up and does not count."""
        tokens = self._options.max_new_tokens
        Trials(self._llm, self._timed[:1], tokens).turn(ways)
        trials = Trials(self._llm, self._timed, tokens)
        left, begin = max(1.0, self._end - time.perf_counter()), time.perf_counter()
        spent = 0.0
        while trials.turns < 2 or spent + spent / trials.turns < left:
            trials.turn(ways)
            spent = time.perf_counter() - begin
            self._say(f"{len(ways)} ways in turns with plain decoding", min(1.0, spent / left))
        return trials

    def _profile(self, digest: str) -> Profile:
        llm = self._llm
        ways = tuple(way for way in self.found.ways if (way.measured or 0.0) > 1)
        return Profile(
            SCHEMA,
            GENERAL,
            llm.info.name,
            signature(llm.model),
            llm.info.weights,
            this_machine(),
            digest,
            self.found.verdict,
            ways,
        )
