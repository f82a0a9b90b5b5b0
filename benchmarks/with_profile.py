"""`scripts/bench with_profile`: what does a profile do for `auto`?

Questions of Spec-Bench are answered by plain decoding, by `auto` without a profile, by `auto` with
it, and by each of the profile's ways as it stands, in turns. Questions that the profile was made
with are left out. Speeds are ratios of mean seconds a token over a task's questions.
"""

from __future__ import annotations

import random
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import typer

from benchmarks.command import Model, Out, Show, Threads, made_by, result_path, run_command
from benchmarks.models import folder_of
from benchmarks.ratios import resampled
from selfspec import LLM
from selfspec.bench.html import Table
from selfspec.bench.schema import Result, read, write
from selfspec.bench.tables import markdown as as_text
from selfspec.bench.tasks import Item, read_questions
from selfspec.bench.timing import Ratio
from selfspec.cli.bench import progress_bar
from selfspec.core.files import is_there
from selfspec.core.machine import this_machine
from selfspec.errors import OptionError
from selfspec.profile import Profile, profile_for
from selfspec.tune.texts import digest_of_question, prompts_of

PLAIN, AUTO, PROFILE = "plain", "auto", "auto with the profile"


@dataclass
class Answered:
    """A question, and what each contestant took for a token of it."""

    task: str
    question: str
    seconds: dict[str, float]
    same: bool
    """Whether all wrote the same tokens."""


@dataclass
class ProfileRun(Result):
    """All questions so far."""

    kind = "with-profile"
    measured_by = "scripts/bench with_profile"

    model: str
    profile: str
    """Digest of the text that it was made of."""
    new_tokens: int
    answers: list[Answered] = field(default_factory=list)


def contestants_of(profile: Profile) -> dict[str, dict[str, Any]]:
    """What `LLM.generate` is told for each."""
    fixed = {str(way): way.options for way in profile.ways if way.draft != "auto"}
    return {
        PLAIN: {"draft": None},
        AUTO: {"draft": "auto"},
        PROFILE: {"draft": profile.drafter()},
        **fixed,
    }


def unseen(items: Sequence[Item], profile: Profile) -> list[Item]:
    """The questions that the profile was not made with."""
    if not profile.questions:
        raise OptionError(
            "the profile does not say which questions it was made with, so nobody can tell whether "
            "these are others; make it again with selfspec tune"
        )
    kept = [item for item in items if digest_of_question(item.text) not in profile.questions]
    if not kept:
        raise OptionError("the profile was made with all of these questions; give others")
    return kept


def answer(
    llm: LLM,
    ids: list[int],
    contestants: Mapping[str, Mapping[str, Any]],
    new_tokens: int,
    turn: int,
) -> tuple[dict[str, float], bool]:
    """One question by everyone, each time in another order."""
    seconds: dict[str, float] = {}
    texts: list[list[int]] = []
    names = list(contestants)
    first = turn % len(names)
    for name in names[first:] + names[:first]:
        result = llm.generate(ids, max_new_tokens=new_tokens, **contestants[name])
        seconds[name] = result.stats.decode_seconds / max(1, result.stats.decoded)
        texts.append(result.tokens)
    return seconds, all(text == texts[0] for text in texts)


def speed(answers: Sequence[Answered], name: str, over: str) -> Ratio:
    """A contestant's speed over another's, with its interval."""

    def of(sample: Sequence[Answered]) -> float:
        return sum(each.seconds[over] for each in sample) / sum(
            each.seconds[name] for each in sample
        )

    return resampled(answers, of)


def said(found: Ratio) -> str:
    """As it stands in the table."""
    return f"{found.value:.2f} ({found.low:.2f} to {found.high:.2f})"


def best_fixed(answers: Sequence[Answered]) -> str | None:
    """The fastest of the profile's ways over these answers."""
    ways = [name for name in answers[0].seconds if name not in (PLAIN, AUTO, PROFILE)]
    total = {name: sum(each.seconds[name] for each in answers) for name in ways}
    return min(total, key=total.__getitem__, default=None)


