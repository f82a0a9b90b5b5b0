"""`scripts/bench verdicts`: does the tuner say rightly whether drafting will help?

A case is a model, how its weights are stored, how many prompts are answered together, how long they
are, a temperature and what may draft. For each the tuner gives its verdict as `selfspec advise`
does, from costs, the probe and a few turns. Then its ways are timed again for longer, on prompts
that it did not see, together with the drafters that it might have named, at their defaults: a
tuner that finds nothing is not right because of that. The fastest of one turn are timed further,
and the verdict is held against the fastest of these. Cases are measured one by one: the same
command goes on with those that are missing.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Annotated

import typer

from benchmarks.command import Out, Show, Threads, made_by, result_path, run_command
from benchmarks.models import folder_of, questions_of
from benchmarks.near_identity import near_identity_folder
from selfspec import LLM
from selfspec.bench.html import Table
from selfspec.bench.schema import Result, read, write
from selfspec.bench.tables import markdown as as_text
from selfspec.cli.bench import progress_bar
from selfspec.core.files import is_there
from selfspec.errors import OptionError, SelfspecError
from selfspec.profile import Way
from selfspec.testing import near_identity_model, tiny_tokenizer
from selfspec.tune.options import Setting, TuneOptions
from selfspec.tune.run import Found, Tuning
from selfspec.tune.texts import BUILT_IN, prompts_of
from selfspec.tune.timing import Trials
from selfspec.tune.verdict import WORTH, answer, fastest

FILLER = "The ferry left at nine, and the harbour was quiet again until the bells rang at noon. "
FILLER_TOKENS = 20
EVERYTHING, OWN, TEXT = "copies,exits,skips,text", "exits,skips", "text"
UNSEEN = (
    "Which month has the fewest days, and why?",
    "Write a short dialogue between a baker and a customer who is in a hurry.",
    "Name three uses of a paper clip.",
    "Copy this line three times: red, green, blue, yellow, red, green, blue.",
)
MORE = (
    "Describe how bread is made, from the field to the table.",
    "Write a SQL query that counts the orders of each customer.",
    "What is the difference between weather and climate?",
    "Translate into French: The train to Lyon leaves in ten minutes.",
)
SHORT = 32
"""Tokens of an answer while a verdict is looked for, and of the task model's: its structures have
about as many."""
DEFAULTS = {
    "copies": (Way("quantised", {"weights": "int8"}), Way("quantised", {"weights": "int4"})),
    "exits": (Way("early-exit", {}, "cost-aware"), Way("dynamic-exit", {}, "cost-aware")),
    "skips": (Way("layer-skip", {}, "cost-aware"), Way("cosine", {}, "cost-aware")),
    "text": (Way("hybrid", {}, "cost-aware"), Way("ngram", {}, "cost-aware")),
}
"""What might have been named instead, by kind."""
CLOSE = 3  # ways that are timed for long
LONGER = 3  # times as long, at most, where the interval would else say nothing


@dataclass(frozen=True)
class Case:
    """What is asked about."""

    model: str
    weights: str
    batch: int
    context: int
    """Tokens that are put before each question, about."""
    temperature: float
    drafters: str

    def __str__(self) -> str:
        parts = (self.model, self.weights, f"batch {self.batch}", f"context {self.context}")
        return ", ".join((*parts, f"temperature {self.temperature:g}", self.drafters))


@dataclass
class Judged:
    """A case with what was said of it, and what turned out."""

    case: Case
    said: str
    verdict: str
    predicted: float | None
    """The highest predicted speed over plain decoding's."""
    way: str = ""
    """The fastest by the longer measurement."""
    measured: float | None = None
    low: float | None = None
    high: float | None = None
    seconds: float = 0.0

    @property
    def truth(self) -> str:
        """By the same rule as the verdict's."""
        if self.measured is None or self.high is None or self.high < WORTH:
            return "does not"
        return "helps" if (self.low or 0.0) > WORTH else "undecided"

    @property
    def right(self) -> bool | None:
        """None: one of the two is undecided."""
        if "undecided" in (self.said, self.truth):
            return None
        return self.said == self.truth


@dataclass
class VerdictsRun(Result):
    """All cases so far."""

    kind = "verdicts"
    measured_by = "scripts/bench verdicts"

    cases: list[Judged] = field(default_factory=list)


