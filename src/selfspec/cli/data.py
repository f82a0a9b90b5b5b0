"""`selfspec data`: the model's own answers, as training text. Only asks and shows; the work is
`selfdata.py`."""

from __future__ import annotations

import functools
import itertools
import json
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ..errors import OptionError
from . import common, options

if TYPE_CHECKING:
    from ..llm import LLM
    from ..train.own_text import Question, Report

_prompts = functools.partial(typer.Option, show_default=True, rich_help_panel="Prompts")
_answers = functools.partial(typer.Option, show_default=True, rich_help_panel="Answers")


@dataclass(frozen=True)
class PromptFlags:
    """Where prompts come from."""

    prompts: Annotated[
        list[str] | None,
        _prompts(
            "--prompts",
            help="JSONL or text file, a folder saved by `datasets`, or hf:NAME[#CONFIG][@SPLIT]; "
            "repeatable.",
        ),
    ] = None
    column: Annotated[
        str | None,
        _prompts(
            "--column",
            help="The column that holds the prompt; else messages, turns, prompt, question, "
            "instruction, text.",
        ),
    ] = None
    limit: Annotated[
        int | None, _prompts("--limit", min=1, help="At most so many prompts of each source.")
    ] = None
    made_up: Annotated[
        int, _prompts("--made-up", min=0, help="Prompts that the model makes up itself, as many.")
    ] = 0
    opening: Annotated[
        list[str] | None,
        _prompts(
            "--opening",
            help="How made-up prompts begin, e.g. 'Summarize:'; repeatable, taken in turn.",
        ),
    ] = None

    def __post_init__(self) -> None:
        if not self.prompts and not self.made_up:
            raise OptionError(
                "there is nothing to answer; give --prompts FILE, or --made-up 1000 to let the "
                "model write prompts"
            )


@dataclass(frozen=True)
class AnswerFlags:
    """What becomes `OwnText`: the same names and defaults."""

    max_new_tokens: Annotated[
        int, _answers("--max-new-tokens", "-n", min=1, help="Longest answer.")
    ] = 256
    temperature: Annotated[
        float, _answers("--temperature", "-t", help="0 is greedy; above it answers are drawn.")
    ] = 0.0
    top_p: Annotated[
        float,
        _answers(
            "--top-p", help="Of drawn answers: only the likeliest tokens up to this probability."
        ),
    ] = 1.0
    samples: Annotated[int, _answers("--samples", min=1, help="Answers to each prompt.")] = 1
    batch: Annotated[int, _answers("--batch", min=1, help="Prompts answered together.")] = 32
    seed: Annotated[
        int, _answers("--seed", help="Which answers are drawn, and which prompts are made up.")
    ] = 0


@options.grouped
def data(
    name: options.Model,
    out: Annotated[
        Path, typer.Option("--out", help="JSONL to write; an interrupted run goes on where it was.")
    ],
    prompts: PromptFlags,
    answers: AnswerFlags,
    model: options.ModelOptions,
    max_minutes: Annotated[
        float | None,
        typer.Option(
            "--max-minutes",
            help="Stop after that long; the same command goes on.",
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

    settings = OwnText(**vars(answers))
    require(prompts.prompts or ())
    llm = common.open_model(name, model)
    questions, most = _questions(llm, prompts, answers, out)
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
    llm: LLM, flags: PromptFlags, answers: AnswerFlags, out: Path
) -> tuple[Iterator[Question], int]:
    """The prompts of all sources, mixed, and how many at most; made-up ones are made as they are
    needed."""
    from ..core.text_rows import read_rows
    from ..train.own_text import made_up, made_up_so_far, mixed, questions_from

    sources: list[tuple[Iterable[Question], int]] = []
    for source in flags.prompts or ():
        found = list(
            itertools.islice(questions_from(llm, read_rows(source), flags.column), flags.limit)
        )
        sources.append((found, len(found)))
    if flags.made_up:
        first, openings = made_up_so_far(out, answers.seed), flags.opening or [""]
        made = made_up(
            llm, flags.made_up, openings, seed=answers.seed, batch=answers.batch, first=first
        )
        sources.append((made, flags.made_up))
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
