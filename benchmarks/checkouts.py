"""`scripts/bench checkouts DIR`: does this code take less time for a pass than another checkout's?

On a shared machine two minutes differ by more than most changes bring, and two processes of the
same code by up to a twentieth for as long as they live, since their memory lies elsewhere. So each
checkout's code has a process that stays, their passes take turns, milliseconds apart, and all
processes are started anew several times. A checkout beside itself (DIR a copy of this one) shows
what is noise.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from statistics import geometric_mean, median
from typing import Annotated

import typer

from benchmarks.command import (
    Model,
    Out,
    Show,
    Threads,
    environment,
    last_said,
    made_by,
    result_path,
    run_command,
)
from benchmarks.models import folder_of
from benchmarks.ratios import ratio, resampled
from selfspec.bench.html import Table
from selfspec.bench.provenance import CHECKOUT, git
from selfspec.bench.schema import Result, read, write
from selfspec.bench.tables import interval, markdown, number
from selfspec.bench.timing import Contestant, interleave
from selfspec.cli.bench import progress_bar
from selfspec.core.options import numbers
from selfspec.errors import OptionError

HERE = "this code"


@dataclass
class Start:
    """Seconds of passes over so many tokens, of each checkout, between two starts."""

    tokens: int
    seconds: dict[str, list[float]] = field(default_factory=dict)


@dataclass
class CheckoutsRun(Result):
    """Everything that was measured."""

    kind = "checkouts"
    measured_by = "scripts/bench checkouts"

    model: str
    weights: str
    behind: int
    starts: list[Start] = field(default_factory=list)


@contextmanager
def process_of(checkout: Path, arguments: Sequence[str]) -> Iterator[Callable[[int], float]]:
    """A process with a checkout's code: a function that gives the seconds of a pass there."""
    surroundings = environment()
    path = os.pathsep.join([str(checkout / "src"), surroundings["PYTHONPATH"]])
    with (
        # a file: a pipe that nobody reads would be full one day, and the process wait for ever
        tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as errors,
        subprocess.Popen(
            [sys.executable, "-P", "-m", "benchmarks.passes_of", *arguments],
            env={**surroundings, "PYTHONPATH": path},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
        ) as process,
    ):

        def seconds(tokens: int) -> float:
            assert process.stdin and process.stdout
            process.stdin.write(f"{tokens}\n")
            process.stdin.flush()
            if line := process.stdout.readline():
                return float(line)
            errors.seek(0)
            said = last_said(errors.read())
            raise OptionError(f"the process of {checkout.name} ended and said: {said}")

        try:
            yield seconds
        finally:
            process.kill()


def named(checkouts: Sequence[Path]) -> dict[str, Path]:
    """This code and the others, by their commits as git says them, or by their folders' names."""
    found = {HERE: CHECKOUT}
    for checkout in checkouts:
        if not (checkout / "src" / "selfspec").is_dir():
            raise OptionError(
                f"{checkout} has no folder src/selfspec, so there is no code to compare with. "
                "`git worktree add --detach DIR COMMIT` makes a checkout of another commit."
            )
        name = git("describe", "--always", "--dirty", checkout=checkout) or checkout.name
        found[name if name not in found else f"{name}, {len(found)}"] = checkout.resolve()
    return found


def measure(
    checkouts: Mapping[str, Path],
    arguments: Sequence[str],
    tokens: Sequence[int],
    starts: int,
    rounds: int,
    run: CheckoutsRun,
    save: Callable[[], None],
) -> None:
    """Start after start, each with all numbers of tokens in turns."""
    turns = starts * len(tokens) * len(checkouts) * (rounds + 1)
    with progress_bar(turns) as (tick, say):
        for start in range(starts):
            say(f"start {start + 1} of {starts}")
            with ExitStack() as stack:
                passes = {
                    name: stack.enter_context(process_of(checkout, arguments))
                    for name, checkout in checkouts.items()
                }
                for count in tokens:
                    ways: dict[str, Contestant] = {
                        name: partial(seconds, count) for name, seconds in passes.items()
                    }
                    timings = interleave(ways, rounds, on_turn=tick)
                    run.starts.append(Start(count, {name: timings.of(name) for name in ways}))
            save()


def tables(run: CheckoutsRun) -> str:
    """Medians, and this code's time beside each other checkout's: the median of turns by start."""
    lines = []
    for tokens in dict.fromkeys(start.tokens for start in run.starts):
        starts = [start.seconds for start in run.starts if start.tokens == tokens]
        for name in starts[0]:
            taken = median(each for start in starts for each in start[name])
            cells = [name, str(tokens), number(1e3 * taken, 2)]
            found = [ratio(start[HERE], start[name]) for start in starts]
            quotients = [each.value for each in found if each is not None]
            beside = resampled(quotients, geometric_mean) if name != HERE else None
            lines.append([*cells, interval(beside, "{:.3f}".format)])
    heads = ["code of", "tokens", "ms", "this code's time beside it"]
    where, count = run.provenance, len(run.starts) // max(1, len({s.tokens for s in run.starts}))
    note = f"{run.model}, {run.weights}, behind {run.behind} tokens, {where.threads} threads, "
    note += f"{where.cpu}. Medians; ratios are means over {count} starts, with 95% intervals."
    return markdown([Table(heads, lines), note])


def checkouts(
    others: Annotated[
        list[Path] | None, typer.Argument(metavar="DIR...", help="Checkouts to compare with.")
    ] = None,
    model: Model = "demo",
    weights: Annotated[str, typer.Option(help="How weights are stored.")] = "int8",
    tokens: Annotated[str, typer.Option(help="Tokens of a pass.")] = "1,8",
    behind: Annotated[int, typer.Option(min=1, help="Tokens before them.")] = 300,
    starts: Annotated[int, typer.Option(min=1, help="Starts of all processes.")] = 5,
    rounds: Annotated[int, typer.Option(min=1, help="Turns of each start.")] = 40,
    threads: Threads = 2,
    out: Out = None,
    show: Show = None,
) -> None:
    """Does this code take less time for a pass than another checkout's?

    Example: git worktree add --detach ../before HEAD~1 && scripts/bench checkouts ../before
    """
    if show is not None:
        typer.echo(tables(read(CheckoutsRun, show)))
        return
    if not others:
        raise OptionError("name a checkout to compare with: scripts/bench checkouts DIR")
    counts = numbers(tokens, "--tokens")
    named_ones = named(others)
    arguments = [str(folder_of(model)), weights, str(behind), str(max(counts)), str(threads)]
    run = CheckoutsRun(made_by("checkouts", threads), str(model), weights, behind)
    target = out or result_path("checkouts", kind=f"-{weights}")
    measure(named_ones, arguments, counts, starts, rounds, run, lambda: write(run, target))
    run.complete = True
    write(run, target)
    typer.echo(tables(run))


if __name__ == "__main__":
    run_command(checkouts)