def by_task(run: ProfileRun) -> dict[str, list[Answered]]:
    """The answers to each task's questions, then all."""
    tasks: dict[str, list[Answered]] = {}
    for each in run.answers:
        tasks.setdefault(each.task, []).append(each)
    return {**tasks, "all": run.answers}


def markdown(run: ProfileRun) -> str:
    """Speeds over plain decoding by task, then of `auto` with the profile over the best fixed."""
    if not run.answers:
        return "Nothing was measured."
    names = [name for name in run.answers[0].seconds if name != PLAIN]
    rows, over_best, over_plain = [], {}, {}
    for task, asked in by_task(run).items():
        best = best_fixed(asked) or PLAIN
        over_best[task], over_plain[task] = (speed(asked, PROFILE, of) for of in (best, PLAIN))
        row = [task, str(len(asked)), *(said(speed(asked, name, PLAIN)) for name in names)]
        rows.append([*row, f"{said(over_best[task])}, {best[:40]}"])
    head = ["task", "questions", *(name[:40] for name in names), "with it over the best fixed"]
    least_best, least_plain = (
        min((ratio.value, task) for task, ratio in over.items()) for over in (over_best, over_plain)
    )
    where = run.provenance
    different = sum(not each.same for each in run.answers)
    note = (
        f"{run.model}, {where.threads} threads, {where.cpu}. Ratios of mean seconds a token, 95%: "
        f"a bootstrap over questions. {different} answers differed from plain decoding's. With the "
        f"profile `auto` has at least {least_best[0]:.3f} of the best fixed way of a task, chosen "
        f"when all was known ({least_best[1]}), and {least_plain[0]:.3f} of plain decoding "
        f"({least_plain[1]})."
    )
    return as_text([Table(head, rows), note])


def with_profile(
    questions: Annotated[Path, typer.Option(help="Spec-Bench's, or a file like it.")],
    profile: Annotated[str, typer.Option(help="A file, or a task's name.")],
    model: Model = "demo",
    sample: Annotated[int, typer.Option(min=1, help="Questions of each task.")] = 4,
    new_tokens: Annotated[int, typer.Option(min=8, help="Of an answer, at most.")] = 96,
    minutes: Annotated[float, typer.Option(min=0, help="Begin none after these; 0: all.")] = 0.0,
    threads: Threads = 2,
    out: Out = None,
    show: Show = None,
) -> None:
    """Compare `auto` with a profile, without one, and the profile's ways, in turns.

    Example: scripts/bench with_profile --questions question.jsonl --profile FILE
    """
    if show is not None:
        typer.echo(markdown(read(ProfileRun, show)))
        return
    llm = LLM.from_pretrained(folder_of(model), threads=threads, profile=None)
    found = profile_for(llm.model, profile, this_machine(), llm.info.weights)
    if found is None:
        raise OptionError(f"--profile {profile} names no profile; give a file or a task's name")
    path = out or result_path("with-profile")
    run = ProfileRun(made_by("with_profile", threads), Path(model).name, found.text, new_tokens)
    contestants = contestants_of(found)
    if is_there(path):
        before = read(ProfileRun, path)
        if (before.profile, before.new_tokens) == (run.profile, run.new_tokens):
            run.answers = [each for each in before.answers if set(each.seconds) == set(contestants)]
    done = {(each.task, each.question) for each in run.answers}
    items = unseen(read_questions(questions, sample), found)
    missing = [item for item in items if (item.task, item.id) not in done]
    random.Random(0).shuffle(missing)  # a run that is cut has something of every task
    for options in contestants.values():  # a first answer makes copies and warms up
        llm.generate(prompts_of(llm, ["Hello"])[0], max_new_tokens=16, **options)
    end = time.perf_counter() + 60 * minutes if minutes else float("inf")
    with progress_bar(len(missing)) as (tick, say):
        for number, item in enumerate(missing):
            if time.perf_counter() > end:
                break
            say(f"{item.task} {item.id}")
            (ids,) = prompts_of(llm, [item.text])
            seconds, same = answer(llm, ids, contestants, new_tokens, number)
            run.answers.append(Answered(item.task, item.id, seconds, same))
            run.complete = len(run.answers) >= len(items)
            write(run, path)
            tick("")
    typer.echo(markdown(run))


if __name__ == "__main__":
    run_command(with_profile)
