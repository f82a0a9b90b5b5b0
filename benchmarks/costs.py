"""`scripts/bench costs`: does the tuner's cost model say what rounds take?

The parts of a pass are timed as `selfspec advise` does it, and in turns with them rounds of the
engine, over many numbers of rows, tokens and lengths of context. In the end the parts predict the
rounds, of which they know nothing: plain ones, ones with guesses that cost nothing, and ones that
are drafted by the first layers, by a skip set and by a copy in fewer bits. Of both the lower
quartile of the times counts: other work on the machine only ever adds.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import typer

from benchmarks.command import Model, Out, Show, Threads, made_by, result_path, run_command
from benchmarks.models import folder_of
from benchmarks.ratios import median, milliseconds
from selfspec import LLM
from selfspec.bench.html import Table
from selfspec.bench.schema import Result, Seconds, read, write
from selfspec.bench.tables import markdown as as_text
from selfspec.cli.bench import progress_bar
from selfspec.draft.base import Drafter
from selfspec.draft.registry import make_drafter
from selfspec.model.copies import copy_in
from selfspec.model.layered import LayeredModel
from selfspec.tune.candidates import Candidate, Plain, copied, exiting, plain_round, skipping
from selfspec.tune.rounds import Host, HostParts, Rounds, room_for, scripted
from selfspec.tune.steps import LEAST, Line, Parts, Steps, made_up_cache, undisturbed

AIM = 0.1
NOTHING = Steps(Line({"1": 0.0}), Line({"1": 0.0}), {}, Line({"1": 0.0}), 0.0)  # before a turn
TIMED = 2  # rounds of a case in a turn
CONTEXTS = (64, 512, 2048, 4096)
SHAPES = ((1, 1), (1, 2), (1, 4), (1, 8), (1, 16), (1, 32), (2, 1), (2, 8), (4, 4), (8, 1), (8, 4))
"""(rows, tokens of a row) of rounds that are verified only."""
LARGE = ((2, 32), (8, 16), (8, 32))
"""The same where one context is enough: they take long."""
DRAFTED = ((1, 4), (4, 4))
"""(rows, drafts) of rounds whose drafting counts too."""


@dataclass
class CostRow:
    """Rounds of one kind."""

    way: str
    rows: int
    tokens: int
    """New tokens of a row in a round, drafts and the one before them."""
    context: int
    predicted: float
    measured: Seconds = field(default_factory=list)

    @property
    def error(self) -> float | None:
        """Predicted over measured, less 1."""
        return self.predicted / self.seconds - 1 if self.seconds else None

    @property
    def seconds(self) -> float | None:
        """What a round takes while nothing else runs, by the same rule as the parts' times."""
        taken = [each for each in self.measured if each is not None]
        return undisturbed(taken) if taken else None


@dataclass
class CostsRun(Result):
    """Everything that was measured."""

    kind = "costs"
    measured_by = "scripts/bench costs"

    model: str
    weights: str
    turns: int = 0
    spread: float = 1.0
    """The median time of a part over its shortest: how quiet the machine was."""
    rows: list[CostRow] = field(default_factory=list)


@dataclass
class Case:
    """A kind of round: who drafts, by what."""

    way: str
    rows: int
    tokens: int
    context: int
    drafter: Drafter | None
    rounds: Rounds
    measured: Seconds = field(default_factory=list)


def all_cases(model: LayeredModel, candidates: Sequence[Candidate]) -> list[Case]:
    """Every kind of round, on one cache for each length of context."""
    fitting = [each for each in CONTEXTS if each + 1024 <= model.shape.context]
    drafters = [make_drafter(each.draft, each.draft_options) for each in candidates]
    shapes = [(*shape, context) for context in fitting for shape in SHAPES]
    shapes += [(*shape, fitting[min(1, len(fitting) - 1)]) for shape in LARGE]
    told: list[tuple[str, int, int, int, Drafter | None]] = [
        ("verified", rows, tokens, context, scripted(rows, tokens - 1) if tokens > 1 else None)
        for rows, tokens, context in shapes
    ]
    told += [
        (candidate.draft, rows, drafts + 1, context, drafter)
        for candidate, drafter in zip(candidates, drafters, strict=True)
        for context in fitting[1::2]
        for rows, drafts in DRAFTED
    ]
    most = max(rows for _, rows, *_ in told)
    room = room_for(TIMED, max(tokens for _, _, tokens, *_ in told))
    caches = {context: made_up_cache(model, most, context, room) for context in fitting}
    return [
        Case(*case, Rounds(model, case[1], case[3], case[4], case[2] - 1, caches[case[3]]))
        for case in told
    ]


