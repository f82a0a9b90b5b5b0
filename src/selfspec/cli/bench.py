"""`selfspec bench`: what is typed, the progress bar, the tables, a last line of JSON. Does not
measure anything itself."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ..core.files import require_output, write_whole
from . import common, options
from .flags import Flags, Typed
from .report import page_of

if TYPE_CHECKING:
    from ..bench.suite import Suite

WISHES = "bench.suite_run:Wishes"
ASKED = ("task", "sample", "chat", "contexts", "skip_bad")
TAKING_PART = ("methods", "peers")
Asked = Annotated[
    Typed,
    Flags(WISHES, "What is asked", only=ASKED),
    Flags(WISHES, "Who takes part", only=TAKING_PART),
    Flags(WISHES, "How it is measured", without=("model", "fresh", *ASKED, *TAKING_PART)),
    Flags(WISHES, "Output", only=("fresh",)),
]


@options.grouped
def bench(
    model: Annotated[str, typer.Argument(help=options.MODEL_HELP, metavar="[MODEL]")] = "demo",
    *,
    asked: Asked,
    out: Annotated[
        Path | None, options.output("--out", "-o", help="The JSON to write, or to go on with.")
    ] = None,
    show: options.Show = None,
    plot: options.Plot = False,
    page: Annotated[
        Path | None, options.output("--report", help="Write a self-contained page too: out.html.")
    ] = None,
    listing: Annotated[
        bool, options.output("--list", help="Only list the tasks, and the engines with methods.")
    ] = False,
) -> None:
    """Measure drafters and other engines next to plain decoding, in turns on the same questions.

    Each text is compared with plain decoding's, token for token. An interrupted run goes on when
    the same command is given again.

    Example:  selfspec bench demo --task gsm8k=test.jsonl --methods "auto ngram" --sample 3
    """
    if listing:
        typer.echo(known())
        return
    from ..bench.pictures import draw, pyplot_or_error
    from ..bench.schema import SuiteRun, read
    from ..bench.suite_report import markdown, picture_title, pictures

    for output in (out, page):
        if output is not None and show is None:
            require_output(output)
    if plot:
        pyplot_or_error()  # before minutes of measuring
    result = show or _measure(model, asked, out, [str(path) for path in (out, page) if path])
    run = read(SuiteRun, result)
    typer.echo(markdown(run))
    if plot:
        picture = result.with_suffix(".png")
        draw(picture_title(run), pictures(run), picture)
        typer.echo(f"Written: {picture}")
    if page is not None:
        write_whole(page, page_of(result))
        typer.echo(f"Written: {page}")
    if show is None:
        facts = {"file": result.name, "turns": len(run.turns), "complete": run.complete}
        typer.echo(json.dumps(facts))


def _measure(model: str, asked: Typed, out: Path | None, written: Sequence[str]) -> Path:
    """Measure what was asked for; says where the result is."""
    from ..bench.suite_run import Wishes, prepare

    common.quiet_bars()
    wishes = asked.make(Wishes, model=model)
    command = command_line(sys.argv[1:], [wishes.model, *wishes.task, *written])
    suite = prepare(wishes, command, out)
    sit(suite)
    return suite.out


def sit(suite: Suite) -> None:
    """Measure behind a progress bar; Ctrl-C keeps what there is."""
    if suite.run.complete:
        said = "is complete: nothing to measure. --fresh measures it anew."
        typer.echo(f"{suite.out.name} {said}", err=True)
        return
    with progress_bar(suite.turns) as (tick, say):
        try:
            suite.measure(tick, say)
        except KeyboardInterrupt:
            said = "has what was measured, the same command goes on with it."
            typer.echo(f"Interrupted; {suite.out.name} {said}", err=True)
            raise typer.Exit(130) from None
    if not suite.run.complete:
        said = "has what was measured so far, the same command goes on with it."
        typer.echo(f"{suite.out.name} {said}", err=True)


@contextmanager
def progress_bar(total: int) -> Iterator[tuple[Callable[[str], None], Callable[[str], None]]]:
    """Two functions, one for a turn taken and one for what is going on; the bar goes to stderr and
    vanishes at the end."""
    # two redraws a second: the bar's own thread must not take part in the race
    with common.bar("{task.description}", transient=True, refresh_per_second=2) as bar:
        task = bar.add_task("starting", total=total, words="")
        yield lambda _: bar.advance(task), lambda text: bar.update(task, description=text)


def command_line(words: Sequence[str], with_paths: Sequence[str], program: str = "selfspec") -> str:
    """The command as others can give it: paths as their last part, since a result is published."""
    names: dict[str, str] = {}
    for text in with_paths:
        name, equals, path = text.rpartition("=")
        names[text] = f"{name}{equals}{Path(path).name}"
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
            told = [f"{each}({', '.join(of)})" if of else each for each, of in methods.items()]
            lines.append(f"  {name:<12} {'  '.join(told)}")
    return "\n".join([*lines, "", "Ours (--methods): selfspec drafters"])
