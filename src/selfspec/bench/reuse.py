"""`scripts/bench reuse`: what verification saves by going on from the states that the draft left,
next to what it could save.

Without reuse, verification runs all L layers on the last kept token and the K drafts; with it,
layers 0 to E - 1 on the last draft alone. So a round may save (E/L) * (v - 1) plain steps, v =
verify(K + 1)/decode(1) (`allowed`); counted exactly it is early(K + 1) - early(1), `early(n)` being
layers 0 to E - 1 on n tokens a row (`exact`), which leaves out what v says of the head. Two
generations of the same rows, with and without reuse, take turns round by round, and so do the
isolated passes: each saving is a difference within one round. The model is a damped one
(`damped.py`), so that drafts are kept as often as where early exit pays. Does not know how a report
looks (`reuse_report.py`).
"""

from __future__ import annotations

import json
import shlex
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from ..control.fixed import FixedLength
from ..core.options import numbers
from ..core.sampling import Sampler, SamplingParams
from ..draft.from_layers.early_exit import EarlyExit
from ..engine.generation import Generation
from ..engine.row import Request
from ..errors import OptionError
from ..llm import LLM
from ..model.compute.cache import RowSpan
from ..model.compute.plan import LayerPlan
from ..model.layered import LayeredModel
from .damped import damped_folder
from .plain import model_folder, progress_bar, run_command, tokenizer_of
from .prompts import prompt_ids
from .provenance import CHECKOUT, cpu_name, gather, package_versions, slug
from .reuse_report import REUSE_SCHEMA, load_reuse, markdown, summary
from .schema import write_json
from .timing import timed

WARMUP = 2
FEWEST_ROUNDS, MOST_ROUNDS = 8, 100


@dataclass
class Cell:
    """One batch size and draft length: seconds of each round, all five lists in step."""

    batch: int
    tokens: int
    with_reuse: list[float] = field(
        default_factory=list
    )  # verifying, in whole rounds: drafting is the same in both
    without_reuse: list[float] = field(default_factory=list)
    verify: list[float] = field(default_factory=list)  # all layers and the head on tokens + 1 a row
    decode: list[float] = field(default_factory=list)  # the same on 1 a row
    early_block: list[float] = field(default_factory=list)  # layers 0 to E - 1 on tokens + 1 a row
    early_one: list[float] = field(default_factory=list)  # the same on 1 a row
    drafted: int = 0
    accepted: int = 0
    identical: bool = True


@dataclass
class ReuseRun:
    """Everything that was measured."""

    provenance: dict[str, Any]
    model: str
    factor: float
    kernel: str
    dtype: str
    layers: int
    exit_layer: int
    cells: list[Cell] = field(default_factory=list)
    complete: bool = False
    kind: str = "reuse"
    schema_version: int = REUSE_SCHEMA


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
        next(self._steps)  # the prefill

    def round(self) -> float:
        before = self.generation.stats.verify_seconds
        next(self._steps)
        return self.generation.stats.verify_seconds - before

    @property
    def written(self) -> list[list[int]]:
        return [row.tokens for row in self.generation.rows]


class Passes:
    """Isolated passes where a generation's next round would begin; its cache is as before after
    each."""

    def __init__(self, model: LayeredModel, generation: Generation) -> None:
        self._model, self._generation = model, generation

    def seconds(self, count: int, plan: LayerPlan, head: bool) -> float:
        """Of one pass of `count` tokens a row through the plan's layers, and the head if it is
        asked for."""
        return timed(lambda: self._run(count, plan, head))()

    @torch.inference_mode()
    def _run(self, count: int, plan: LayerPlan, head: bool) -> None:
        model, cache, rows = self._model, self._generation.cache, self._generation.rows
        tokens = torch.tensor([token for row in rows for token in row.tokens[-count:]])
        x = model.run(
            model.embed(tokens),
            plan,
            cache,
            cache.layout_at([RowSpan(r.index, len(r.tokens) - 1, count) for r in rows]),
        )
        if head:
            model.head(x).argmax(-1).tolist()
        for row in rows:
            cache.rollback(row.index, len(row.tokens) - 1)


def contestants(
    model: LayeredModel, rounds: dict[bool, Rounds], exit_layer: int, tokens: int
) -> dict[str, Callable[[], float]]:
    """What takes turns within a round, by the name of the list in the cell that gets its
    seconds."""
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
    """Rounds of both variants and of the isolated passes in turns, as long as `until` says to go
    on."""
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


def reuse(
    model: Annotated[str, typer.Option(help="'demo' or a model folder.")] = "demo",
    layer: Annotated[int, typer.Option(help="How many layers draft (E).")] = 8,
    factor: Annotated[
        float,
        typer.Option(
            help="How much of the later layers' work is left in: 0 to 1, the model as it is."
        ),
    ] = 0.018,
    batches: Annotated[str, typer.Option(help="Rows decoded together.")] = "1,8,16",
    tokens: Annotated[str, typer.Option(help="Drafts a round (K).")] = "2,4,6,8,12",
    prompt: Annotated[int, typer.Option(help="Prompt tokens of each row.")] = 128,
    seconds: Annotated[
        float, typer.Option(help="Seconds for each pair of batch and K, beyond the fewest rounds.")
    ] = 18,
    threads: Annotated[int, typer.Option(help="CPU threads.")] = 2,
    out: Annotated[Path | None, typer.Option(help="The JSON to write.")] = None,
    show: Annotated[
        Path | None, typer.Option(help="Measure nothing: print the tables of this JSON.")
    ] = None,
) -> None:
    """What exit-state reuse saves a round, next to what the arithmetic allows.

    Example: scripts/bench reuse --batches 1 --tokens 4 --seconds 5
    """
    if show is not None:
        typer.echo(markdown(load_reuse(show)))
        return
    batch_sizes, lengths = numbers(batches, "--batches"), numbers(tokens, "--tokens")
    if min(*batch_sizes, *lengths, prompt - max(lengths)) < 1:
        raise OptionError(
            "--batches and --tokens start at 1, and --prompt has to be more than the most drafts; "
            "change them"
        )
    folder = model_folder(model)
    llm = LLM.from_pretrained(damped_folder(folder, layer, factor), threads=threads)
    versions = package_versions(["selfspec", "torch", "transformers"])
    provenance = asdict(
        gather(shlex.join(["scripts/bench", "reuse", *sys.argv[1:]]), threads, versions)
    )
    run = ReuseRun(
        provenance,
        Path(model).name,
        factor,
        llm.info.kernel,
        llm.info.dtype,
        llm.info.layers,
        layer,
    )
    target = out or CHECKOUT / "benchmarks" / "results" / f"reuse-{slug(cpu_name())}.json"
    ids = prompt_ids(tokenizer_of(folder), prompt + max(batch_sizes))
    with progress_bar(len(batch_sizes) * len(lengths)) as (tick, say):
        for batch in batch_sizes:
            for length in lengths:
                say(f"batch {batch}, {length} drafts")
                rows = prompts_for(ids, batch, prompt)
                run.cells.append(measure_cell(llm.model, rows, layer, length, time_left(seconds)))
                write_json(asdict(run), target)
                tick("")
    run.complete = True
    write_json(asdict(run), target)
    typer.echo(markdown(asdict(run)))
    typer.echo(json.dumps({**summary(asdict(run)), "file": target.name}))


if __name__ == "__main__":
    run_command(reuse)
