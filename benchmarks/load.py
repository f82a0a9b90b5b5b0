"""`scripts/bench load`: servers next to each other under load, in turns.

Each server runs already, with the same model and precision. A turn asks each of them as many
questions by as many callers at once, as `selfspec bench-serve` does; the next turn begins with
another server. Every answer has the same number of tokens, so tokens a second compare. No question
is asked twice, since its second reading would be found in a cache, so each name needs a server of
its own. Run again with the same file, it adds turns to what is there.

    scripts/bench load --start all --callers 1,4,16,64

starts ours with drafts and without, llama.cpp's and vLLM's on the demo, and ends them afterwards.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import typer

from benchmarks import load_servers
from benchmarks.command import Out, Show, Threads, made_by, result_path, run_command
from selfspec.bench.html import Table
from selfspec.bench.schema import Result, read, write
from selfspec.bench.serving import WARM, Crowd, Target, measure, model_at, percentile
from selfspec.bench.tables import markdown as as_text
from selfspec.bench.tables import number
from selfspec.bench.tables import threads as said_threads
from selfspec.core.options import numbers
from selfspec.errors import OptionError


@dataclass(frozen=True)
class Turn:
    """One crowd at one server. Seconds are medians, and `late` the 90th percentile."""

    server: str
    callers: int
    turn: int
    asked: int
    failed: int
    tokens: int
    seconds: float
    first: float
    first_late: float
    gap: float
    whole: float
    whole_late: float

    @property
    def rate(self) -> float:
        return self.tokens / self.seconds


@dataclass
class LoadRun(Result):
    """All turns."""

    kind = "load"
    measured_by = "scripts/bench load"

    model: str
    precision: str
    max_tokens: int
    prompt_words: int
    servers: dict[str, str] = field(default_factory=dict)
    """What each is, in words."""
    turns: list[Turn] = field(default_factory=list)


def turn_of(name: str, number: int, crowd: Crowd) -> Turn:
    served = crowd.served

    def at(percent: int, values: list[float]) -> float:
        found = percentile(values, percent)
        return float("nan") if found is None else found

    first = [each.first for each in served if each.first is not None]
    whole = [each.seconds for each in served]
    return Turn(
        name, crowd.callers, number, len(crowd.asked), len(crowd.asked) - len(served),
        sum(each.tokens for each in served), crowd.seconds, at(50, first), at(90, first),
        at(50, [gap for each in served for gap in each.gaps]), at(50, whole), at(90, whole),
    )  # fmt: skip


def markdown(run: LoadRun) -> str:
    """Medians over turns, in the order of the servers."""
    header = ["callers", "server", "turns", "tokens/s", "first token ms", "p90", "whole s", "p90"]
    rows = []
    for callers in sorted({each.callers for each in run.turns}):
        for name in run.servers:
            mine = [each for each in run.turns if (each.server, each.callers) == (name, callers)]
            if not mine:
                continue
            rows.append(
                [str(callers), name, str(len(mine)), number(median(e.rate for e in mine)),
                 *(number(1000 * median(getattr(e, what) for e in mine))
                   for what in ("first", "first_late")),
                 *(number(median(getattr(e, what) for e in mine))
                   for what in ("whole", "whole_late"))]
            )  # fmt: skip
    said = (
        f"{run.model} in {run.precision}: {run.max_tokens} tokens to questions of about "
        f"{run.prompt_words} words"
    )
    failed = sum(each.failed for each in run.turns)
    words = [f"{name}: {what}" for name, what in run.servers.items()]
    return as_text([said, said_threads(run.provenance), Table(header, rows),
                    f"{failed} requests failed.", *words])  # fmt: skip


def server_of(text: str, max_tokens: int) -> tuple[str, Target]:
    """NAME=URL, or NAME=URL#JSON with fields that every request has."""
    name, equals, rest = text.partition("=")
    url, _, more = rest.partition("#")
    if not equals or not url.startswith("http"):
        raise OptionError(f"--server {text!r} is not NAME=URL, so no server is named")
    fields: dict[str, Any] = {"ignore_eos": True, **(json.loads(more) if more else {})}
    return name, Target(url, model_at(url, None), max_tokens, None, fields)


def take_turns(
    run: LoadRun, path: Path, targets: dict[str, Target], turns: int, callers: str, requests: int
) -> None:
    """Each turn asks every server at every number of callers, and is kept at once."""
    names = list(targets)
    for turn in range(turns):
        for count in numbers(callers, "--callers"):
            before = sum(each.callers == count for each in run.turns)
            shift = (turn + before) % len(names)
            for name in [*names[shift:], *names[:shift]]:
                asked = sum(WARM + each.asked for each in run.turns if each.server == name)
                words = run.prompt_words
                crowds = measure(targets[name], [count], requests, words, lambda crowd: None, asked)
                run.turns.append(turn_of(name, before, crowds[0]))
                run.complete = True
                write(run, path)
                typer.echo(f"{count} {name}: {run.turns[-1].rate:.1f} tokens/s", err=True)


def load(
    server: Annotated[list[str], typer.Option(help="NAME=URL or NAME=URL#JSON. Repeatable.")] = [],  # noqa: B006
    start: Annotated[
        list[str],
        typer.Option(help=f"Start it on the demo: {'; '.join(load_servers.NAMES)}; or all."),
    ] = [],  # noqa: B006
    about: Annotated[list[str], typer.Option(help="NAME=what it is, in words.")] = [],  # noqa: B006
    callers: Annotated[str, typer.Option(help="How many ask at once.")] = "1,4",
    requests: Annotated[int, typer.Option(min=1, help="Questions of each caller.")] = 2,
    turns: Annotated[int, typer.Option(min=1, help="Turns of all servers.")] = 2,
    words: Annotated[int, typer.Option("--prompt-words", min=1)] = 60,
    max_tokens: Annotated[int, typer.Option(min=1)] = 64,
    model: Annotated[str, typer.Option(help="What the model is.")] = load_servers.MODEL,
    precision: Annotated[
        str, typer.Option(help="Of weights and cache, at all servers.")
    ] = load_servers.PRECISION,
    threads: Threads = 2,
    out: Out = None,
    show: Show = None,
) -> None:
    """Measure servers next to each other."""
    if show is not None:
        typer.echo(markdown(read(LoadRun, show)))
        return
    path: Path = out or result_path("load")
    run = LoadRun(made_by("load", threads), model, precision, max_tokens, words)
    if path.is_file():
        run = read(LoadRun, path)
    chosen = load_servers.NAMES if "all" in start else start
    programs = {name: load_servers.program_of(name, threads) for name in chosen}
    with load_servers.running(programs) as urls:
        asked = [*server, *(f"{name}={url}" for name, url in urls.items())]
        targets = dict(server_of(each, max_tokens) for each in asked)
        if not targets:
            raise OptionError("no server is named; use --server NAME=URL, or --start all")
        run.servers |= {name: each.about for name, each in programs.items()}
        run.servers |= dict(each.split("=", 1) for each in about)
        run.servers |= {name: "" for name in targets if name not in run.servers}
        take_turns(run, path, targets, turns, callers, requests)
    typer.echo(markdown(run))


if __name__ == "__main__":
    run_command(load)
