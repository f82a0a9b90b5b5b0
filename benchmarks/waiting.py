"""`scripts/bench waiting`: how long a short prompt waits for its first token while a long one is
being read, in rounds and in seconds.

A writer goes on all the time, so that a plain round is known: one in which nothing is read. Short
prompts come at random moments, one after the other. A round that is under way when one comes counts
as its first. The server's own worker is measured, without HTTP.
"""

from __future__ import annotations

import random
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import torch
import typer

from benchmarks.command import Model, Out, Show, Threads, made_by, result_path, run_command
from selfspec import LLM, SamplingParams
from selfspec.bench.html import Table
from selfspec.bench.schema import Result, read, write
from selfspec.bench.tables import markdown as as_text
from selfspec.bench.tables import number
from selfspec.bench.tables import threads as said_threads
from selfspec.core.sampling import Sampler
from selfspec.core.text_stream import RowText
from selfspec.engine.row import Request
from selfspec.serve.job import Event, Job
from selfspec.serve.settings import Limits
from selfspec.serve.worker import Worker

PLAIN = 40  # rounds of the writer alone


@dataclass(frozen=True)
class First:
    """One short prompt: how much of the long one was read, rounds and seconds until its token."""

    read: int
    rounds: int
    seconds: float
    longest: float
    """Of these rounds, in seconds."""


@dataclass
class WaitingRun(Result):
    """All of them."""

    kind = "waiting"
    measured_by = "scripts/bench waiting"

    model: str
    weights: str
    long: int
    short: int
    plain: list[float] = field(default_factory=list)
    """Rounds in which nothing was read."""
    firsts: list[First] = field(default_factory=list)
    reading: float = 0.0
    """Seconds until the long prompt was read."""

    @property
    def longest(self) -> float:
        """The longest of all these rounds, in plain ones."""
        return max(each.longest for each in self.firsts) / median(self.plain)


class Clock:
    """When each round of a worker began and ended."""

    def __init__(self, worker: Worker) -> None:
        self.rounds: list[tuple[float, float]] = []
        self._step = worker._generation.step
        worker._generation.step = self  # type: ignore[method-assign]

    def __call__(self) -> Any:
        begin = time.perf_counter()
        try:
            return self._step()
        finally:
            self.rounds.append((begin, time.perf_counter()))


class Caller:
    """Waits for its first token."""

    def __init__(self, worker: Worker, prompt: list[int], tokens: int) -> None:
        self.first: float | None = None
        self.came = threading.Event()
        self.sent = time.perf_counter()
        sampler = Sampler(SamplingParams(), 0, prompt_length=len(prompt))
        self.job = Job(Request(prompt, sampler, tokens), RowText(None, ()), self._hear)
        worker.submit(self.job)

    def _hear(self, event: Event) -> None:
        if event.tokens and self.first is None:
            self.first = time.perf_counter()
            self.came.set()
        if event.error:
            self.came.set()


def first(read: int, rounds: list[tuple[float, float]], sent: float, came: float) -> First:
    """The rounds that ran between a prompt and its token; the one under way when it came counts."""
    lengths = [end - begin for begin, end in rounds if end > sent and begin < came]
    return First(read, len(lengths), came - sent, max(lengths))


def measured(llm: LLM, run: WaitingRun, seed: int) -> None:
    """One long prompt, and short ones until it is read."""
    dice, vocabulary = random.Random(seed), llm.model.shape.vocabulary
    worker = Worker(llm, Limits(rows=4, context=run.long + 400))
    clock = Clock(worker)
    worker.start()
    writer = Caller(worker, [dice.randrange(vocabulary) for _ in range(20)], run.long + 300)
    writer.came.wait()
    while len(clock.rounds) < PLAIN:
        time.sleep(0.01)
    run.plain += [end - begin for begin, end in clock.rounds[5:PLAIN]]
    long = Caller(worker, [dice.randrange(vocabulary) for _ in range(run.long)], 2)
    while not long.came.is_set():
        time.sleep(dice.random() * 8 * median(run.plain))
        settled = long.job.row.settled if long.job.row else 0
        short = Caller(worker, [dice.randrange(vocabulary) for _ in range(run.short)], 2)
        short.came.wait()
        if long.came.is_set() or short.first is None:
            break
        run.firsts.append(first(settled, clock.rounds, short.sent, short.first))
    run.reading = time.perf_counter() - long.sent
    worker.leave(writer.job)
    worker.stop(0)


def markdown(run: WaitingRun) -> str:
    rounds = [each.rounds for each in run.firsts]
    rows = [
        ["short prompts", str(len(run.firsts))],
        ["rounds to the first token, median", number(median(rounds))],
        ["rounds to the first token, most", str(max(rounds))],
        ["a plain round, ms", number(1000 * median(run.plain))],
        ["the longest round, in plain ones", number(run.longest)],
        ["first token, ms, median", number(1000 * median(e.seconds for e in run.firsts))],
        ["first token, ms, longest", number(1000 * max(e.seconds for e in run.firsts))],
        ["the long prompt was read in s", number(run.reading)],
    ]
    said = (
        f"{run.model}, {run.weights}: prompts of {run.short} tokens while one of {run.long} is read"
    )
    return as_text([said, said_threads(run.provenance), Table(["what", "figure"], rows)])


def waiting(
    model: Model = "demo",
    weights: Annotated[str, typer.Option(help="As LLM.from_pretrained takes it.")] = "float32",
    long: Annotated[int, typer.Option(min=100, help="Tokens of the long prompt.")] = 4000,
    short: Annotated[int, typer.Option(min=1, help="Tokens of the short ones.")] = 24,
    seed: Annotated[int, typer.Option(help="Of what is drawn at random.")] = 0,
    threads: Threads = 2,
    out: Out = None,
    show: Show = None,
) -> None:
    """Measure the wait for a first token beside a long prompt."""
    if show is not None:
        typer.echo(markdown(read(WaitingRun, show)))
        return
    torch.set_num_threads(threads)
    llm = LLM.from_pretrained(model, weights=weights)
    path: Path = out or result_path("waiting")
    run = WaitingRun(made_by("waiting", threads), model, llm.info.weights, long, short)
    measured(llm, run, seed)
    run.complete = True
    write(run, path)
    typer.echo(markdown(run))


if __name__ == "__main__":
    run_command(waiting)
