"""`selfspec advise` and `selfspec tune`: does drafting help this model here, and how?

The room `tune` measures; here it is shown.
"""

from __future__ import annotations

import json
from dataclasses import asdict, replace
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
    from ..tune.run import Found, Tuning

ADVICE_MINUTES = 0.8
Questions = Annotated[
    Path | None,
    typer.Option(
        "--questions",
        help="Questions to tune on: a JSONL (question_id, category, turns) or a text file with one "
        "a line. Without it the model answers built-in ones.",
        rich_help_panel="What is measured",
    ),
]


@options.grouped
def advise(
    name: options.Model = "demo",
    *,
    questions: Questions = None,
    as_json: options.AsJson = False,
    model: options.Loading,
) -> None:
    """Say within a minute whether drafting helps this model here, and with which settings.

    Nothing is searched, trained or kept: selfspec tune looks further, and keeps what it finds.

    Example:  selfspec advise demo --weights int8
    """
    from ..tune.run import TuneOptions

    wanted = TuneOptions(minutes=ADVICE_MINUTES, max_new_tokens=32, search="none")
    tuning, _ = _run(name, model, wanted, questions)
    _show(tuning.found, as_json)


@options.grouped
def tune(
    name: options.Model = "demo",
    *,
    asked: Annotated[Typed, Flags("tune.run:TuneOptions", "What is measured")],
    questions: Questions = None,
    out: Annotated[
        Path | None,
        options.output(
            "--out",
            "-o",
            help="The profile to write. Without it, where this model finds it by itself.",
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

    Example:  selfspec tune demo --minutes 5
    """
    from ..profile import kept_in
    from ..tune.run import TuneOptions

    tuning, profile = _run(name, model, asked.make(TuneOptions), questions)
    file = out or kept_in(profile.model) / profile.file
    profile.write(file)
    _show(tuning.found, as_json)
    common.stderr().print(f"Profile: {file}", markup=False, soft_wrap=True)


def _run(name: str, model: Any, wanted: Any, file: Path | None) -> tuple[Tuning, Profile]:
    from ..tune.run import Tuning

    asked = _questions(file)
    if not asked:
        common.stderr().print("the model answers built-in prompts", style="dim")

    llm = common.open_model(name, replace(model, profile="none"))
    with common.bar("tuning") as bar:
        task = bar.add_task("", total=100, words="")

        def say(stage: str, share: float) -> None:
            bar.update(task, completed=100 * share, words=stage)

        tuning = Tuning(llm, wanted, asked, say)
        return tuning, tuning.run()


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


def _show(found: Found, as_json: bool) -> None:
    if as_json:
        ways = [asdict(way) for way in found.ways]
        errors = found.steps.errors if found.steps else []
        said = {"answer": found.answer, "verdict": found.verdict, "ways": ways}
        typer.echo(json.dumps({**said, "cost_errors": [round(each, 3) for each in errors]}))
        return
    table = Table("way of drafting", "predicted", "measured", "95%", box=None, padding=(0, 2, 0, 0))
    for way in found.ways:
        predicted = "" if way.predicted is None else f"{way.predicted:.2f}"
        interval = "" if way.low is None else f"{way.low:.2f} to {way.high:.2f}"
        table.add_row(str(way), predicted, f"{way.measured:.2f}", interval)
    console = Console(highlight=False)
    console.print(table)
    if found.steps and found.steps.errors:
        worst = max(map(abs, found.steps.errors))
        console.print(f"costs: whole passes within {worst:.0%} of what their parts predict")
    console.print(found.verdict, markup=False, soft_wrap=True)
