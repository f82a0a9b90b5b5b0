"""`scripts/bench neighbours`: what is left of the speed while other processes want the cores.

Neighbours are processes that only count, so they take cores and no memory to speak of. In every
round, for each number of them, all contestants write one text each, in turns. What is told is how
much of a contestant's own quiet speed is left: a fair share of the cores is the bound.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Annotated, Any

import torch
import typer

from benchmarks.command import Model, Out, Show, Threads, made_by, result_path, run_command
from benchmarks.models import folder_of
from selfspec import LLM
from selfspec.bench.html import Table
from selfspec.bench.prompts import TEXT
from selfspec.bench.schema import Result, read, write
from selfspec.bench.tables import markdown, number, percent
from selfspec.bench.timing import Contestant, interleave
from selfspec.cli.bench import progress_bar
from selfspec.core.options import numbers

SETTLING = 0.3  # seconds until new neighbours have their share
WORDS = 60  # of the prompt
COUNTING = "while True: pass"


@dataclass
class Beside:
    """Seconds a token of each contestant beside so many neighbours, one a round."""

    neighbours: int
    seconds: dict[str, list[float]] = field(default_factory=dict)


@dataclass
class NeighboursRun(Result):
    """Everything that was measured."""

    kind = "neighbours"
    measured_by = "scripts/bench neighbours"

    model: str
    new_tokens: int
    rows: list[Beside] = field(default_factory=list)


@contextmanager
def busy(count: int) -> Iterator[None]:
    """So many neighbours at work."""
    processes = [subprocess.Popen([sys.executable, "-c", COUNTING]) for _ in range(count)]
    try:
        time.sleep(SETTLING if count else 0)
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


def ours(llm: LLM, draft: str | None, tokens: int) -> Contestant:
    """Seconds of one of our tokens, without the prompt's."""
    prompt = " ".join(TEXT.split()[:WORDS])

    def turn() -> float:
        made = llm.generate(prompt, max_new_tokens=tokens, eos=[], draft=draft)
        return made.stats.decode_seconds / made.stats.new_tokens

    return turn


def theirs(folder: str, tokens: int) -> Contestant:
    """Of one of transformers', as the difference of a long and a short answer."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    other: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    ids = tokenizer(" ".join(TEXT.split()[:WORDS]), return_tensors="pt")

    def seconds(count: int) -> float:
        start = time.perf_counter()
        other.generate(**ids, max_new_tokens=count, min_new_tokens=count, do_sample=False)
        return time.perf_counter() - start

    return lambda: (seconds(tokens + 1) - seconds(1)) / tokens


def measure(
    contestants: dict[str, Contestant],
    counts: list[int],
    rounds: int,
    run: NeighboursRun,
    save: Callable[[], None],
) -> None:
    """Round after round: neighbours come and go in each, so that all share the machine's moods."""
    run.rows = [Beside(count, {name: [] for name in contestants}) for count in counts]
    with progress_bar(len(counts) * len(contestants) * (rounds + 1)) as (tick, say):
        for turn in range(rounds + 1):
            for row in run.rows:
                say(f"{row.neighbours} neighbours")
                with busy(row.neighbours):
                    found = interleave(contestants, 1, warmup=0, on_turn=tick, skipped=turn)
                for name in contestants:
                    row.seconds[name] += found.of(name) if turn else []  # the first warms up
            save()


def tables(run: NeighboursRun) -> str:
    """Tokens a second, and the share of each contestant's quiet speed."""
    quiet = run.rows[0].seconds
    lines = []
    for name in quiet:
        cells = [name]
        for row in run.rows:
            speed = 1 / statistics.median(row.seconds[name])
            kept = speed * statistics.median(quiet[name])
            cells.append(number(speed, 0) + (f" ({percent(kept, 0)})" if row.neighbours else ""))
        lines.append(cells)
    heads = ["tokens/s", *(f"{row.neighbours} neighbours" for row in run.rows)]
    where = run.provenance
    note = f"{run.model}, {where.threads} threads on {where.cores} cores, {where.cpu}. Medians."
    return markdown([Table(heads, lines), note])


def neighbours(
    model: Model = "demo",
    weights: Annotated[str, typer.Option(help="Ways to store weights.")] = "float32,int8,int4",
    beside: Annotated[str, typer.Option(help="How many neighbours.")] = "0,1,2,4",
    rounds: Annotated[int, typer.Option(min=1, help="Measured rounds.")] = 5,
    max_new_tokens: Annotated[
        int, typer.Option("--max-new-tokens", "-n", min=1, help="Tokens of an answer.")
    ] = 48,
    threads: Threads = 2,
    out: Out = None,
    show: Show = None,
) -> None:
    """What is left of the speed while other processes want the cores.

    Example: scripts/bench neighbours --beside 0,2 --weights int8 --rounds 2
    """
    if show is not None:
        typer.echo(tables(read(NeighboursRun, show)))
        return
    torch.set_num_threads(threads)
    folder = str(folder_of(model))
    contestants: dict[str, Contestant] = {}
    for kind in weights.split(","):
        llm = LLM.from_pretrained(folder, weights=kind, threads=threads)
        contestants[kind] = ours(llm, None, max_new_tokens)
        contestants[f"{kind}, auto"] = ours(llm, "auto", max_new_tokens)
    contestants["transformers"] = theirs(folder, max_new_tokens)
    counts = sorted({0, *numbers(beside, "--beside")})
    run = NeighboursRun(made_by("neighbours", threads), str(model), max_new_tokens)
    target = out or result_path("neighbours")
    measure(contestants, counts, rounds, run, lambda: write(run, target))
    run.complete = True
    write(run, target)
    typer.echo(tables(run))


if __name__ == "__main__":
    run_command(neighbours)
