"""`scripts/bench reuse`: what verification saves by going on from the states that the draft left,
next to what it could save.

Without reuse, verification runs all L layers on the last kept token and the K drafts; with it,
layers 0 to E - 1 on the last draft alone. So a round may save (E/L) * (v - 1) plain steps,
v = verify(K + 1)/decode(1) (`allowed`). Counted exactly it is early(K + 1) - early(1), `early(n)`
being layers 0 to E - 1 on n tokens a row (`exact`), which leaves out what v says of the head. Two
generations of the same rows, with and without reuse, take turns round by round, and so do the
isolated passes: each saving is a difference within one round. The model is that of
`near_identity.py`, so that drafts are kept as often as where early exit pays. Does not know how a
report looks (`reuse_report.py`).
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import torch
import typer

from benchmarks.command import (
    Model,
    Out,
    Show,
    Threads,
    grouped,
    made_by,
    result_path,
    run_command,
    tokenizer_of,
)
from benchmarks.models import folder_of
from benchmarks.near_identity import near_identity_folder
from benchmarks.reuse_report import Cell, ReuseRun, markdown, summary
from selfspec.bench.prompts import prompt_ids
from selfspec.bench.schema import read, write
from selfspec.bench.timing import timed
from selfspec.cli.bench import progress_bar
from selfspec.control.fixed import FixedLength
from selfspec.core.options import numbers
from selfspec.core.sampling import Sampler, SamplingParams
from selfspec.draft.from_layers.early_exit import EarlyExit
from selfspec.engine.generation import Generation
from selfspec.engine.row import Request
from selfspec.errors import OptionError
from selfspec.llm import LLM
from selfspec.model.compute.cache import RowSpan
from selfspec.model.compute.plan import LayerPlan
from selfspec.model.layered import LayeredModel

WARMUP = 2
FEWEST_ROUNDS, MOST_ROUNDS = 8, 100


class Rounds:
    """A generation that is run one round at a time."""

    def __init__(
        self,
        model: LayeredModel,
        prompts: Sequence[Sequence[int]],
        exit_layer: int,
        tokens: int,
        reuse: bool,
    ) -> None:
        sampler = Sampler(SamplingParams())
        most = (MOST_ROUNDS + WARMUP) * (tokens + 1) + 1
        drafter, control = EarlyExit(layer=exit_layer, reuse=reuse), FixedLength(tokens)
        requests = [
            Request(prompt, sampler, most, drafter=drafter, controller=control)
            for prompt in prompts
        ]
        self.generation = Generation(model, requests)
        self.generation.cache.reserve(len(prompts[0]) + most)  # growing is not what is measured
        self._steps = iter(self.generation)
        while not self._read(prompts):  # many rows are read over several steps
            next(self._steps)

    def _read(self, prompts: Sequence[Sequence[int]]) -> bool:
        rows = self.generation.rows
        return len(rows) == len(prompts) and all(
            len(row.tokens) > len(prompt) for row, prompt in zip(rows, prompts, strict=True)
        )

    def round(self) -> float:
        before = self.generation.stats.verify_seconds
        next(self._steps)
        return self.generation.stats.verify_seconds - before

    @property
    def written(self) -> list[list[int]]:
        return [row.tokens for row in self.generation.rows]


class Passes:
    """Isolated passes where a generation's next round would begin; its cache is as before."""

    def __init__(self, model: LayeredModel, generation: Generation) -> None:
        self._model, self._generation = model, generation

    def seconds(self, count: int, plan: LayerPlan, head: bool) -> float:
        """Of one pass of `count` tokens a row through the plan's layers, and the head if asked
        for."""
        return timed(lambda: self._run(count, plan, head))()

    @torch.inference_mode()
    def _run(self, count: int, plan: LayerPlan, head: bool) -> None:
        model, cache, rows = self._model, self._generation.cache, self._generation.rows
        tokens = torch.tensor([token for row in rows for token in row.tokens[-count:]])
        place = cache.layout_at([RowSpan(r.index, len(r.tokens) - 1, count) for r in rows])
        x = model.run(model.embed(tokens), plan, cache, place)
        if head:
            model.head(x).argmax(-1).tolist()
        for row in rows:
            cache.rollback(row.index, len(row.tokens) - 1)


