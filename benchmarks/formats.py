"""`scripts/bench formats`: the same model with its weights stored in each way, side by side.

What a pass over n tokens costs, and how much memory the weights take. All kinds take turns within a
round, so that other work on the machine meets them alike. What rounding does to the model is
`quality.py`'s.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import torch
import typer

from benchmarks.command import (
    Model,
    Out,
    Show,
    Threads,
    made_by,
    result_path,
    run_command,
    tokenizer_of,
)
from benchmarks.models import folder_of
from benchmarks.ratios import milliseconds
from selfspec.bench.html import Table
from selfspec.bench.prompts import prompt_ids
from selfspec.bench.schema import Result, read, write
from selfspec.bench.tables import markdown, number
from selfspec.cli.bench import progress_bar
from selfspec.llm import LLM
from selfspec.model.layered import LayeredModel
from selfspec.model.load.source import DEMO
from selfspec.model.measuring import weight_bytes

STORED = "stored"  # for a model with a GGUF file of its own: the demo is one
KINDS = ("float32", "bfloat16", "int8", "int4")
SIZES = (1, 2, 4, 8, 12, 16, 24)
CONTEXTS = (64, 512)


@dataclass
class Kind:
    """One way to store weights. Raw seconds of every turn, by context and by tokens of a pass."""

    weights: str
    bytes: int
    passes: dict[str, dict[str, list[float]]] = field(default_factory=dict)


@dataclass
class FormatsRun(Result):
    """Everything that was measured."""

    kind = "formats"
    measured_by = "scripts/bench formats"

    model: str
    kinds: list[Kind] = field(default_factory=list)


@torch.inference_mode()
def pass_seconds(model: LayeredModel, ids: Sequence[int], context: int, size: int) -> float:
    """Seconds of one pass of `size` tokens behind a context, head and choice included."""
    cache = model.new_cache(1, context + size)
    model.prefill([ids[:context]], cache)
    tokens = torch.tensor(ids[context : context + size])
    seconds = []
    for _ in range(4):
        begin = time.perf_counter()
        model.forward(tokens, cache, cache.layout([size])).argmax(-1).tolist()
        seconds.append(time.perf_counter() - begin)
        cache.rollback(0, context)
    return min(seconds[1:])


def measure_passes(run: FormatsRun, models: dict[str, LayeredModel], ids: Sequence[int]) -> None:
    """One turn of every kind, context and size."""
    for kind in run.kinds:
        for context in CONTEXTS:
            cells = kind.passes.setdefault(str(context), {})
            for size in SIZES:
                seconds = pass_seconds(models[kind.weights], ids, context, size)
                cells.setdefault(str(size), []).append(seconds)


def tables(run: FormatsRun) -> str:
    """What was measured, from the JSON alone."""
    first = run.kinds[0]
    size_of = {kind.weights: kind.bytes for kind in run.kinds}
    parts: list[str | Table | None] = []
    for context in CONTEXTS:
        of = {kind.weights: kind.passes.get(str(context), {}) for kind in run.kinds}
        median = {
            name: {size: statistics.median(cell) for size, cell in cells.items()}
            for name, cells in of.items()
        }
        rows = [
            [
                name,
                number(size_of[name] / 1e6, 0),
                *(milliseconds(cells.get(str(size))) for size in SIZES),
                number(median[first.weights]["1"] / cells["1"], 2),
                number(cells["8"] / cells["1"], 2),
                number(cells["16"] / cells["1"], 2),
            ]
            for name, cells in median.items()
        ]
        head = ["weights", "MB", *(f"{size} ms" for size in SIZES)]
        head += [f"decode, times {first.weights}", "verify(8)/decode(1)", "verify(16)/decode(1)"]
        parts += [f"A pass over n tokens behind {context}:", Table(head, rows)]
    return markdown(parts)


def formats(
    model: Model = "demo",
    *,
    turns: Annotated[int, typer.Option(min=1, help="Turns that each kind takes.")] = 7,
    threads: Threads = 2,
    out: Out = None,
    show: Show = None,
) -> None:
    """What a pass costs with each way to store weights.

    Example: scripts/bench formats --turns 3
    """
    if show is not None:
        typer.echo(tables(read(FormatsRun, show)))
        return
    folder = folder_of(model)
    own_file = model == DEMO or model.lower().endswith(".gguf")
    models = {
        kind: LLM.from_pretrained(
            model if kind == STORED else folder, weights=kind, threads=threads
        ).model
        for kind in (*KINDS, *([STORED] if own_file else []))
    }
    run = FormatsRun(made_by("formats", threads), Path(model).name)
    run.kinds = [Kind(name, weight_bytes(each)) for name, each in models.items()]
    target, tokenize = out or result_path("formats"), tokenizer_of(folder)
    ids = prompt_ids(tokenize, max(CONTEXTS) + max(SIZES))
    with progress_bar(turns) as (tick, say):
        for turn in range(turns):
            say(f"passes, turn {turn + 1}")
            measure_passes(run, models, ids)
            write(run, target)
            tick("")
    run.complete = True
    write(run, target)
    typer.echo(tables(run))


if __name__ == "__main__":
    run_command(formats)