def all_cases() -> Iterator[Case]:
    """The table's rows, in an order that has something of everything early."""
    for drafters, weights in itertools.product(
        (EVERYTHING, OWN, TEXT), ("float32", "int8", "int4")
    ):
        yield Case("demo", weights, 1, 0, 0.0, drafters)
    yield Case("damped", "float32", 1, 0, 0.0, OWN)
    yield Case("deep", "float32", 1, 0, 0.0, EVERYTHING)
    for batch, context, temperature in ((8, 0, 0.0), (1, 2000, 0.0), (1, 0, 0.8), (4, 1000, 0.0)):
        yield Case("demo", "float32", batch, context, temperature, EVERYTHING)
        yield Case("demo", "float32", batch, context, temperature, OWN)
    yield Case("damped", "float32", 8, 0, 0.0, OWN)
    yield Case("damped", "float32", 1, 0, 0.8, OWN)
    yield Case("damped", "int8", 1, 0, 0.0, OWN)
    for batch, drafters in ((8, EVERYTHING), (1, OWN), (1, TEXT)):
        yield Case("deep", "float32", batch, 0, 0.0, drafters)
    yield Case("demo", "int4", 8, 0, 0.0, TEXT)
    yield Case("demo", "int8", 8, 0, 0.8, EVERYTHING)
    yield Case("task", "float32", 1, 0, 0.0, OWN)
    yield Case("task", "float32", 1, 0, 0.0, EVERYTHING)
    yield Case("task", "int8", 1, 0, 0.0, OWN)
    yield Case("demo", "bfloat16", 1, 0, 0.0, EVERYTHING)


def asked_of(model: str) -> tuple[list[str], list[str]]:
    """Of the questions that lie beside a model, those to tune with and those to judge by. For other
    models none and some of ours: the tuner has its own."""
    own, judging = questions_of(model), [*UNSEEN, *MORE]
    return (own[: -len(judging)], own[-len(judging) :]) if own else ([], judging)


def loaded(case: Case, threads: int) -> LLM:
    """The case's model. `damped`: the demo with late layers that change little. `deep`: a tiny
    random one of 24 layers, most of which change little. `task`: one with trained exits, asked its
    own questions."""
    if case.model == "deep":
        net = near_identity_model(0.8, 4, num_hidden_layers=24)
        return LLM.from_pretrained(
            net, tokenizer=tiny_tokenizer(), weights=case.weights, threads=threads, profile=None
        )
    damped = case.model == "damped"
    folder = folder_of("demo" if damped else case.model)
    if damped:
        folder = near_identity_folder(folder, 10, 0.1)
    return LLM.from_pretrained(folder, weights=case.weights, threads=threads, profile=None)


