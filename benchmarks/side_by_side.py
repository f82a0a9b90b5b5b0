"""`scripts/bench side_by_side`: what drafts bring to batches, measured round by round.

`scripts/bench suite` lets whole answers take turns, and a machine whose speed changes within
seconds spreads their ratio by a tenth. Here plain decoding and a drafter write the same batch at
the same time, and whoever has written less does the next round: both meet the same moments.
Prompts are read once for each of them, and kept. A task's batches are written again until the
interval of its ratio is small, or as often as was allowed. Answers are compared, token by token.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Annotated

import torch
import typer

from benchmarks.command import Model, Out, Show, Threads, made_by, result_path, run_command
from benchmarks.ratios import resampled
from selfspec import LLM, SamplingParams
from selfspec.bench.html import Table
from selfspec.bench.schema import Result, read, write
from selfspec.bench.suite import Unit, units_of
from selfspec.bench.suite_run import Wishes, ask, folder_of, read_tasks, words_of
from selfspec.bench.tables import interval
from selfspec.bench.tables import markdown as as_text
from selfspec.bench.tables import threads as said_threads
from selfspec.bench.timing import Ratio
from selfspec.cli.bench import progress_bar
from selfspec.core.sampling import Sampler
from selfspec.draft.registry import resolve
from selfspec.engine.generation import Generation
from selfspec.engine.row import Request
from selfspec.errors import OptionError

FEWEST = 6  # turns: an interval of fewer is narrower than its name says


@dataclass(frozen=True)
class Turn:
    """All batches of a task, written once by both."""

    plain: float
    """Seconds of plain decoding after the first tokens."""
    drafting: float
    plain_rounds: int
    drafting_rounds: int


@dataclass
class TaskRow:
    """A task's questions in batches of `rows`."""

    task: str
    rows: int
    questions: list[str]
    turns: list[Turn] = field(default_factory=list)
    different: int = 0
    """Batches whose answers were not plain decoding's."""

    @property
    def times_as_fast(self) -> Ratio:
        """Mean time of plain decoding over that of the drafter."""

        def of(turns: Sequence[Turn]) -> float:
            return fmean(turn.plain for turn in turns) / fmean(turn.drafting for turn in turns)

        return resampled(self.turns, of)

    def settled(self, within: float) -> bool:
        """Is the interval small enough?"""
        if len(self.turns) < FEWEST:
            return False
        ratio = self.times_as_fast
        return max(ratio.high - ratio.value, ratio.value - ratio.low) <= within


@dataclass
class SideBySideRun(Result):
    """Everything that was measured."""

    kind = "side_by_side"
    measured_by = "scripts/bench side_by_side"

    model: str
    weights: str
    draft: str
    new_tokens: int
    tasks: list[TaskRow] = field(default_factory=list)


class Writer:
    """One way to decode a batch, with a cache in which the prompts stay."""

    def __init__(self, llm: LLM, unit: Unit, new_tokens: int, draft: str | None) -> None:
        self._llm, self._unit, self._new, self._draft = llm, unit, new_tokens, draft
        self._generation: Generation = llm.generation(rows=len(unit.prompts))
        self.begin()

    def begin(self) -> None:
        """Write the batch anew: its first tokens, which are not timed."""
        known = self._generation.cache
        self._generation = self._llm.generation(cache=known)
        drafter, controller = resolve(self._draft, None, None, None)
        for slot, prompt in enumerate(self._unit.prompts):
            sampler = Sampler(SamplingParams(), 0, prompt_length=len(prompt.ids))
            request = Request(
                list(prompt.ids), sampler, self._new, self._llm.eos,
                drafter=drafter, controller=controller,
            )  # fmt: skip
            self._generation.admit(request, known.length(slot), slot)
        self.seconds, self.rounds, self.written = 0.0, 0, 0
        self.answers: list[list[int]] = [[] for _ in self._unit.prompts]
        while any(row.reading for row in self._generation.rows):
            self._step()

    def _step(self) -> None:
        for part in self._generation.step().rows:
            self.answers[part.row] += part.tokens
            self.written += len(part.tokens)

    @property
    def ended(self) -> bool:
        return not self._generation.rows

    def round(self) -> None:
        """One round, timed."""
        begin = time.perf_counter()
        self._step()
        self.seconds += time.perf_counter() - begin
        self.rounds += 1


def write_both(plain: Writer, drafting: Writer) -> Turn:
    """Both write their batch anew; whoever has written less goes on."""
    both = [plain, drafting]
    for writer in both:
        writer.begin()
    while running := [writer for writer in both if not writer.ended]:
        min(running, key=lambda writer: writer.written).round()
    return Turn(plain.seconds, drafting.seconds, plain.rounds, drafting.rounds)


