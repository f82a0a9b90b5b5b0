"""`scripts/bench head_text`: what more of the model's own text brings a draft head.

The same head is trained on 1/8, 1/4, 1/2 and all of the conversations, each as often, and measured
on the same held-out ones. A head that lies finished in the folder is not trained again. Behind the
last row stands what each doubling brought, and a line through the shares, so that one can see how
much text another share of right drafts would take.
"""

from __future__ import annotations

import json
import math
import statistics
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import torch
import typer

from benchmarks.command import Out, Show, Threads, made_by, result_path, run_command
from selfspec.bench.html import Table
from selfspec.bench.schema import Result, read, write
from selfspec.bench.tables import markdown as as_text
from selfspec.cli.bench import progress_bar
from selfspec.train.draft_head import HeadRecipe
from selfspec.train.part_run import REPORT, Observer, train_small_part
from selfspec.train.parts import PartOptions

SHARES = (1 / 8, 1 / 4, 1 / 2, 1.0)


@dataclass
class HeadRow:
    """A head trained on a share of the text."""

    share: float
    conversations: int
    trained: int
    """Tokens of all steps, padding not counted."""
    minutes: float
    right: list[float]
    """By depth: the share of drafts that are right, if those before were."""


@dataclass
class HeadTextRun(Result):
    """The curve over the amount of text."""

    kind = "head-text"
    measured_by = "scripts/bench head_text"

    model: str
    tokens: int
    """Of the whole text, prompts and held-out conversations too."""
    epochs: float
    ahead: int
    rows: list[HeadRow] = field(default_factory=list)


def trained_on(
    share: float, model: str, data: list[Path], folder: Path, states: Path, options: PartOptions
) -> HeadRow:
    """One head, taken from its folder if it is there."""
    place = folder / f"of-{share:g}"
    if not (place / REPORT).is_file() or not json.loads((place / REPORT).read_text())["done"]:
        train_small_part(
            model,
            data,
            place,
            recipe=HeadRecipe(),
            options=options,
            weights="int8",
            states=states,
            observer=Observer(),
        )
    said = json.loads((place / REPORT).read_text())
    return HeadRow(
        share,
        said["text"]["conversations"],
        said["tokens"],
        said["seconds"] / 60,
        said["acceptance"],
    )


def slope(rows: list[HeadRow], depth: int) -> tuple[float, float]:
    """A line through the shares of right drafts over the doublings: what each brings, and what all
    of the text is expected to have."""
    line = statistics.linear_regression(
        [math.log2(row.share) for row in rows], [row.right[depth] for row in rows]
    )
    return line.slope, line.intercept


def markdown(run: HeadTextRun) -> str:
    """The table, and what a doubling brings."""
    depths = range(min(len(row.right) for row in run.rows))
    head = ["of the text", "answers", "trained tokens", *(f"draft {depth + 1}" for depth in depths)]
    lines = [
        [
            f"{row.share:g}",
            f"{row.conversations:,}",
            f"{row.trained / 1e6:.1f} M",
            *(f"{row.right[depth]:.1%}" for depth in depths),
        ]
        for row in run.rows
    ]
    note = (
        f"{run.model}, {run.tokens / 1e6:.2f} million own tokens, {run.epochs:g} times over them."
    )
    if len(run.rows) > 1:
        gains = ", ".join(f"{100 * slope(run.rows, depth)[0]:.1f}" for depth in depths)
        note += f" Points that a doubling brings, by depth: {gains}."
    return as_text([Table(head, lines), note])


def head_text(
    data: Annotated[list[Path], typer.Option(help="Text that the model wrote (selfspec data).")],
    model: Annotated[str, typer.Option(help="Folder, hub name or demo.")] = "demo",
    folder: Annotated[Path, typer.Option(help="Where heads and states are kept.")] = Path("heads"),
    epochs: Annotated[float, typer.Option(min=0.01, help="Passes over the text.")] = 4.0,
    ahead: Annotated[int, typer.Option(min=1, help="Drafts in a row that are trained.")] = 2,
    shares: Annotated[str, typer.Option(help="Of the text.")] = ",".join(map(str, SHARES)),
    threads: Threads = 2,
    out: Out = None,
    show: Show = None,
) -> None:
    """Train a draft head on more and more text, and see what it brings.

    Example: scripts/bench head_text --data own.jsonl --folder heads
    """
    if show is not None:
        typer.echo(markdown(read(HeadTextRun, show)))
        return
    torch.set_num_threads(threads)
    made, target = made_by("head_text", threads), out or result_path("head-text")
    run = HeadTextRun(made, model, 0, epochs, ahead)
    chosen = [float(share) for share in shares.split(",")]
    with progress_bar(len(chosen)) as (tick, say):
        for share in chosen:
            say(f"{share:g} of the text")
            options = PartOptions(
                epochs=epochs, ahead=ahead, of_text=share, precision="bfloat16", save_every=400
            )
            run.rows.append(trained_on(share, model, data, folder, folder / "states", options))
            write(run, target)
            tick("")
    report = folder / f"of-{chosen[-1]:g}" / REPORT
    run.tokens = json.loads(report.read_text())["text"]["tokens"]
    run.complete = True
    write(run, target)
    typer.echo(markdown(run))


if __name__ == "__main__":
    run_command(head_text)
