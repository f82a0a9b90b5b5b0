"""`selfspec advise` and `selfspec tune`: does drafting help this model here, and how?

The room `tune` measures; here it is shown.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from ..errors import OptionError
from . import common, options
from .flags import Flags, Typed

if TYPE_CHECKING:
    from ..profile import Profile
    from ..tune.options import Setting, TuneOptions
    from ..tune.run import Found

ADVICE_MINUTES = 0.8
GENERAL = "general"
Questions = Annotated[
    Path | None,
    typer.Option(
        "--questions",
        help="Questions to tune on: a JSONL (question_id, category, turns) or a text file with one "
        "a line. Without it the model answers built-in ones.",
        rich_help_panel="What is measured",
    ),
]

Tasks = Annotated[
    list[str] | None,
    typer.Option(
        "--task",
        metavar="NAME=FILE",
        help="Tune for a task with questions of its own, instead of --questions; repeat it for "
        "several. Each gets a profile that --profile NAME takes, and the time of --minutes.",
        rich_help_panel="What is measured",
    ),
]


@options.grouped
def advise(
    name: options.Model = "demo",
    *,
    setting: Annotated[Typed, Flags("tune.options:Setting", "What it is for")],
    questions: Questions = None,
    as_json: options.AsJson = False,
    model: options.Loading,
) -> None:
    """Say within a minute whether drafting helps this model here, and with which settings.

    Nothing is searched, trained or kept: selfspec tune looks further, and keeps what it finds.

    Example:  selfspec advise demo --weights int8
    """
    from ..tune.options import Setting, TuneOptions

    wanted = TuneOptions(minutes=ADVICE_MINUTES, max_new_tokens=32, search="none")
    (done,) = _run(name, model, wanted, setting.make(Setting), {GENERAL: questions})
    _show(done, as_json)


@options.grouped
def tune(
    name: options.Model = "demo",
    *,
    asked: Annotated[
        Typed,
        Flags("tune.options:TuneOptions", "What is measured"),
        Flags("tune.options:Setting", "What it is for"),
    ],
    questions: Questions = None,
    task: Tasks = None,
    out: Annotated[
        Path | None,
        options.output(
            "--out",
            "-o",
            help="The profile to write, or with --task their folder. Without it, where this model "
            "finds it by itself.",
        ),
    ] = None,
    plot: Annotated[
        Path | None,
        options.output(
            "--png", help="Draw the search and the speeds into this PNG or SVG (needs matplotlib)."
        ),
    ] = None,
    as_json: options.AsJson = False,
    model: options.Loading,
) -> None:
    """Find the fastest way of drafting for this model on this machine, and keep it as a profile.

    The model writes some text of its own. Passes are timed, and ways of drafting are predicted from
    these costs and from how often their drafts would be kept. The best are timed in turns with
    plain decoding. Whoever loads this model here with draft "auto" then begins with what was found.
    Ctrl-C ends the search, and the best so far is timed and kept.

    Example:  selfspec tune demo --task chat=chat.jsonl --task code=code.jsonl
    """
    from ..tune.options import Setting, TuneOptions

    files = _tasks(task, questions)
    if plot is not None:
        from ..bench.pictures import pyplot_or_error

        pyplot_or_error()  # before minutes of work
        if len(files) > 1:
            raise OptionError(f"--png {plot} is one picture; leave it out, or tune one task")
    for done in _run(name, model, asked.make(TuneOptions), asked.make(Setting), files):
        _keep(done, out, bool(task))
        _show(done, as_json)
        if plot is not None:
            from ..tune.pictures import draw

            found = done.profile
            title = f"{found.name} in {found.weights}, {found.task}, {found.machine}"
            draw(done.found, found.model["layers"], title, plot)
        if done.found.stopped:  # Ctrl-C is meant for all tasks
            return


def _keep(done: Done, out: Path | None, in_folder: bool) -> None:
    """Write the profile where it was asked for, or where its model finds it."""
    from ..profile import kept_in

    profile = done.profile
    if done.found.stopped and not any(way.measured for way in done.found.ways):
        common.stderr().print("Nothing was timed, so no profile is kept.")
        return
    folder = out if in_folder and out else kept_in(profile.model)
    file = out if out and not in_folder else folder / profile.file
    profile.write(file)
    common.stderr().print(f"Profile: {file}", markup=False, soft_wrap=True)


@dataclass(frozen=True)
class Done:
    """A tuning's profile, and all that it found."""

    profile: Profile
    found: Found


