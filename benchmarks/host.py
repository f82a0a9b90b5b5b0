"""`scripts/bench host`: what a round costs beside the model's products: drafting, trees, choosing
and keeping tokens, bookkeeping and text, as whoever reads a stream pays for it.

A round's time less the time inside the native calls of its passes. The weights go through the
caches in each of them, so Python and its data come from memory again every round, which a loop
without a model would not show. Rounds that kernels ran one after the other (engine/streak.py) share
what the engine took for all of them. Beside it: what passes take, and reading the weights alone.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from benchmarks.command import Model, Out, Show, Threads, made_by, result_path, run_command
from benchmarks.models import folder_of
from benchmarks.ratios import median, milliseconds
from selfspec import LLM
from selfspec.bench.html import Table
from selfspec.bench.schema import Result, Seconds, read, write
from selfspec.bench.tables import markdown as as_text
from selfspec.bench.tables import number
from selfspec.cli.bench import progress_bar
from selfspec.engine import streak
from selfspec.model.compute.cpu.native import library
from selfspec.model.compute.cpu.rounds import Round
from selfspec.model.measuring import weight_bytes

# the native calls that a pass consists of; run_model embeds and finds the likeliest tokens as well
PASSES = ("run_halves", "run_model", "linear", "normalise")
FIRST = 4  # rounds after which a draft is as it will be
PROMPT = (
    "The cat sat on the mat. The dog sat on the log. The cat saw the dog, and the dog saw the "
    "cat. " * 6 + "Go on with this story.\n"
)


@dataclass(frozen=True)
class Shape:
    """A kind of round: what drafts, and how many tokens."""

    name: str
    draft: str | None
    tokens: int = 0


SHAPES = (
    Shape("plain", None),
    Shape("chain", "ngram", 7),
    Shape("tree", "recycle", 7),
    Shape("tree of both", "hybrid", 7),
)


@dataclass
class Rounds:
    """Seconds of rounds of one shape, those of full drafts: beside the native calls and in them."""

    shape: str
    drafted: int
    host: Seconds = field(default_factory=list)
    native: Seconds = field(default_factory=list)


@dataclass
class KindRow:
    """One way to store weights."""

    weights: str
    bytes: int
    reading: Seconds = field(default_factory=list)
    """Seconds to add up as many bytes, with all threads."""
    rounds: list[Rounds] = field(default_factory=list)


@dataclass
class HostRun(Result):
    """Everything that was measured."""

    kind = "host"
    measured_by = "scripts/bench host"

    model: str
    kinds: list[KindRow] = field(default_factory=list)


class Meter:
    """Seconds inside the native calls so far."""

    def __init__(self) -> None:
        self.seconds = 0.0

    @contextmanager
    def running(self) -> Iterator[None]:
        """Meanwhile every native call of a pass is timed."""
        native: Any = library()
        streaks: Any = streak
        own = {name: getattr(native, name) for name in PASSES}
        for name, function in own.items():
            setattr(native, name, self._timed(function))
        run_rounds = streaks.run_rounds

        def noted(*arguments: Any) -> Sequence[Round]:
            rounds: Sequence[Round] = run_rounds(*arguments)
            self.seconds += sum(each.passing for each in rounds)
            return rounds

        streaks.run_rounds = noted
        try:
            yield
        finally:
            for name, function in own.items():
                setattr(native, name, function)
            streaks.run_rounds = run_rounds

    def _timed(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            begin = time.perf_counter()
            given = function(*arguments)
            self.seconds += time.perf_counter() - begin
            return given

        return call


@dataclass
class Step:
    """What the engine did at once: rounds by what they drafted."""

    begin: float
    inside: float  # native calls, seconds in all so far
    native: float = 0.0  # and in this one
    end: float = field(init=False)
    drafted: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.end = self.begin


def measure(llm: LLM, shape: Shape, tokens: int, into: Rounds) -> None:
    """Stream one answer, and keep its rounds with full drafts. The text is read as it comes."""
    meter = Meter()
    control = {"control": "fixed", "control_options": {"tokens": shape.tokens}}
    drafting: Any = {"draft": shape.draft, **(control if shape.draft else {})}
    steps: list[Step] = []
    with meter.running():
        step = Step(time.perf_counter(), 0.0)
        for piece in llm.stream(PROMPT, max_new_tokens=tokens, eos=[], **drafting):
            if meter.seconds > step.inside:  # else it comes from the last one's rounds
                step = Step(step.end, meter.seconds, meter.seconds - step.inside)
                steps.append(step)
            step.end = time.perf_counter()
            step.drafted.append(piece.accepted + len(piece.rejected))
    before = 0
    for step in steps:
        rounds, full = len(step.drafted), step.drafted.count(shape.tokens)
        if before >= FIRST:
            into.host += [(step.end - step.begin - step.native) / rounds] * full
            into.native += [step.native / rounds] * full
        before += rounds


def reading_seconds(count: int) -> float:
    """Seconds to add up `count` bytes from memory, the better of two."""
    numbers = torch.ones(count // 8, dtype=torch.int64)
    seconds = []
    for _ in range(2):
        begin = time.perf_counter()
        numbers.sum().item()
        seconds.append(time.perf_counter() - begin)
    return min(seconds)


def markdown(run: HostRun) -> str:
    """The table."""
    rows = []
    for kind in run.kinds:
        reading = median(kind.reading)
        for each in kind.rounds:
            native = median(each.native)
            rows.append(
                [
                    kind.weights,
                    each.shape,
                    str(len(each.host)),
                    milliseconds(median(each.host)),
                    milliseconds(native),
                    milliseconds(reading),
                    number(native / reading, 2) if native and reading else "-",
                ]
            )
    where = run.provenance
    head = ["weights", "round", "rounds", "host ms", "native ms", "reading ms", "native / reading"]
    note = f"{run.model}, {where.threads} threads, {where.cpu}. Medians of all full rounds."
    return as_text([Table(head, rows), note])


def host(
    model: Model = "demo",
    kinds: Annotated[str, typer.Option(help="Ways to store weights.")] = "float32,int8",
    turns: Annotated[int, typer.Option(min=1, help="Answers of each kind and shape.")] = 3,
    tokens: Annotated[int, typer.Option(min=8, help="Tokens of an answer.")] = 150,
    threads: Threads = 2,
    out: Out = None,
    show: Show = None,
) -> None:
    """What a round costs beside the model's own products.

    Example: scripts/bench host --kinds int8 --turns 1
    """
    if show is not None:
        typer.echo(markdown(read(HostRun, show)))
        return
    folder, run = folder_of(model), HostRun(made_by("host", threads), Path(model).name)
    models = {
        kind: LLM.from_pretrained(folder, weights=kind, threads=threads, profile=None)
        for kind in kinds.split(",")
    }
    for kind, llm in models.items():
        rounds = [Rounds(shape.name, shape.tokens) for shape in SHAPES]
        run.kinds.append(KindRow(kind, weight_bytes(llm.model), rounds=rounds))
    with progress_bar(turns) as (tick, say):
        for turn in range(turns):
            say(f"turn {turn + 1}")
            for row in run.kinds:
                row.reading.append(reading_seconds(row.bytes))
                for shape, into in zip(SHAPES, row.rounds, strict=True):
                    measure(models[row.weights], shape, tokens, into)
            tick("")
    run.complete = True
    write(run, out or result_path("host"))
    typer.echo(markdown(run))


if __name__ == "__main__":
    run_command(host)