def predicted(
    case: Case, model: LayeredModel, steps: Steps, host: Host, candidates: Sequence[Candidate]
) -> CostRow:
    """A case beside what the costs say of it."""
    plain = Plain(case.context, host, case.rows)
    by_name = {each.draft: each for each in candidates}
    if case.way in by_name:
        seconds = by_name[case.way].round_seconds(steps, model.layers, case.tokens - 1, plain)
    else:
        seconds = plain_round(steps, model.layers, plain, case.tokens)
    return CostRow(case.way, case.rows, case.tokens, case.context, seconds, case.measured)


@dataclass
class Bench:
    """A model with its parts and rounds, all timed in turns."""

    model: LayeredModel
    parts: Parts
    host: HostParts
    copy: LayeredModel
    copied: Parts
    cases: list[Case]

    @classmethod
    def of(cls, model: LayeredModel) -> Bench:
        copy = copy_in(model, "int4")
        cases = all_cases(model, candidates_of(model, copy, NOTHING, NOTHING))
        return cls(model, Parts(model), HostParts(model), copy, Parts(copy), cases)

    def turn(self, order: random.Random, tick: Callable[[str], None], end: float) -> None:
        """Everything once."""
        self.parts.turn()
        self.host.turn()
        self.copied.turn()
        for case in order.sample(self.cases, len(self.cases)):
            if case.measured and time.perf_counter() > end:
                return
            case.measured += [each.all for each in case.rounds.run(TIMED)]
            tick("")

    def rows(self) -> list[CostRow]:
        """All cases, predicted by the parts so far."""
        steps, host = self.parts.steps, self.host.host
        offers = candidates_of(self.model, self.copy, steps, self.copied.steps)
        return [predicted(case, self.model, steps, host, offers) for case in self.cases]


def candidates_of(
    model: LayeredModel, copy: LayeredModel, steps: Steps, own: Steps
) -> list[Candidate]:
    """One of each kind: first layers, every fourth half left out, a copy."""
    layers = model.layers
    quarter = range(layers // 4, layers, 4)
    exits = exiting(model, steps, max(1, layers // 4))
    return [exits, skipping(model, steps, quarter, quarter), copied(copy, own, "int4")]


def markdown(run: CostsRun) -> str:
    """The table, and in how many of its rows the aim is met."""
    rows, within = [], 0
    errors = [abs(row.error) for row in run.rows if row.error is not None]
    within = sum(each <= AIM for each in errors)
    for row in run.rows:
        error = "-" if row.error is None else f"{row.error:+.1%}"
        measured = milliseconds(row.seconds)
        shape = [row.way, str(row.rows), str(row.tokens), str(row.context)]
        rows.append([*shape, milliseconds(row.predicted), measured, error])
    head = ["round", "rows", "tokens", "context", "predicted ms", "measured ms", "error"]
    where = run.provenance
    note = (
        f"{run.model} in {run.weights}, {where.threads} threads, {where.cpu}. {within} of "
        f"{len(errors)} kinds of rounds within {AIM:.0%}, the median error "
        f"{median(errors) or 0.0:.1%}, the largest {max(errors, default=0.0):.1%}."
    )
    return as_text([Table(head, rows), note])


def costs(
    model: Model = "demo",
    weights: Annotated[str, typer.Option(help="How the model's weights are stored.")] = "float32",
    minutes: Annotated[float, typer.Option(min=0.1, help="For all of it, about.")] = 2,
    threads: Threads = 2,
    out: Out = None,
    show: Show = None,
) -> None:
    """Predict what rounds take, then time them.

    Example: scripts/bench costs --minutes 1
    """
    if show is not None:
        typer.echo(markdown(read(CostsRun, show)))
        return
    llm = LLM.from_pretrained(folder_of(model), weights=weights, threads=threads, profile=None)
    end, turns, order = time.perf_counter() + 60 * minutes, 0, random.Random(0)
    bench = Bench.of(llm.model)
    run = CostsRun(made_by("costs", threads), Path(model).name, llm.info.weights)
    path = out or result_path("costs", kind="" if weights == "float32" else f"-{weights}")
    with progress_bar(len(bench.cases)) as (tick, say):
        while turns < 1 or time.perf_counter() < end:
            bench.turn(order, tick, end)
            turns += 1
            say(f"turn {turns + 1}")
            run.rows, run.spread = bench.rows(), bench.parts.steps.spread
            run.turns, run.complete = turns, turns >= LEAST
            write(run, path)
    typer.echo(markdown(run))


if __name__ == "__main__":
    run_command(costs)
