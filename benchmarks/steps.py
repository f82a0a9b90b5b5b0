"""`scripts/bench steps`: what a training step with the recipe costs, next to what its added
products cost by arithmetic.

An early exit adds three products of the head's size at every trained position: logits, the gradient
of the states, the gradient of the head. These are timed alone (`products`) and added to a plain
step. The recipe's step should take at most 1.1 times that, and less than that with layer dropout.
All variants take turns on the same weights and tokens: forward, backward and optimizer. Knows
nothing of what is learned.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from torch import Tensor

from benchmarks.command import Model, Out, Show, Threads, made_by, result_path, run_command
from benchmarks.models import folder_of
from benchmarks.ratios import median, milliseconds, ratio
from selfspec.bench.html import Table
from selfspec.bench.schema import Result, Seconds, read, write
from selfspec.bench.tables import interval
from selfspec.bench.tables import markdown as as_text
from selfspec.bench.timing import Contestant, Ratio, interleave, timed
from selfspec.cli.bench import progress_bar
from selfspec.model.load.loading import load
from selfspec.train.exit_forward import ExitForward, Moment
from selfspec.train.recipe import Recipe

DROPOUT = 0.2


@dataclass(frozen=True)
class StepOptions:
    """What a step is."""

    rows: int = 2
    """Blocks in a batch."""
    length: int = 256
    """Tokens in a block; all but the first are trained."""
    exits: int = 2
    """Early exits a step."""
    rounds: int = 5
    """Steps of each variant that are timed."""


@dataclass
class StepsRun(Result):
    """Everything that was measured: seconds of each variant, one a round."""

    kind = "steps"
    measured_by = "scripts/bench steps"

    model: str
    options: StepOptions
    seconds: dict[str, Seconds]


def variants(layers: int, exits: int) -> dict[str, Recipe]:
    """The recipes that are compared. Evenly spread exits are on at every step."""
    at = tuple(round(layers * (index + 1) / (exits + 1)) for index in range(exits))
    both = Recipe(dropout=DROPOUT, curriculum="all", exits=at)
    return {"plain": both.variant("plain"), "EE": both.variant("EE"), "LD+EE": both}


def contestants(model: Any, options: StepOptions) -> dict[str, Contestant]:
    """A step of each variant, and the products of the early exits alone."""
    vocabulary, width = model.get_output_embeddings().weight.shape
    chance = torch.Generator().manual_seed(0)
    ids = torch.randint(0, vocabulary, (options.rows, options.length), generator=chance)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-9, fused=True)
    recipes = variants(model.config.num_hidden_layers, options.exits)
    forwards = {name: ExitForward(model, recipe) for name, recipe in recipes.items()}
    moments = dict.fromkeys(forwards, 0)
    head = model.get_output_embeddings().weight.detach()

    def step(name: str) -> Callable[[], None]:
        def run() -> None:
            forward = forwards[name]
            moments[name] += 1  # other rows are dropped at every step
            forward.moment = Moment(moments[name], 1000)
            with forward.installed():
                model(input_ids=ids, labels=ids).loss.backward()
            optimizer.step()
            optimizer.zero_grad()

        return run

    states = torch.randn(options.rows * (options.length - 1), width)
    products = timed(lambda: head_products(head, states, options.exits))
    return {**{name: timed(step(name)) for name in forwards}, "products": products}


def head_products(weight: Tensor, states: Tensor, exits: int, positions: int = 256) -> None:
    """What the early exits cannot do without: three products each, some positions at a time as any
    implementation must."""
    gradient = torch.zeros_like(weight)
    for _ in range(exits):
        for some in states.split(positions):
            logits = some @ weight.T
            logits @ weight
            gradient.addmm_(logits.T, some)


def against_arithmetic(run: StepsRun, name: str) -> Ratio | None:
    """A variant's step over a plain step and the products, round by round."""
    pairs = zip(run.seconds["plain"], run.seconds["products"], strict=True)
    sums = [None if one is None or other is None else one + other for one, other in pairs]
    return ratio(run.seconds[name], sums)


def markdown(run: StepsRun) -> str:
    """The table."""
    rows = []
    for name, seconds in run.seconds.items():
        alone = name in ("plain", "products")
        over = "-" if alone else interval(against_arithmetic(run, name))
        rows.append([name, milliseconds(median(seconds)), over])
    options, where = run.options, run.provenance
    note = (
        f"{run.model}, {options.rows} blocks of {options.length} tokens, {options.exits} early "
        "exits "
        f"a step, dropout {DROPOUT}; {where.threads} threads, {where.cpu}. Medians of "
        f"{options.rounds} steps taken in turns."
    )
    return as_text([Table(["step", "ms", "over plain + products"], rows), note])


def steps(
    model: Model = "demo",
    rounds: Annotated[
        int, typer.Option(min=1, help="Timed steps of each variant.")
    ] = StepOptions.rounds,
    exits: Annotated[int, typer.Option(min=1, help="Early exits a step.")] = StepOptions.exits,
    threads: Threads = 2,
    out: Out = None,
    show: Show = None,
) -> None:
    """What a training step with the recipe costs, next to the arithmetic.

    Example: scripts/bench steps --rounds 2
    """
    if show is not None:
        typer.echo(markdown(read(StepsRun, show)))
        return
    options = StepOptions(rounds=rounds, exits=exits)
    torch.set_num_threads(threads)
    network = load(str(folder_of(model)), dtype="float32", device="cpu").model
    network.requires_grad_(True).train()
    provenance = made_by("steps", threads)
    with progress_bar(4 * (rounds + 1)) as (tick, say):
        say("steps in turns")
        timings = interleave(contestants(network, options), rounds, warmup=1, on_turn=tick)
    run = StepsRun(provenance, Path(model).name, options, timings.seconds, complete=True)
    write(run, out or result_path("steps"))
    typer.echo(markdown(run))


if __name__ == "__main__":
    run_command(steps)
