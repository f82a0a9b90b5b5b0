"""`selfspec train --recipe ...` for small parts of a frozen model: flags, progress, last words.

Only asks and shows: what is trained and how is decided in the room `train`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer
from rich.console import Console
from rich.table import Table

from . import common
from .flags import Flags, Typed

if TYPE_CHECKING:
    from ..train.part_run import PartReport
    from ..train.parts import Progress as Step

PANEL = "Small parts"
_SAID = Flags("train.draft_head:HeadRecipe", PANEL, only=("vocabulary", "start"))
_TRAINED = Flags("train.parts:PartOptions", PANEL, label="small parts")
_READ = ("length", "held_out", "weights")
_TEXT = Flags("train.states:StateOptions", PANEL, only=_READ, label="small parts")
_PLOT = Flags("train.run:TrainOptions", PANEL, only=("plot",))
_FOLDERS = Flags("cli.train_part:Folders", PANEL)

SHARED = (_SAID, _TRAINED, _TEXT, _FOLDERS)


def _flags(kind: str, recipe: str, without: Sequence[str] = ()) -> Sequence[Flags]:
    return Flags(recipe, kind), replace(_TRAINED, without=without), _TEXT, _FOLDERS, _PLOT


FLAGS_OF_PARTS: dict[str, Sequence[Flags]] = {
    "draft-head": _flags("draft-head", "train.draft_head:HeadRecipe"),
    "exit-adapter": _flags("exit-adapter", "train.exit_adapter:AdapterRecipe", ("ahead",)),
    "draft-lora": _flags("draft-lora", "train.draft_lora:LoraRecipe", ("ahead", "noise")),
    "successors": (
        Flags("train.successors:CountOptions", "successors"),
        replace(_TRAINED, only=("max_minutes",)),
        _TEXT,
        replace(_FOLDERS, only=("states",)),
    ),
}


@dataclass(frozen=True)
class Folders:
    """What a part's training reads beside the text."""

    states: Path | None = None
    """Folder for the model's states on the text, which runs can share. By default OUT/states."""
    start_from: Path | None = None
    """Folder of a trained part of the same kind, to begin with its weights."""


def train_part(
    kind: str, model: str, data: Sequence[str], out: Path, asked: Typed, as_json: bool
) -> None:
    """Train a part of that kind."""
    from ..train.draft_head import HeadRecipe
    from ..train.draft_lora import LoraRecipe
    from ..train.exit_adapter import AdapterRecipe
    from ..train.part_run import Observer, train_small_part, train_successors
    from ..train.parts import PartOptions
    from ..train.successors import CountOptions

    recipes: dict[str, Any] = {
        "draft-head": HeadRecipe,
        "exit-adapter": AdapterRecipe,
        "draft-lora": LoraRecipe,
    }
    with common.StepBar() as bar:
        how: dict[str, Any] = {"observer": Observer(_reading, _training(bar))}
        how |= asked.pick(*_READ, "states")
        if kind == "successors":
            how |= {"options": asked.make(CountOptions), **asked.pick("max_minutes")}
            report = train_successors(model, data, out, **how)
        else:
            how |= {"recipe": asked.make(recipes[kind]), "options": asked.make(PartOptions)}
            how |= asked.pick("start_from", "plot")
            report = train_small_part(model, data, out, **how)
    if as_json:
        typer.echo(json.dumps(report.as_dict()))
    else:
        _say(report, model, out)


def _say(report: PartReport, model: str, out: Path) -> None:
    console = Console(highlight=False)
    if not report.done:
        console.print(f"The time is up after {report.step} steps. The same command goes on.")
    if report.acceptance:
        console.print(table(report.acceptance))
        steps = "" if report.kind == "successors" else f"{report.step} steps, "
        work = f"{steps}{report.tokens:,} tokens, {report.seconds:.0f} s"
        console.print(f"{work}. The part is in {out}.", soft_wrap=True)
        drafting = f"--draft {report.drafter} --draft-option part={out}"
        command = f"selfspec generate {model} 'Your prompt' {drafting} --stats"
        console.print(f"Try it:  {command}", soft_wrap=True)


def table(acceptance: Sequence[float]) -> Table:
    """By depth, how often a draft is right."""
    grid = Table(box=None, padding=(0, 2, 0, 0))
    grid.add_column("draft", justify="right")
    grid.add_column("right, if those before were", justify="right")
    for depth, share in enumerate(acceptance, start=1):
        grid.add_row(str(depth), f"{share:.1%}")
    return grid


def _reading(tokens: int, rate: int) -> None:
    line = f"states of {tokens:,} tokens computed, {rate} a second"
    common.stderr().print(line, style="dim", soft_wrap=True)


def _training(bar: common.StepBar) -> Callable[[Step], None]:
    """Moves the bar, and writes a line at each measuring of acceptance."""
    began, right = False, ""

    def tell(step: Step) -> None:
        nonlocal began, right
        if not began:
            bar.begin(step.step - 1, step.steps)
            began = True
        if step.acceptance:
            right = "right " + " ".join(f"{share:.0%}" for share in step.acceptance)
        words = f"loss {step.loss:.3f} · {step.tokens_per_second:.0f} tokens/s · {right}"
        bar.at(step.step, words, line=bool(step.acceptance))

    return tell