def measure(
    llm: LLM, run: SideBySideRun, row: TaskRow, units: Sequence[Unit], tick: Callable[[str], None],
    turns: int, within: float,
) -> None:  # fmt: skip
    """A task, until its interval is small."""
    pairs = [
        [Writer(llm, unit, run.new_tokens, draft) for draft in (None, run.draft)] for unit in units
    ]
    for _ in range(turns):
        taken = []
        for plain, drafting in pairs:
            taken.append(write_both(plain, drafting))
            row.different += plain.answers != drafting.answers
        row.turns.append(
            Turn(
                sum(turn.plain for turn in taken),
                sum(turn.drafting for turn in taken),
                sum(turn.plain_rounds for turn in taken),
                sum(turn.drafting_rounds for turn in taken),
            )
        )
        tick("")
        if row.settled(within):
            break


def markdown(run: SideBySideRun) -> str:
    parts: list[str | Table] = []
    for rows in dict.fromkeys(task.rows for task in run.tasks):
        mine = [task for task in run.tasks if task.rows == rows and task.turns]
        cells = [
            [
                task.task,
                interval(task.times_as_fast),
                f"{fmean(turn.plain for turn in task.turns):.2f}",
                f"{fmean(turn.plain_rounds for turn in task.turns):.0f}",
                f"{fmean(turn.drafting_rounds for turn in task.turns):.0f}",
                str(len(task.turns)),
                str(task.different or "none"),
            ]
            for task in mine
        ]
        ratios = [task.times_as_fast.value for task in mine]
        head = ["task", "times as fast", "plain, s", "its rounds", "rounds", "turns", "different"]
        parts += [
            f"**{rows} rows**: mean {fmean(ratios):.3f}, lowest {min(ratios):.3f}",
            Table(head, cells),
        ]
    said = (
        f"{run.model}, {run.weights}, {run.draft} beside plain decoding in alternating rounds, up "
        f"to {run.new_tokens} new tokens. Ratios are of mean times over turns, with 95% intervals."
    )
    return as_text([*parts, said, said_threads(run.provenance)])


def side_by_side(
    task: Annotated[list[str] | None, typer.Option(help="As `selfspec bench` takes it.")] = None,
    model: Model = "demo",
    weights: Annotated[str, typer.Option(help="As LLM.from_pretrained takes it.")] = "float32",
    draft: Annotated[str, typer.Option(help="Who drafts.")] = "auto",
    batches: Annotated[str, typer.Option(help="How many rows, several in turn.")] = "4,8,16",
    sample: Annotated[int, typer.Option(min=1, help="Questions of each task.")] = 16,
    max_new_tokens: Annotated[int, typer.Option(min=2, help="Of each answer.")] = 48,
    turns: Annotated[int, typer.Option(min=1, help="At most.")] = 16,
    within: Annotated[float, typer.Option(help="End a task once it is known so well.")] = 0.01,
    threads: Threads = 2,
    out: Out = None,
    show: Show = None,
) -> None:
    """Measure a drafter in batches beside plain decoding, round by round."""
    if show is not None:
        typer.echo(markdown(read(SideBySideRun, show)))
        return
    if not task:
        raise OptionError("there is nothing to ask; name a task with --task spec-bench=FILE")
    torch.set_num_threads(threads)
    found = read_tasks(Wishes(model=model, task=task, sample=sample))
    *_, prompts = ask(found, words_of(folder_of(model)), max_new_tokens)
    units = units_of(prompts, [int(size) for size in batches.split(",")])
    llm = LLM.from_pretrained(model, weights=weights)
    path: Path = out or result_path("side-by-side")
    provenance = made_by("side_by_side", threads)
    run = SideBySideRun(provenance, model, llm.info.weights, draft, max_new_tokens)
    kinds = dict.fromkeys((len(unit.prompts), unit.task) for unit in units)
    with progress_bar(turns * len(kinds)) as (tick, say):
        for rows, name in kinds:
            say(f"{name}, {rows} rows")
            mine = [unit for unit in units if (len(unit.prompts), unit.task) == (rows, name)]
            asked = [question for unit in mine for question in unit.names]
            run.tasks.append(TaskRow(name, rows, asked))
            measure(llm, run, run.tasks[-1], mine, tick, turns, within)
            write(run, path)
    run.complete = True
    write(run, path)
    typer.echo(markdown(run))


if __name__ == "__main__":
    run_command(side_by_side)
