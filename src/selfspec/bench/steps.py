"""`scripts/bench steps`: what a training step with the recipe costs, next to what its added
products cost by arithmetic.

An early exit adds three products of the head's size at every trained position: logits, the gradient
of the states, the gradient of the head. These are timed alone (`products`) and added to a plain
step; the recipe's step should take at most 1.1 times that, and less than that with layer dropout.
All variants take turns on the same weights and tokens: forward, backward and optimizer. Knows
nothing of what is learned.
"""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from torch import Tensor

from ..model.load.loading import load
from ..train.exit_forward import ExitForward, Moment
from ..train.recipe import Recipe
from .plain import model_folder, progress_bar, run_command
from .provenance import CHECKOUT, cpu_name, gather, package_versions, slug
from .report import interval, milliseconds, table
from .schema import parsed, write_json
from .timing import Contestant, Ratio, Timings, interleave, median, ratio, timed

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


def variants(layers: int, exits: int) -> dict[str, Recipe]:
    """The recipes that are compared. Evenly spread exits are on at every step."""
    at = tuple(round(layers * (index + 1) / (exits + 1)) for index in range(exits))
    both = Recipe(dropout=DROPOUT, curriculum="all", exits=at)
    return {"plain": both.variant("plain"), "EE": both.variant("EE"), "LD+EE": both}


def contestants(model: Any, options: StepOptions) -> dict[str, Contestant]:
    """A step of each variant, and the products of the early exits alone."""
    vocabulary, width = model.get_output_embeddings().weight.shape
    ids = torch.randint(
        0, vocabulary, (options.rows, options.length), generator=torch.Generator().manual_seed(0)
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-9, fused=True)
    forwards = {
        name: ExitForward(model, recipe)
        for name, recipe in variants(_layers(model), options.exits).items()
    }
    moments = dict.fromkeys(forwards, 0)

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
    heads = lambda: head_products(
        model.get_output_embeddings().weight.detach(), states, options.exits
    )  # noqa: E731
    return {**{name: timed(step(name)) for name in forwards}, "products": timed(heads)}


def head_products(weight: Tensor, states: Tensor, exits: int, positions: int = 256) -> None:
    """What the early exits cannot do without: three products each, some positions at a time as any
    implementation must."""
    gradient = torch.zeros_like(weight)
    for _ in range(exits):
        for some in states.split(positions):
            logits = some @ weight.T
            logits @ weight
            gradient.addmm_(logits.T, some)


def _layers(model: Any) -> int:
    found: int = model.config.num_hidden_layers
    return found


def against_arithmetic(timings: Timings, name: str) -> Ratio | None:
    """A variant's step over a plain step and the products, round by round."""
    sums = [
        None if plain is None or products is None else plain + products
        for plain, products in zip(
            timings.seconds["plain"], timings.seconds["products"], strict=True
        )
    ]
    return ratio(timings.seconds[name], sums)


def markdown(run: dict[str, Any]) -> str:
    """The table, from the JSON."""
    timings = Timings(run["seconds"])
    rows = []
    for name, seconds in timings.seconds.items():
        alone = name in ("plain", "products")
        rows.append(
            [
                name,
                milliseconds(median(seconds)),
                "-" if alone else interval(against_arithmetic(timings, name)),
            ]
        )
    options, where = run["options"], run["provenance"]
    note = (
        f"\n\n{run['model']}, {options['rows']} blocks of {options['length']} tokens, "
        f"{options['exits']} early exits a step, "
        f"dropout {DROPOUT}; {where['threads']} threads, {where['cpu']}. Medians of "
        f"{options['rounds']} steps taken in turns."
    )
    return table(["step", "ms", "over plain + products"], rows) + note


def steps(
    model: Annotated[str, typer.Option(help="'demo' or a model folder.")] = "demo",
    rounds: Annotated[
        int, typer.Option(min=1, help="Timed steps of each variant.")
    ] = StepOptions.rounds,
    exits: Annotated[int, typer.Option(min=1, help="Early exits a step.")] = StepOptions.exits,
    threads: Annotated[int, typer.Option(min=1, help="CPU threads.")] = 2,
    out: Annotated[Path | None, typer.Option(help="The JSON to write.")] = None,
    show: Annotated[
        Path | None, typer.Option(help="Measure nothing: print the table of this JSON.")
    ] = None,
) -> None:
    """What a training step with the recipe costs, next to the arithmetic.

    Example: scripts/bench steps --rounds 2
    """
    if show is not None:
        typer.echo(markdown(parsed(show, "scripts/bench steps")))
        return
    options = StepOptions(rounds=rounds, exits=exits)
    torch.set_num_threads(threads)
    network = (
        load(str(model_folder(model)), dtype="float32", device="cpu")
        .model.requires_grad_(True)
        .train()
    )
    command = shlex.join(["scripts/bench", "steps", *sys.argv[1:]])
    provenance = asdict(
        gather(command, threads, package_versions(["selfspec", "torch", "transformers"]))
    )
    with progress_bar(4 * (rounds + 1)) as (tick, say):
        say("steps in turns")
        timings = interleave(contestants(network, options), rounds, warmup=1, on_turn=tick)
    run = {
        "kind": "steps",
        "model": Path(model).name,
        "provenance": provenance,
        "options": asdict(options),
    }
    run["seconds"] = timings.seconds
    write_json(run, out or CHECKOUT / "benchmarks" / "results" / f"steps-{slug(cpu_name())}.json")
    typer.echo(markdown(run))


if __name__ == "__main__":
    run_command(steps)