def contestants(
    model: LayeredModel, rounds: dict[bool, Rounds], exit_layer: int, tokens: int
) -> dict[str, Callable[[], float]]:
    """What takes turns within a round, by the name of the cell's list that gets its seconds."""
    passes = Passes(model, rounds[False].generation)
    whole, early, block = model.full_plan, LayerPlan(0, exit_layer), tokens + 1
    return {
        "with_reuse": rounds[True].round,
        "verify": lambda: passes.seconds(block, whole, True),
        "early_block": lambda: passes.seconds(block, early, False),
        "without_reuse": rounds[False].round,
        "decode": lambda: passes.seconds(1, whole, True),
        "early_one": lambda: passes.seconds(1, early, False),
    }


def measure_cell(
    model: LayeredModel,
    prompts: Sequence[Sequence[int]],
    exit_layer: int,
    tokens: int,
    until: Iterator[bool],
) -> Cell:
    """Rounds of both variants and of the isolated passes in turns, while `until` says to go on."""
    cell = Cell(len(prompts), tokens)
    rounds = {reuse: Rounds(model, prompts, exit_layer, tokens, reuse) for reuse in (True, False)}
    turns = contestants(model, rounds, exit_layer, tokens)
    for number in range(-WARMUP, MOST_ROUNDS):
        if number >= FEWEST_ROUNDS and not next(until):
            break
        order = list(turns)
        order = order[number % 6 :] + order[: number % 6]
        seconds = {name: turns[name]() for name in order}
        if number >= 0:
            for name, value in seconds.items():
                getattr(cell, name).append(value)
    stats = rounds[True].generation.stats
    cell.drafted, cell.accepted = stats.drafted, stats.accepted
    cell.identical = rounds[True].written == rounds[False].written
    return cell


def time_left(seconds: float) -> Iterator[bool]:
    """True until that many seconds are over."""
    end = time.monotonic() + seconds
    while True:
        yield time.monotonic() < end


def prompts_for(ids: Sequence[int], batch: int, length: int) -> list[list[int]]:
    """Rows of one length that differ."""
    return [list(ids[row : row + length]) for row in range(batch)]


@dataclass(frozen=True)
class Settings:
    """What is typed."""

    layer: Annotated[int, typer.Option(help="How many layers draft (E).")] = 8
    factor: Annotated[
        float,
        typer.Option(
            help="How much of the later layers' work is left: 0 to 1, the model as it is."
        ),
    ] = 0.018
    batches: Annotated[str, typer.Option(help="Rows decoded together.")] = "1,8,16"
    tokens: Annotated[str, typer.Option(help="Drafts a round (K).")] = "2,4,6,8,12"
    prompt: Annotated[int, typer.Option(help="Prompt tokens of each row.")] = 128
    seconds: Annotated[
        float, typer.Option(help="Seconds for each pair of batch and K, beyond the fewest rounds.")
    ] = 18

    @property
    def grid(self) -> list[tuple[int, int]]:
        """Batch sizes and numbers of drafts, all with all."""
        batches = numbers(self.batches, "--batches")
        lengths = numbers(self.tokens, "--tokens")
        if min(*batches, *lengths, self.prompt - max(lengths)) < 1:
            raise OptionError(
                "--batches and --tokens start at 1, and --prompt has to be more than the most "
                "drafts; change them"
            )
        return [(batch, length) for batch in batches for length in lengths]


@grouped
def reuse(
    model: Model = "demo",
    *,
    settings: Settings,
    threads: Threads = 2,
    out: Out = None,
    show: Show = None,
) -> None:
    """What exit-state reuse saves a round, next to what the arithmetic allows.

    Example: scripts/bench reuse --batches 1 --tokens 4 --seconds 5
    """
    if show is not None:
        typer.echo(markdown(read(ReuseRun, show)))
        return
    grid, layer, factor = settings.grid, settings.layer, settings.factor
    folder = folder_of(model)
    llm = LLM.from_pretrained(near_identity_folder(folder, layer, factor), threads=threads)
    provenance, info = made_by("reuse", threads), llm.info
    run = ReuseRun(
        provenance, Path(model).name, factor, info.kernel, info.dtype, info.layers, layer
    )
    target = out or result_path("reuse")
    most = max(batch for batch, _ in grid)
    ids = prompt_ids(tokenizer_of(folder), settings.prompt + most)
    with progress_bar(len(grid)) as (tick, say):
        for batch, length in grid:
            say(f"batch {batch}, {length} drafts")
            rows, until = prompts_for(ids, batch, settings.prompt), time_left(settings.seconds)
            run.cells.append(measure_cell(llm.model, rows, layer, length, until))
            write(run, target)
            tick("")
    run.complete = True
    write(run, target)
    typer.echo(markdown(run))
    typer.echo(json.dumps({**summary(run), "file": target.name}))


if __name__ == "__main__":
    run_command(reuse)
