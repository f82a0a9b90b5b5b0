"""`selfspec train`: train a model's early exits, or a small part that drafts for it.

Only asks and shows: what is trained and how is decided in the room `train`.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from ..errors import OptionError, nearest
from . import common, options
from .exits import table
from .flags import Flags, Typed, flag_of
from .train_part import FLAGS_OF_PARTS, SHARED, train_part

if TYPE_CHECKING:
    from ..train.recipe import Recipe
    from ..train.run import Report

LAYERSKIP = "LayerSkip's recipe"
FLAGS_OF: dict[str, Sequence[Flags]] = {
    "layerskip": (
        Flags("cli.train:Choice", LAYERSKIP),
        Flags("train.recipe:Recipe", LAYERSKIP),
        Flags("train.run:TrainOptions", "Run"),
        Flags("train.data:DataOptions", "Data"),
        Flags("train.lora:Lora", "LoRA", prefix="lora"),
    ),
    **FLAGS_OF_PARTS,
}
Asked = Annotated[
    Typed,
    *FLAGS_OF["layerskip"],
    *SHARED,
    *(flags for groups in FLAGS_OF_PARTS.values() for flags in groups),
]


@dataclass(frozen=True)
class Choice:
    """What a `Recipe` is made from, and what of the model is trained."""

    preset: str | None = None
    """Start from the recipe and learning rate of a paper's experiment, e.g. code-7b, task-1.5b."""
    variant: str = "LD+EE"
    """What is on: LD+EE (layer dropout and exit loss), LD or EE (one of them), plain (neither)."""
    lora: bool = False
    """Train small matrices beside the linears, merged at the end, not all weights (needs peft)."""


def recipe_from(asked: Typed) -> tuple[Recipe, float | None]:
    """The recipe that was asked for, and the learning rate if a preset names one."""
    from ..train.presets import preset
    from ..train.recipe import Recipe

    choice = asked.make(Choice)
    experiment = preset(choice.preset) if choice.preset else None
    base = experiment.recipe if experiment else Recipe()
    recipe = replace(base, **asked.of(Recipe)).variant(choice.variant)
    if experiment is None:
        return recipe, None
    return recipe, experiment.rate if recipe.dropout else experiment.rate_plain


def refuse_unused(asked: Typed, recipe: str) -> None:
    """Raise if something was typed that this recipe does not look at."""
    if recipe not in FLAGS_OF:
        raise OptionError(f"recipe {recipe!r} is not known; {nearest(recipe, FLAGS_OF)}")
    for name in asked.values:
        owners = [kind for kind in FLAGS_OF if any(name in g.fields for g in FLAGS_OF[kind])]
        if recipe not in owners:
            belongs = f"it belongs to {', '.join(owners)}. Leave it out"
            raise OptionError(f"{flag_of(name)} would be ignored by --recipe {recipe}; {belongs}")
        if name.startswith("lora_") and "lora" not in asked.values:
            raise OptionError(f"{flag_of(name)} would be ignored without --lora; add it")


@options.grouped
def train(
    model: options.Model,
    data: options.DataFiles,
    out: Annotated[
        Path, typer.Option("--out", "-o", help=f"Folder for what is trained. {options.GOES_ON}")
    ],
    asked: Asked,
    recipe: Annotated[
        str, typer.Option("--recipe", help=f"What to train: {', '.join(FLAGS_OF)}.")
    ] = "layerskip",
    threads: options.Threads = None,
    as_json: options.AsJson = False,
) -> None:
    """Train a model so that its early layers can draft (LayerSkip), or a small part that drafts.

    The first gives an ordinary model folder. --recipe draft-head gives a small folder for --draft
    draft-head, trained on text that the model wrote (selfspec data). The same command after an
    interruption goes on where it was.

    Example:  selfspec train demo --data mine.jsonl --out my-model --steps 500
    """
    refuse_unused(asked, recipe)
    common.quiet_bars()
    from ..llm import use_threads

    use_threads(threads)
    if recipe in FLAGS_OF_PARTS:
        train_part(recipe, model, data, out, asked, as_json)
    else:
        train_model(model, data, out, asked, as_json)


def train_model(model: str, data: Sequence[str], out: Path, asked: Typed, as_json: bool) -> None:
    """LayerSkip's training."""
    from ..train.data import DataOptions
    from ..train.lora import Lora
    from ..train.run import TrainOptions
    from ..train.run import train as run_training

    recipe, rate = recipe_from(asked)
    rates: dict[str, Any] = {} if rate is None else {"learning_rate": rate}
    with common.StepBar() as bar:
        report = run_training(
            model,
            data,
            out,
            recipe=recipe,
            options=asked.make(TrainOptions, **rates),
            data=asked.make(DataOptions),
            lora=asked.make(Lora, "lora") if asked.make(Choice).lora else None,
            callbacks=[_watching(bar)],
        )
    if os.environ.get("RANK", "0") != "0":  # of several processes one speaks
        return
    if as_json:
        typer.echo(json.dumps(report.as_dict()))
    else:
        say(report, out)


def say(report: Report, out: Path) -> None:
    """What came out, and how to try it."""
    console = Console(highlight=False)
    if report.exits:
        console.print(table(report.exits))
    work = f"{report.steps} steps, {report.tokens:,} tokens, {report.seconds:.0f} s"
    console.print(f"{work}. The model is in {out}.", soft_wrap=True)
    command = f"selfspec generate {out} 'Your prompt' --draft early-exit --stats"
    console.print(f"Try it:  {command}", soft_wrap=True)


def _watching(bar: common.StepBar) -> Any:
    """A callback of the Trainer that shows how far it is. Made late: it needs transformers."""
    from transformers import TrainerCallback

    class Watching(TrainerCallback):
        """Moves the bar, in the first of several processes, and writes a line at each log."""

        def __init__(self) -> None:
            self._exits: dict[int, float] = {}

        def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if not state.is_world_process_zero:
                return
            if state.global_step:
                common.stderr().print(f"going on from step {state.global_step}", style="dim")
            bar.begin(state.global_step, state.max_steps)

        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            bar.at(state.global_step)

        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
            if logs and "loss" in logs:
                by_exit = {int(key[5:]): logs[key] for key in logs if key.startswith("exit_")}
                self._exits |= by_exit
                bar.at(state.global_step, losses(logs["loss"], self._exits), line=True)

    return Watching()


def losses(loss: float, exits: dict[int, float], most: int = 5) -> str:
    """The loss, and the latest of at most five exits, evenly chosen, the last among them."""
    layers, last = sorted(exits), len(exits) - 1
    chosen = sorted({layers[round(n * last / (most - 1))] for n in range(most)}) if layers else []
    return f"loss {loss:.3f}" + "".join(f" · exit {layer} {exits[layer]:.2f}" for layer in chosen)
