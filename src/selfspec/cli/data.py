"""`selfspec data`: the model's own answers, as training text. Only asks and shows; the work is
`train/own_text.py`."""

from __future__ import annotations

import itertools
import json
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

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
    """Prompts to answer: a JSONL or text file, a folder saved by `datasets`,
    hf:NAME or hf:NAME#CONFIG@SPLIT."""
    column: str | None = None
    """The column that holds the prompt; by default the first that is there of messages, turns,
    prompt, question, instruction, text."""
    limit: int | None = None
    """Read at most this many prompts of each source; by default all."""
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
        Path,
        typer.Option(
            "--out",
            "-o",
            help="JSONL file to write. An interrupted run goes on with what is there.",
        ),
    ],
    prompts: Prompts,
    answers: Answers,
    model: options.ModelOptions,
    max_minutes: Annotated[
        float | None,
        typer.Option(
            "--max-minutes",
            help="Stop after this many minutes; the same command goes on.",
            rich_help_panel="Run",
        ),
    ] = None,
    as_json: options.AsJson = False,
) -> None:
    """Let a model write its own training text: its answers to prompts from files, or to prompts
    that it makes up.

    Example:  selfspec data demo --made-up 2000 --out own.jsonl
    """
    from ..core.text_rows import require
    from ..train.own_text import OwnText, write

    settings = answers.make(OwnText)
    require(prompts.prompts)
    llm = common.open_model(name, model)
    questions, most = _questions(llm, prompts, settings, out)
    with _Bar(most * settings.samples) as bar:
        report = write(
            llm,
            questions,
            out,
            settings,
            max_seconds=max_minutes and max_minutes * 60,
            tell=bar.tell,
        )
    typer.echo(
        json.dumps({"file": str(out), **report.as_dict()}) if as_json else summary(report, out)
    )


def _questions(
    llm: LLM, asked: PromptOptions, answers: OwnText, out: Path
) -> tuple[Iterator[Question], int]:
    """The prompts of all sources, mixed, and how many at most; made-up ones are made as they are
    needed."""
    from ..core.text_rows import read_rows
    from ..train.own_text import made_up, made_up_so_far, mixed, questions_from

    sources: list[tuple[Iterable[Question], int]] = []
    for source in asked.prompts:
        found = list(
            itertools.islice(questions_from(llm, read_rows(source), asked.column), asked.limit)
        )
        sources.append((found, len(found)))
    if asked.made_up:
        first, openings = made_up_so_far(out, answers.seed), asked.opening or [""]
        made = made_up(
            llm, asked.made_up, openings, seed=answers.seed, batch=answers.batch, first=first
        )
        sources.append((made, asked.made_up))
    return mixed(sources), sum(size for _, size in sources)


class _Bar:
    """A bar for somebody who watches; a line a minute in a file."""

    def __init__(self, total: int) -> None:
        self._total, self._last = total, 0.0
        self._bar = common.bar("answers", "rate")
        self._task = self._bar.add_task("", total=total, rate="")

    def __enter__(self) -> _Bar:
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def tell(self, report: Report) -> None:
        done, rate = (
            report.found + report.answers,
            f"{report.tokens:,} tokens, {report.tokens / report.seconds:.0f} a second",
        )
        self._bar.update(self._task, completed=done, rate=rate)
        if not sys.stderr.isatty() and report.seconds - self._last > 60:
            self._last = report.seconds
            common.stderr().print(
                f"{done} of at most {self._total} answers, {rate}", soft_wrap=True
            )


def summary(report: Report, out: Path) -> str:
    """What was done, in a line or two."""
    speed = report.tokens / report.seconds if report.seconds else 0.0
    parts = [
        f"{report.answers:,} answers with {report.tokens:,} tokens in {report.seconds:.0f} s "
        f"({speed:.0f} a second)"
    ]
    for count, what in (
        (report.found, "were there already"),
        (report.repeated, "repeated"),
        (report.too_long, "too long"),
    ):
        if count:
            parts.append(f"{count:,} {what}")
    more = " The time was up; the same command goes on." if report.stopped else ""
    return f"{', '.join(parts)}. The text is in {out}.{more}"
