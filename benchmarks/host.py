"""`scripts/bench host`: what a round costs beside the model's products: drafting, trees, choosing
and keeping tokens, bookkeeping and text, as whoever reads a stream pays for it.

A round's time less the time inside the native calls of its passes. The weights go through the
caches in each of them, so Python and its data come from memory again every round, which a loop
without a model would not show. Beside it: what the passes take, and reading the weights alone.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
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
from selfspec.model.compute.cpu.native import library
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
        own = {name: getattr(native, name) for name in PASSES}
        for name, function in own.items():
            setattr(native, name, self._timed(function))
        try:
            yield
        finally:
            for name, function in own.items():
                setattr(native, name, function)

    def _timed(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            begin = time.perf_counter()
            given = function(*arguments)
            self.seconds += time.perf_counter() - begin
            return given

        return call


def measure(llm: LLM, shape: Shape, tokens: int, into: Rounds) -> None:
    """Stream one answer, and keep its rounds with full drafts. The text is read as it comes."""
    meter = Meter()
    control = {"control": "fixed", "control_options": {"tokens": shape.tokens}}
    drafting: Any = {"draft": shape.draft, **(control if shape.draft else {})}
    with meter.running():
        then, inside = time.perf_counter(), 0.0
        stream = llm.stream(PROMPT, max_new_tokens=tokens, eos=[], **drafting)
        for index, piece in enumerate(stream):
            now, native = time.perf_counter(), meter.seconds - inside
            if index >= FIRST and piece.accepted + len(piece.rejected) == shape.tokens:
                into.host.append(now - then - native)
                into.native.append(native)
            then, inside = time.perf_counter(), meter.seconds


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
