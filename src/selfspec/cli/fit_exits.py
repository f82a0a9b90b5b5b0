"""`selfspec fit-exits`: predictors that say where a token may leave. The room `train` fits them."""

from __future__ import annotations

import itertools
import json
import os
import shlex
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from . import common, options
from .data import PromptOptions
from .flags import Flags, Typed

if TYPE_CHECKING:
    from ..llm import LLM
    from ..train.exit_samples import Collected
    from ..train.fit_exits import ExitReport
    from ..train.own_text import Question

Prompts = Annotated[PromptOptions, Flags("cli.data:PromptOptions", "Prompts")]
Fitting = Annotated[
    Typed,
    Flags("train.exit_samples:SampleOptions", "Samples"),
    Flags("train.exit_fitting:FitOptions", "Fitting"),
]


@options.grouped
def fit_exits(
    name: options.Model,
    out: Annotated[Path, typer.Option("--out", "-o", help=f"Folder to write. {options.GOES_ON}")],
    prompts: Prompts,
    how: Fitting,
    model: options.Loading,
    with_curve: Annotated[
        bool, options.run("--curve", help="Fit with fewer samples too: what would they have given?")
    ] = False,
    max_minutes: Annotated[
        float | None,
        options.run(
            "--max-minutes",
            help="Stop collecting after this many minutes. The same command goes on.",
        ),
    ] = None,
    as_json: options.AsJson = False,
) -> None:
    """Fit exit predictors for a model: after which layer is a token's answer there already?

    The model answers prompts. After each layer of each token the logits of a few candidates are put
    down, and whether the answer was there. Then one small network a layer learns to tell. That
    takes minutes, and changes nothing of the model. `--draft dynamic-exit` drafts with them, and
    the text stays the model's. `selfspec.lossy.SpecEE` never asks the layers behind an exit.

    Example:  selfspec fit-exits demo --made-up 200 --out my-exits
    """
    from ..core import door
    from ..core.text_rows import require
    from ..train.exit_fitting import FitOptions
    from ..train.exit_samples import SampleOptions
    from ..train.fit_exits import Observer
    from ..train.fit_exits import fit_exits as run

    taking, options_ = how.make(SampleOptions), how.make(FitOptions)
    max_minutes = door.minutes("--max-minutes", max_minutes)
    require(prompts.prompts)
    llm = common.open_model(name, model)
    with common.bar("samples") as bar, common.StepBar() as steps:
        observer = Observer(_collecting(bar, taking.samples), _fitting(steps))
        report = run(
            llm,
            _questions(llm, prompts),
            out,
            taking,
            options_,
            max_seconds=None if max_minutes is None else 60 * max_minutes,
            with_curve=with_curve,
            observer=observer,
            facts={"model": Path(name).name, "command": _typed()},
        )
    if as_json:
        typer.echo(json.dumps(report.as_dict()))
    else:
        _say(report, name, out)


def _typed() -> str:
    """The command as it was typed, files without their folders: parts are handed on."""
    words = [Path(word).name if os.sep in word else word for word in sys.argv[1:]]
    return shlex.join(["selfspec", *words])


def _questions(llm: LLM, asked: PromptOptions) -> Callable[[Collected], Iterable[Question]]:
    """Prompts of all sources, mixed. Made-up ones begin where an earlier run ended."""

    def questions(done: Collected) -> Iterable[Question]:
        from ..core.text_rows import read_rows
        from ..train.own_text import made_up, mixed, questions_from

        sources: list[tuple[Iterable[Question], int]] = []
        for source in asked.prompts:
            read = questions_from(llm, read_rows(source), asked.column)
            found = list(itertools.islice(read, asked.limit))
            sources.append((found, len(found)))
        if asked.made_up:
            openings = asked.opening or [""]
            own = made_up(llm, asked.made_up, openings, first=done.made_up)
            sources.append((own, asked.made_up))
        return mixed(sources)

    return questions


def _collecting(bar: Any, total: int) -> Callable[[Collected], None]:
    """Moves the bar for somebody who watches, and writes a line a minute into a file."""
    task, last = bar.add_task("", total=total, words=""), 0.0

    def tell(done: Collected) -> None:
        nonlocal last
        new = done.samples - done.found
        rate = f"{new / done.seconds:.0f} a second" if done.seconds else ""
        bar.update(task, completed=min(total, done.samples), words=rate)
        if not sys.stderr.isatty() and done.seconds - last > 60:
            last = done.seconds
            words = f"{done.samples:,} of {total:,} samples, {rate}"
            common.stderr().print(words, soft_wrap=True)

    return tell


def _fitting(steps: common.StepBar) -> Callable[[int, int, float], None]:
    def tell(step: int, of: int, loss: float) -> None:
        if step == 1:
            steps.begin(0, of)
        steps.at(step, f"loss {loss:.3f}", line=step == of)

    return tell


def _say(report: ExitReport, name: str, out: Path) -> None:
    console = Console(highlight=False)
    if not report.done:
        console.print(f"The time is up after {report.samples:,} samples. The same command goes on.")
        return
    console.print(table(report.layers))
    if report.curve:
        console.print(curve_table(report.curve))
    said = report.summary
    console.print(
        f"Held-out text: {said['average_layers']:.1f} layers a token, the earliest possible "
        f"{said['oracle_layers']:.1f}. {said['agreement']:.1%} of tokens are the model's own. For "
        f"{said['answer_among_candidates']:.0%} of tokens a candidate was the answer.",
        soft_wrap=True,
    )
    console.print(f"{report.samples:,} samples, {report.seconds:.0f} s. They are in {out}.")
    command = f"selfspec generate {name} 'Your prompt' --draft dynamic-exit --draft-option"
    console.print(f"Try it:  {command} part={out} --stats", soft_wrap=True)


def table(rows: Sequence[dict[str, Any]]) -> Table:
    """A row for each layer."""
    grid = Table(box=None, padding=(0, 2, 0, 0))
    columns = ("answer there", "accuracy", "recall", "precision", "reliability error")
    for column in ("after layer", *columns):
        grid.add_column(column, justify="right")
    for row in rows:
        names = ("right", "accuracy", "recall", "precision", "reliability_error")
        cells = ["-" if row[each] is None else f"{row[each]:.1%}" for each in names]
        grid.add_row(str(row["layer"]), *cells)
    return grid


def curve_table(rows: Sequence[dict[str, float]]) -> Table:
    """What fewer samples give."""
    grid = Table(box=None, padding=(0, 2, 0, 0))
    for column in ("samples", "accuracy", "layers", "agreement"):
        grid.add_column(column, justify="right")
    for row in rows:
        cells = (
            f"{row['accuracy']:.1%}",
            f"{row['average_layers']:.2f}",
            f"{row['agreement']:.1%}",
        )
        grid.add_row(f"{row['samples']:,.0f}", *cells)
    return grid
