"""`scripts/bench memory`: how much memory each way to draft takes, each in a process of its own.

A process loads the model, answers one short prompt (`memory_of.py`) and says how much of it was
resident once `LLM` was imported, once the model was loaded and once it had answered, and the most
that was while it loaded and while it answered. Shared libraries and the allocator's leftovers are
in it, so compare with the row of plain decoding, or with the import. A first load packs weights,
which later ones find, so it is not counted. Linux only. Times are not taken.
"""

from __future__ import annotations

import json
import subprocess
import sys
from itertools import product
from typing import Annotated, Any

import typer
from rich.progress import track

from benchmarks.command import (
    Model,
    Out,
    Show,
    environment,
    last_said,
    made_by,
    result_path,
    run_command,
)
from benchmarks.models import folder_of
from selfspec.bench.contestants import own_options
from selfspec.bench.html import Table
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


def apart(folder: str, method: str, weights: str, tokens: int) -> dict[str, Any]:
    """The same in a process of its own."""
    prompt, options = " ".join(TEXT.split()[:WORDS]), json.dumps(own_options(method))
    words = [sys.executable, "-P", "-m", "benchmarks.memory_of"]
    words += [folder, weights, prompt, str(tokens), options]
    done = subprocess.run(words, capture_output=True, text=True, check=False, env=environment())
    if done.returncode:
        said = last_said(done.stderr)
        raise OptionError(f"{method}: its process ended with {done.returncode} and said: {said}")
    found: dict[str, Any] = from_json(done.stdout.splitlines()[-1])
    return found


def table(content: dict[str, Any]) -> str:
    """Megabytes by method: peaks beside the first row's, and what stays above the import."""
    rows = content["rows"]
    plain = rows[0]["answering"]

    def above(row: dict[str, Any], name: str) -> str:
        """Results of earlier versions have peaks only."""
        known = "imported" in row and name in row
        return f"{(row[name] - row['imported']) / 1e6:+.0f}" if known else "-"

    lines = [
        [
            row["method"],
            row.get("weights", "auto"),
            f"{row['loading'] / 1e6:.0f}",
            f"{row['answering'] / 1e6:.0f}",
            f"{(row['answering'] - plain) / 1e6:+.0f}",
            *(above(row, name) for name in ("answering", "loaded", "answered")),
        ]
        for row in rows
    ]
    heads = ["method", "weights", "loading, MB", "answering, MB", "over the first"]
    stays = ["over the import", "loaded, over it", "answered, over it"]
    note = "Loading and answering: the most in that time; over the import: that of answering."
    return markdown([Table([*heads, *stays], lines), note])


def memory(
    model: Model = "demo",
    methods: Annotated[str, typer.Option(help="As `selfspec bench` has them.")] = METHODS,
    weights: Annotated[
        str, typer.Option(help="Ways to store weights, each with every method.")
    ] = "auto",
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Tokens of each answer.")] = 64,
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
