"""`scripts/bench memory`: how much memory each way to draft takes, each in a process of its own.

A process loads the model, answers one short prompt and says the largest resident size that it had
while it answered, and since it began. Shared libraries and the allocator's leftovers are in it, so
compare with the row of plain decoding, or with what it had once the library was imported. A first
load packs weights, which later ones find, so it is not counted. Linux only. Times are not taken.
"""

from __future__ import annotations

import json
import subprocess
import sys
from itertools import product
from typing import Annotated, Any

import typer
from rich.progress import track

from benchmarks.command import Model, Out, Show, environment, made_by, result_path, run_command
from benchmarks.models import folder_of
from selfspec.bench.contestants import own_options
from selfspec.bench.html import Table
from selfspec.bench.meters import PeakMemory
from selfspec.bench.prompts import TEXT
from selfspec.bench.schema import write_json
from selfspec.bench.tables import markdown
from selfspec.core.json_text import from_json
from selfspec.errors import OptionError

METHODS = (
    "plain auto ngram recycle hybrid jacobi early-exit layer-skip cosine kv-subset "
    "quantised:weights=int8 quantised:weights=int4 draft-model"
)
WORDS = 200  # of the prompt


def used(folder: str, method: str, weights: str, tokens: int) -> dict[str, Any]:
    """What this process takes for one answer; it must be a fresh one."""
    import os

    from selfspec import LLM

    whole, answer = PeakMemory(os.getpid()), PeakMemory(os.getpid())
    whole.start()
    imported = whole.read()
    llm = LLM.from_pretrained(folder, weights=weights, profile=None)
    loading = whole.read()
    answer.start()
    prompt = " ".join(TEXT.split()[:WORDS])
    made = llm.generate(prompt, max_new_tokens=tokens, **own_options(method))
    answering = answer.read()
    if imported is None or loading is None or answering is None:
        raise OptionError("this system does not say how much memory a process takes; use Linux")
    sizes = {"imported": imported, "loading": loading, "answering": answering}
    return {**sizes, "tokens": made.stats.new_tokens}


def apart(folder: str, method: str, weights: str, tokens: int) -> dict[str, Any]:
    """The same in a process of its own."""
    words = [sys.executable, "-P", "-m", "benchmarks.memory", "--model", folder]
    words += ["--one", method, "--weights", weights, "--max-new-tokens", str(tokens)]
    done = subprocess.run(words, capture_output=True, text=True, check=False, env=environment())
    if done.returncode:
        said = (done.stderr.strip().splitlines() or ["nothing"])[-1]
        raise OptionError(f"{method}: its process ended with {done.returncode} and said: {said}")
    found: dict[str, Any] = from_json(done.stdout.splitlines()[-1])
    return found


def table(content: dict[str, Any]) -> str:
    """Megabytes by method, over plain decoding and over the library alone."""
    rows = content["rows"]
    plain = rows[0]["answering"]
    lines = [
        [
            row["method"],
            row.get("weights", "auto"),
            f"{row['loading'] / 1e6:.0f}",
            f"{row['answering'] / 1e6:.0f}",
            f"{(row['answering'] - plain) / 1e6:+.0f}",
            f"{(row['answering'] - row['imported']) / 1e6:+.0f}" if "imported" in row else "-",
        ]
        for row in rows
    ]
    heads = ["method", "weights", "loading, MB", "answering, MB", "over the first"]
    return markdown([Table([*heads, "over the import"], lines)])


def memory(
    model: Model = "demo",
    methods: Annotated[str, typer.Option(help="As `selfspec bench` has them.")] = METHODS,
    weights: Annotated[
        str, typer.Option(help="Ways to store weights, each with every method.")
    ] = "auto",
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Tokens of each answer.")] = 64,
    one: Annotated[str, typer.Option(hidden=True)] = "",
    out: Out = None,
    show: Show = None,
) -> None:
    """How much memory each way to draft takes, each in a process of its own.

    Example: scripts/bench memory --methods "plain ngram quantised:weights=int8"
    """
    if show is not None:
        typer.echo(table(from_json(show.read_text(encoding="utf-8"))))
        return
    folder = str(folder_of(model))
    if one:
        typer.echo(json.dumps(used(folder, one, weights, max_new_tokens)))
        return
    kinds = weights.split(",")
    for kind in kinds:
        apart(folder, "plain", kind, 1)
    rows = [
        {"method": method, "weights": kind, **apart(folder, method, kind, max_new_tokens)}
        for kind, method in track([*product(kinds, methods.split())], transient=True)
    ]
    target = out or result_path("memory-methods")
    content = {"kind": "memory", "model": model, "new_tokens": max_new_tokens, "rows": rows}
    write_json({**content, "provenance": vars(made_by("memory", 1))}, target)
    typer.echo(table(content))
    typer.echo(json.dumps({"file": target.name}))


if __name__ == "__main__":
    run_command(memory)
