"""`selfspec data`: the model's own answers, as training text. `train/own_text.py` does the work."""

from __future__ import annotations

import itertools
import json
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.progress import Progress

from ..errors import OptionError
from . import common, options
from .flags import Flags, Typed

if TYPE_CHECKING:
    from ..llm import LLM
    from ..train.own_text import OwnText, Question, Report


@dataclass(frozen=True)
class PromptOptions:
    """Where prompts come from."""

    prompts: Sequence[str] = ()
    """A JSONL or text file, a folder saved by `datasets`, hf:NAME or hf:NAME#CONFIG@SPLIT."""
    column: str | None = None
    """The column of the prompt. By default the first of messages, turns, prompt, question,
    instruction, text that is there."""
    limit: int | None = None
    """Read at most this many prompts of each source. By default all."""
    made_up: int = 0
    """Let the model make up this many prompts itself."""
    opening: Sequence[str] = ()
    """How made-up prompts begin, e.g. 'Summarize:'. Several are taken in turn."""

    def __post_init__(self) -> None:
        if not self.prompts and not self.made_up:
            raise OptionError(
                "there is nothing to answer; give --prompts FILE, or --made-up 1000 to let the "
                "model write prompts"
            )
        if self.made_up < 0 or (self.limit is not None and self.limit < 1):
            raise OptionError(
                f"made_up={self.made_up}, limit={self.limit} leave nothing to answer; make up 0 or "
                "more, and read 1 or more"
            )


Prompts = Annotated[PromptOptions, Flags("cli.data:PromptOptions", "Prompts")]
Answers = Annotated[Typed, Flags("train.own_text:OwnText", "Answers")]


@options.grouped
def data(
    name: options.Model,
    out: Annotated[
        Path, typer.Option("--out", "-o", help=f"JSONL file to write. {options.GOES_ON}")
    ],
    prompts: Prompts,
    answers: Answers,
    model: options.Loading,
    max_minutes: Annotated[
        float | None,
        options.run(
            "--max-minutes", help="Stop after this many minutes. The same command goes on."
        ),
    ] = None,
    as_json: options.AsJson = False,
) -> None:
    """Let a model write its own training text: answers to prompts from files, or that it makes up.

    Example:  selfspec data demo --made-up 2000 --out own.jsonl
    """
    from ..core import door
    from ..core.text_rows import require
    from ..train.own_text import OwnText, write

    settings, max_minutes = answers.make(OwnText), door.minutes("--max-minutes", max_minutes)
    require(prompts.prompts)
    llm = common.open_model(name, model)
    questions, total = _questions(llm, prompts, settings, out)
    seconds = None if max_minutes is None else max_minutes * 60
    with common.bar("answers") as bar:
        tell = _teller(bar, total * settings.samples)
        report = write(llm, questions, out, settings, max_seconds=seconds, tell=tell)
    facts = {"file": str(out), **report.as_dict()}
    typer.echo(json.dumps(facts) if as_json else summary(report, out))


def _questions(
    llm: LLM, asked: PromptOptions, answers: OwnText, out: Path
) -> tuple[Iterator[Question], int]:
    """The prompts of all sources, mixed, and how many at most. They are made up when needed."""
    from ..core.text_rows import read_rows
    from ..train.own_text import made_up, made_up_so_far, mixed, questions_from

    sources: list[tuple[Iterable[Question], int]] = []
    for source in asked.prompts:
        read = questions_from(llm, read_rows(source), asked.column)
        questions = list(itertools.islice(read, asked.limit))
        sources.append((questions, len(questions)))
    if asked.made_up:
        first, openings = made_up_so_far(out, answers.seed), asked.opening or [""]
        how = {"seed": answers.seed, "batch": answers.batch, "first": first}
        sources.append((made_up(llm, asked.made_up, openings, **how), asked.made_up))
    return mixed(sources), sum(size for _, size in sources)


def _teller(bar: Progress, total: int) -> Callable[[Report], None]:
    """Moves the bar for somebody who watches, and writes a line a minute into a file."""
    task, last = bar.add_task("", total=total, words=""), 0.0

    def tell(report: Report) -> None:
        nonlocal last
        done = report.found + report.answers
        rate = f"{report.tokens:,} tokens, {report.tokens / report.seconds:.0f} a second"
        bar.update(task, completed=done, words=rate)
        if not sys.stderr.isatty() and report.seconds - last > 60:
            last = report.seconds
            common.stderr().print(f"{done} of at most {total} answers, {rate}", soft_wrap=True)

    return tell


def summary(report: Report, out: Path) -> str:
    """What was done, in a line or two."""
    speed = report.tokens / report.seconds if report.seconds else 0.0
    parts = [
        f"{report.answers:,} answers with {report.tokens:,} tokens in {report.seconds:.0f} s "
        f"({speed:.0f} a second)"
    ]
    counts = {
        "were there already": report.found,
        "repeated": report.repeated,
        "too long": report.too_long,
    }
    parts += [f"{count:,} {what}" for what, count in counts.items() if count]
    more = " The time was up; the same command goes on." if report.stopped else ""
    return f"{', '.join(parts)}. The text is in {out}.{more}"