def judge(llm: LLM, case: Case, seconds: float) -> Judged:
    """The verdict, then the longer measurement."""
    begin = time.perf_counter()
    room = llm.model.shape.context - 256
    lead = FILLER * (min(case.context, room) // FILLER_TOKENS)
    options = TuneOptions(
        minutes=max(0.1, seconds / 60),
        max_new_tokens=SHORT,
        search="grown" if case.drafters == OWN else "none",
    )
    setting = Setting(case.batch, case.temperature, case.drafters)
    asked, judging = asked_of(case.model)
    if lead:
        asked, judging = [lead + text for text in BUILT_IN[:8]], [lead + text for text in UNSEEN]
    tuning = Tuning(llm, options, asked, setting=setting)
    tuning.run()
    found = tuning.found
    predictions = [prediction.gain for _, prediction in found.predicted]
    judged = Judged(case, found.answer, found.verdict, max(predictions, default=None))
    prompts = prompts_of(llm, judging)
    best = longer(llm, case, prompts, ways_of(llm, case, found), seconds)
    judged.way = str(best)
    judged.measured, judged.low, judged.high = best.measured, best.low, best.high
    judged.seconds = time.perf_counter() - begin
    return judged


def ways_of(llm: LLM, case: Case, found: Found) -> list[Way]:
    """What the tuner named, what it predicted to be best though it paid not, and drafters at their
    defaults."""
    likely = sorted(found.predicted, key=lambda pair: -pair[1].gain)[:2]
    ways = [*found.ways[:CLOSE], *(way for way, _ in likely)]
    for kind in case.drafters.split(","):
        for way in DEFAULTS[kind]:
            try:
                llm.generate([5, 6, 7], max_new_tokens=2, **way.options)
            except SelfspecError:  # a copy that is no smaller, a part that nobody trained
                continue
            ways.append(way)
    return list({str(way): way for way in ways}.values())


def longer(
    llm: LLM, case: Case, prompts: Sequence[list[int]], ways: Sequence[Way], seconds: float
) -> Way:
    """The fastest of them, after so many seconds of turns, and more while its interval does not
    say whether it helps. A first turn says which come near, and does not count."""
    how = SHORT if case.model == "task" else 48, case.batch, case.temperature
    first = Trials(llm, prompts[2:4], *how)
    first.turn(ways)
    close = sorted(ways, key=lambda way: -first.gain(way).value)[:CLOSE]
    trials = Trials(llm, prompts, *how)
    begin = time.perf_counter()
    while True:
        trials.turn(close)
        best = fastest([trials.timed(way) for way in close])
        assert best is not None, "every case has drafters that it allows"
        longest = LONGER if answer([best]) == "undecided" else 1
        if trials.turns > 1 and time.perf_counter() > begin + longest * seconds:
            return best


def markdown(run: VerdictsRun) -> str:
    """The table, and how often the tuner was right."""
    rows = []
    for each in run.cases:
        interval = "-" if each.low is None else f"{each.low:.2f} to {each.high:.2f}"
        speeds = [
            "-" if speed is None else f"{speed:.2f}" for speed in (each.predicted, each.measured)
        ]
        right = {True: "right", False: "wrong", None: "undecided"}[each.right]
        rows.append([str(each.case), each.said, speeds[0], speeds[1], interval, each.truth, right])
    head = ["case", "said", "predicted", "measured", "95%", "turned out", ""]
    count = {value: sum(each.right is value for each in run.cases) for value in (True, False, None)}
    where = run.provenance
    every = len(list(all_cases()))
    sides = [each.truth for each in run.cases]
    note = (
        f"{where.threads} threads, {where.cpu}. {len(run.cases)} of {every} cases: "
        f"{count[True]} right, {count[False]} wrong, {count[None]} undecided. By measuring "
        f"{sides.count('helps')} help and {sides.count('does not')} do not. Helps means above "
        f"{WORTH} with the whole interval."
    )
    return as_text([Table(head, rows), note])


def verdicts(
    seconds: Annotated[
        float, typer.Option(min=1, help="For a verdict, and as many to measure the case.")
    ] = 48.0,
    minutes: Annotated[float, typer.Option(min=0, help="Begin no case after these; 0: all.")] = 0.0,
    only: Annotated[str, typer.Option(help="Cases whose name holds this.")] = "",
    undecided: Annotated[
        bool, typer.Option("--undecided", help="Measure those again that are undecided.")
    ] = False,
    threads: Threads = 2,
    out: Out = None,
    show: Show = None,
) -> None:
    """Hold the tuner's verdicts against longer measurements, case by case.

    Example: scripts/bench verdicts --minutes 10
    """
    path = out or result_path("verdicts")
    if show is not None:
        typer.echo(markdown(read(VerdictsRun, show)))
        return
    known = read(VerdictsRun, path) if is_there(path) else None
    run = VerdictsRun(made_by("verdicts", threads), cases=known.cases if known else [])
    if known and known.provenance.cpu != run.provenance.cpu:
        raise OptionError(f"{path} is of {known.provenance.cpu}; give --out another file")
    if undecided:
        run.cases = [each for each in run.cases if each.right is not None]
    done = {each.case for each in run.cases}
    missing = [case for case in all_cases() if case not in done and only in str(case)]
    end = time.perf_counter() + 60 * minutes if minutes else float("inf")
    with progress_bar(len(missing)) as (tick, say):
        for case in missing:
            if time.perf_counter() > end:
                break
            say(str(case))
            run.cases.append(judge(loaded(case, threads), case, seconds))
            run.complete = len(run.cases) == len(list(all_cases()))
            write(run, path)
            tick("")
    typer.echo(markdown(run))


if __name__ == "__main__":
    run_command(verdicts)
