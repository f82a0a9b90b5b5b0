"""`scripts/bench start`: from the start of `selfspec generate` to its first letter, by kind of
weights, and what importing `LLM` adds to importing torch.

Each start is a process of its own, and all take turns. A first round is not counted: what it makes
(compiled kernels, packed weights) is there from then on.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import torch
import typer

from benchmarks.command import (
    Model,
    Out,
    Show,
    environment,
    last_said,
    made_by,
    result_path,
    run_command,
)
from benchmarks.models import folder_of
from benchmarks.ratios import median
from selfspec.bench.html import Table
from selfspec.bench.schema import Result, Seconds, read, write
from selfspec.bench.tables import markdown as as_text
from selfspec.bench.tables import number
from selfspec.cli.bench import progress_bar
from selfspec.errors import OptionError

IMPORTS = ("import torch", "from selfspec import LLM")
PROMPT = "Why is the sky blue?"


@dataclass
class Start:
    """A process, and in each turn the seconds until it wrote something or, without a letter to
    write, ended."""

    name: str
    seconds: Seconds = field(default_factory=list)


@dataclass
class StartRun(Result):
    """Everything that was measured."""

    kind = "start"
    measured_by = "scripts/bench start"

    model: str
    imports: list[Start] = field(default_factory=list)
    starts: list[Start] = field(default_factory=list)


def until_it_writes(words: Sequence[str]) -> float:
    """Seconds until a process has written its first letter, or has ended without one."""
    begin = time.perf_counter()
    with subprocess.Popen(
        words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment()
    ) as process:
        assert process.stdout is not None
        process.stdout.read(1)
        seconds = time.perf_counter() - begin
        _, errors = process.communicate()
    if process.returncode:
        said = last_said(errors)
        raise OptionError(f"{' '.join(words)} ended with {process.returncode} and said: {said}")
    return seconds


def markdown(run: StartRun) -> str:
    """The tables."""
    torch_alone = median(run.imports[0].seconds)
    rows = [[each.name, number(median(each.seconds), 2)] for each in run.starts]
    added = [
        [each.name, number(seconds, 2), number(seconds - torch_alone, 2)]
        for each in run.imports
        if (seconds := median(each.seconds)) is not None and torch_alone is not None
    ]
    turns = len(run.starts[0].seconds) if run.starts else 0
    note = f"{run.model}, {run.provenance.cpu}. Medians of {turns} turns."
    tables = [
        Table(["weights", "s to the first letter"], rows),
        Table(["import", "s", "s above torch"], added),
    ]
    return as_text([*tables, note])


def start(
    model: Model = "demo",
    kinds: Annotated[
        str, typer.Option(help="Ways to store weights.")
    ] = "float32,bfloat16,int8,int4",
    turns: Annotated[int, typer.Option(min=1, help="Starts of each, one more not counted.")] = 7,
    out: Out = None,
    show: Show = None,
) -> None:
    """From the start of `selfspec generate` to its first letter, by kind of weights.

    Example: scripts/bench start --kinds int8 --turns 3
    """
    if show is not None:
        typer.echo(markdown(read(StartRun, show)))
        return
    source = model if model == "demo" else str(folder_of(model))  # a user types its name
    generate = [str(Path(sys.executable).with_name("selfspec")), "generate", source, PROMPT]
    run = StartRun(made_by("start", torch.get_num_threads()), Path(model).name)
    run.imports = [Start(each) for each in IMPORTS]
    run.starts = [Start(kind) for kind in kinds.split(",")]
    commands = [[sys.executable, "-c", each.name] for each in run.imports]
    commands += [[*generate, "-n", "8", "--weights", each.name] for each in run.starts]
    with progress_bar(turns + 1) as (tick, say):
        for turn in range(turns + 1):
            say(f"turn {turn}")
            for each, words in zip([*run.imports, *run.starts], commands, strict=True):
                seconds = until_it_writes(words)
                if turn:
                    each.seconds.append(seconds)
            tick("")
    run.complete = True
    write(run, out or result_path("start"))
    typer.echo(markdown(run))


if __name__ == "__main__":
    run_command(start)
