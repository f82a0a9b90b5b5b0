"""`selfspec bench`: what is typed, the progress bar, the tables, a last line of JSON. Does not
measure anything itself."""

from __future__ import annotations

import functools
import json
import shlex
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from ..core.options import numbers
from . import common, options
from .report import page_of

if TYPE_CHECKING:
    from ..bench.suite_run import Prepared, Wishes


_asking = functools.partial(typer.Option, rich_help_panel="What is asked")
_taking_part = functools.partial(typer.Option, rich_help_panel="Who takes part")
_measuring = functools.partial(typer.Option, rich_help_panel="How it is measured")
_result = functools.partial(typer.Option, rich_help_panel="The result")


@dataclass(frozen=True)
class Asking:
    """What is asked."""

    task: Annotated[
        list[str] | None,
        _asking(
            help="NAME, from the hub, or NAME=PATH; give it again for more. --list shows them."
        ),
    ] = None
    sample: Annotated[int, _asking(help="Questions a task, evenly spread over it; 0 is all.")] = 5
    chat: Annotated[
        bool | None,
        _asking(
            "--chat/--raw",
            help="Ask through the chat template or as plain text, whatever the task says.",
        ),
    ] = None
    contexts: Annotated[str, _asking(help="Lengths of the task 'long', prompt and answer.")] = (
        "2048,4096,8192"
    )
    skip_bad: Annotated[
        bool, _asking("--skip-bad", help="Leave out lines that cannot be read, and say so.")
    ] = False


@dataclass(frozen=True)
class Contest:
    """Who takes part, and how they are measured."""

    methods: Annotated[
        str,
        _taking_part(
            help="Ways to draft, separated by spaces: 'auto ngram:longest=3@fixed:tokens=6'."
        ),
    ] = "auto"
    peers: Annotated[
        str,
        _taking_part(
            help="Other engines, separated by spaces: 'transformers transformers/lookup:tokens=4'."
        ),
    ] = ""
    new_tokens: Annotated[
        int, _measuring("--new-tokens", "-n", help="Tokens to write, less where the model ends.")
    ] = 128
    rounds: Annotated[int, _measuring(help="How often each question is asked.")] = 1
    batch: Annotated[str, _measuring(help="Batch sizes, separated by commas.")] = "1"
    threads: Annotated[int, _measuring(help="CPU threads of every engine.")] = 2
    dtype: Annotated[
        str, _measuring(help="Of weights and cache: float32, bfloat16 or float16.")
    ] = "float32"
    device: Annotated[str, _measuring(help="cpu or cuda.")] = "cpu"
    temperature: Annotated[
        float, _measuring("--temperature", "-t", help="Above 0: sample, with the same seed each.")
    ] = 0.0
    top_p: Annotated[float, _measuring(help="Only the likeliest tokens that add up to P.")] = 1.0
    seed: Annotated[int, _measuring(help="Of the sampling.")] = 0
    time_limit: Annotated[
        float, _measuring(help="Seconds after which a silent engine is ended.")
    ] = 300.0
    costs: Annotated[
        bool,
        _measuring(
            "--costs",
            help="Time isolated steps too, and compare with what the cost model predicts.",
        ),
    ] = False


@options.grouped
def bench(
    model: Annotated[str, typer.Argument(help=options.MODEL_HELP, metavar="[MODEL]")] = "demo",
    *,
    asking: Asking,
    contest: Contest,
    out: Annotated[
        Path | None, _result("--out", "-o", help="The JSON to write, or to go on with.")
    ] = None,
    fresh: Annotated[
        bool, _result("--fresh", help="Measure anew over a result that is there.")
    ] = False,
    show: Annotated[
        Path | None, _result(help="Measure nothing: print the tables of this JSON.")
    ] = None,
    plot: Annotated[
        Path | None, _result(help="Measure nothing: draw this JSON, beside it as PNG.")
    ] = None,
    page: Annotated[
        Path | None, _result("--report", help="Write a self-contained page too: out.html.")
    ] = None,
    listing: Annotated[bool, _result("--list", help="Show tasks, engines with methods.")] = False,
) -> None:
    """Drafters and other engines next to plain decoding, in turns on the same questions, each
    compared token for token.

    An interrupted run goes on when the same command is given again.

    Example:  selfspec bench demo --task gsm8k=test.jsonl --methods "auto ngram" --sample 3
    """
    if listing or show is not None or plot is not None:
        typer.echo(known() if listing else _reread(show, plot, page))
        return
    from ..bench.suite_run import Wishes

    common.quiet_bars()
    wishes = Wishes(
        model, asking.task or (), contest.methods.split(), contest.peers.split(), asking.sample,
        asking.skip_bad, asking.chat, numbers(asking.contexts, "--contexts"), contest.new_tokens,
        contest.rounds, numbers(contest.batch, "--batch"), contest.threads, contest.dtype,
        contest.device, contest.temperature, contest.top_p, contest.seed, contest.time_limit,
        contest.costs, fresh,
    )  # fmt: skip
    paths = [model, *wishes.tasks, *(str(path) for path in (out, page) if path)]
    _write_page(_measure(wishes, command_line(sys.argv[1:], paths), out), page)