def _tasks(tasks: Sequence[str] | None, questions: Path | None) -> dict[str, Path | None]:
    """What is tuned for: names with their files of questions."""
    from ..profile import named

    if not tasks:
        return {GENERAL: questions}
    if questions is not None:
        raise OptionError(
            f"--questions {questions} and --task both name questions; write --task NAME={questions}"
        )
    found: dict[str, Path | None] = {}
    for text in tasks:
        name, equals, file = text.partition("=")
        if not equals or not file:
            raise OptionError(f"--task {text} names no questions; write --task NAME=FILE")
        if named(name) in found:
            raise OptionError(f"--task {name} is there twice; give each task a name of its own")
        found[name] = Path(file)
    return found


def _run(
    name: str, model: Any, wanted: TuneOptions, setting: Setting, files: Mapping[str, Path | None]
) -> Iterator[Done]:
    from ..tune.run import Tuning

    asked = {task: _questions(file) for task, file in files.items()}
    if not all(asked.values()):
        common.stderr().print("no questions given: the model answers built-in ones", style="dim")
    llm = common.open_model(name, replace(model, profile="none"))
    for task, texts in asked.items():
        with common.bar("tuning") as bar:
            shown = bar.add_task("", total=100, words="")

            def say(stage: str, share: float, bar: Any = bar, shown: Any = shown) -> None:
                bar.update(shown, completed=100 * share, words=stage)

            tuning = Tuning(llm, wanted, texts, say, task, setting)
            profile = tuning.run()
        yield Done(profile, tuning.found)


def _questions(path: Path | None) -> list[str]:
    """The first turn of each question of a JSONL, or the lines of a text."""
    if path is None:
        return []
    if path.suffix == ".jsonl":
        from ..bench.tasks import read_questions

        return [each.text for each in read_questions(path, 4)]
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise OptionError(
            f"--questions {path} cannot be read ({error}); give a JSONL or a text file with a "
            "question a line"
        ) from error
    found = [line for line in lines if line.strip()]
    if not found:
        raise OptionError(f"--questions {path} has no questions; write one a line")
    return found


def _show(done: Done, as_json: bool) -> None:
    found = done.found
    if as_json:
        ways = [asdict(way) for way in found.ways]
        errors = found.steps.errors if found.steps else []
        task = done.profile.task
        said = {"task": task, "answer": found.answer, "verdict": found.verdict, "ways": ways}
        said["notes"] = found.notes
        typer.echo(json.dumps({**said, "cost_errors": [round(each, 3) for each in errors]}))
        return
    table = Table("way of drafting", "predicted", "measured", "95%", box=None, padding=(0, 2, 0, 0))
    for way in found.ways:
        predicted = "" if way.predicted is None else f"{way.predicted:.2f}"
        interval = "" if way.low is None else f"{way.low:.2f} to {way.high:.2f}"
        measured = "" if way.measured is None else f"{way.measured:.2f}"
        table.add_row(str(way), predicted, measured, interval)
    console = Console(highlight=False)
    if done.profile.task != GENERAL:
        console.print(f"{done.profile.task}:", markup=False)
    console.print(table)
    if found.steps and found.steps.errors:
        worst = max(map(abs, found.steps.errors))
        console.print(f"costs: whole passes within {worst:.0%} of what their parts predict")
    for line in (*found.notes, found.verdict):
        console.print(line, markup=False, soft_wrap=True)