def _measure(wishes: Wishes, command: str, out: Path | None) -> Path:
    """A run, its tables and a last line of JSON; says where the result is."""
    from ..bench.suite_report import markdown
    from ..bench.suite_run import prepare

    prepared = prepare(wishes, command, out)
    sit(prepared)
    typer.echo(markdown(prepared.run))
    typer.echo(
        json.dumps(
            {
                "file": prepared.out.name,
                "turns": len(prepared.run.turns),
                "complete": prepared.run.complete,
            }
        )
    )
    return prepared.out


def sit(prepared: Prepared) -> None:
    """Measure behind a progress bar; Ctrl-C keeps what there is."""
    if prepared.run.complete:
        said = "is complete: nothing to measure. --fresh measures it anew."
        typer.echo(f"{prepared.out.name} {said}", err=True)
        return
    with progress_bar(prepared.turns) as (tick, say):
        try:
            prepared.sit(tick, say)
        except KeyboardInterrupt:
            said = "has what was measured, the same command goes on with it."
            typer.echo(f"Interrupted; {prepared.out.name} {said}", err=True)
            raise typer.Exit(130) from None


@contextmanager
def progress_bar(total: int) -> Iterator[tuple[Callable[[str], None], Callable[[str], None]]]:
    """Two functions, one for a turn taken and one for what is going on; the bar goes to stderr and
    vanishes at the end."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    console = Console(stderr=True)
    # two redraws a second: the bar's own thread must not take part in the race
    with Progress(*columns, console=console, transient=True, refresh_per_second=2) as bar:
        task = bar.add_task("starting", total=total)
        yield lambda _: bar.advance(task), lambda text: bar.update(task, description=text)


def command_line(words: Sequence[str], with_paths: Sequence[str], program: str = "selfspec") -> str:
    """The command as others can give it: paths as their last part, since a result is published."""
    names = {
        text: f"{text.partition('=')[0]}={Path(text.partition('=')[2]).name}"
        if "=" in text
        else Path(text).name
        for text in with_paths
    }
    return shlex.join([program, *(names.get(word, word) for word in words)])


def known() -> str:
    """Tasks, and engines with their methods."""
    from ..bench.contestants import methods_of
    from ..bench.peers import find_peers
    from ..bench.schema import OURS
    from ..bench.tasks import known_tasks

    lines = [
        "Tasks (--task NAME or NAME=PATH):",
        *(f"  {name:<12} {help}" for name, help in known_tasks().items()),
    ]
    lines += ["", "Engines (--peers NAME, NAME/METHOD:option=value or NAME/all):"]
    for name, spec in find_peers().items():
        if name != OURS:
            methods = methods_of(spec.folder / "peer.py")
            lines.append(
                f"  {name:<12} "
                + "  ".join(
                    f"{each}({', '.join(takes)})" if takes else each
                    for each, takes in methods.items()
                )
            )
    return "\n".join([*lines, "", "Ours (--methods): selfspec drafters"])


def _write_page(result: Path, page: Path | None) -> None:
    """The result as a page, where one was asked for."""
    if page is not None:
        page.write_text(page_of(result), encoding="utf-8")
        typer.echo(f"Written: {page}")


def _reread(show: Path | None, plot: Path | None, page: Path | None) -> str:
    """Tables or a drawing of a result that was measured before."""
    from ..bench.pictures import draw
    from ..bench.schema import SuiteRun, read
    from ..bench.suite_report import markdown, picture_title, pictures

    said = []
    if plot is not None:
        picture = plot.with_suffix(".png")
        run = read(SuiteRun, plot)
        draw(picture_title(run), pictures(run), picture)
        said.append(f"drew {picture.name}")
    if show is not None:
        said.append(markdown(read(SuiteRun, show)))
        _write_page(show, page)
    return "\n".join(said)
