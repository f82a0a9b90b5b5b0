"""`scripts/bench formats`: the same model with its weights stored in each way, side by side.

What a pass over n tokens costs, what plain decoding and drafting with a smaller copy give, how much
memory the weights take, and what rounding does to the model: its perplexity on a text, and how
often it names the float32 model's own next token. All kinds take turns within a round, so that
other work on the machine meets them alike. Says of the demo model that its layers were born in 4
bits: few-bit figures on it flatter.
"""

from __future__ import annotations

import math
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
from benchmarks.ratios import milliseconds
from selfspec.bench.html import Table
from selfspec.bench.prompts import prompt_ids
from selfspec.bench.schema import Result, read, write
from selfspec.bench.suite_run import folder_of
from selfspec.bench.tables import markdown, number, percent
from selfspec.cli.bench import progress_bar
from selfspec.llm import LLM
from selfspec.model.layered import LayeredModel
from selfspec.model.load.source import DEMO
from selfspec.model.measuring import weight_bytes

STORED = "stored"  # for a model with a GGUF file of its own: the demo is one
KINDS = ("float32", "bfloat16", "int8", "int4")
SIZES = (1, 2, 4, 8, 12, 16, 24)
CONTEXTS = (64, 512)
WINDOW = 512  # tokens that are read together for a perplexity


@dataclass
class Kind:
    """One way to store weights. Raw seconds of every turn, by context and by tokens of a pass."""

    weights: str
    bytes: int
    passes: dict[str, dict[str, list[float]]] = field(default_factory=dict)
    loss: float | None = None
    """Mean negative log-likelihood of the text's tokens."""
    agreement: float | None = None
    """How often its likeliest token is the float32 model's."""
    text_tokens: int = 0


@dataclass
class FormatsRun(Result):
    """Everything that was measured."""

    kind = "formats"
    measured_by = "scripts/bench formats"

    model: str
    text: str
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


@torch.inference_mode()
def read_text(model: LayeredModel, ids: Sequence[int]) -> tuple[float, torch.Tensor]:
    """Mean loss of each token of a text given those before it in its window, and what the model
    would have said instead."""
    losses, said = [], []
    for begin in range(0, len(ids) - 1, WINDOW):
        window = torch.tensor(ids[begin : begin + WINDOW + 1])
        cache = model.new_cache(1, WINDOW)
        logits = model.forward(window[:-1], cache, cache.layout([len(window) - 1]))
        losses.append(torch.nn.functional.cross_entropy(logits, window[1:], reduction="none"))
        said.append(logits.argmax(-1))
    return torch.cat(losses).mean().item(), torch.cat(said)


def measure_passes(run: FormatsRun, models: dict[str, LayeredModel], ids: Sequence[int]) -> None:
    """One turn of every kind, context and size."""
    for kind in run.kinds:
        for context in CONTEXTS:
            cells = kind.passes.setdefault(str(context), {})
            for size in SIZES:
                seconds = pass_seconds(models[kind.weights], ids, context, size)
                cells.setdefault(str(size), []).append(seconds)


def measure_quality(run: FormatsRun, models: dict[str, LayeredModel], ids: Sequence[int]) -> None:
    """Perplexity of each kind and agreement with the first."""
    reference = None
    for kind in run.kinds:
        kind.loss, said = read_text(models[kind.weights], ids)
        reference = said if reference is None else reference
        kind.agreement = (said == reference).double().mean().item()
        kind.text_tokens = len(said)


def tables(run: FormatsRun) -> str:
    """What was measured, from the JSON alone."""
    first = run.kinds[0]
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
                *(milliseconds(cells.get(str(size))) for size in SIZES),
                number(median[first.weights]["1"] / cells["1"], 2),
                number(cells["8"] / cells["1"], 2),
                number(cells["16"] / cells["1"], 2),
            ]
            for name, cells in median.items()
        ]
        head = ["weights", *(f"{size} ms" for size in SIZES)]
        head += [f"decode, times {first.weights}", "verify(8)/decode(1)", "verify(16)/decode(1)"]
        parts += [f"A pass over n tokens behind {context}:", Table(head, rows)]
    if first.loss is not None:
        rows = [
            [
                kind.weights,
                number(kind.bytes / 1e6, 0),
                number(math.exp(kind.loss), 3) if kind.loss is not None else "",
                percent(math.exp((kind.loss or 0) - first.loss) - 1, 2),
                percent(kind.agreement, 1),
            ]
            for kind in run.kinds
        ]
        head = ["weights", "MB", "perplexity", f"beside {first.weights}", "same next token"]
        parts += [f"Quality on {first.text_tokens} tokens of {run.text}:", Table(head, rows)]
    return markdown(parts)


def formats(
    model: Model = "demo",
    *,
    text: Annotated[
        Path | None, typer.Option(help="A text to measure perplexity and agreement on.")
    ] = None,
    tokens: Annotated[int, typer.Option(min=513, help="How much of the text to read.")] = 6144,
    turns: Annotated[int, typer.Option(min=1, help="Turns that each kind takes.")] = 7,
    threads: Threads = 2,
    out: Out = None,
    show: Show = None,
) -> None:
    """What each way to store weights costs and brings.

    Example: scripts/bench formats --text wikitext/test.txt --turns 3
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
    run = FormatsRun(made_by("formats", threads), Path(model).name, text.name if text else "")
    run.kinds = [Kind(name, weight_bytes(each)) for name, each in models.items()]
    target, tokenize = out or result_path("formats"), tokenizer_of(folder)
    ids = prompt_ids(tokenize, max(CONTEXTS) + max(SIZES))
    with progress_bar(turns + bool(text)) as (tick, say):
        for turn in range(turns):
            say(f"passes, turn {turn + 1}")
            measure_passes(run, models, ids)
            write(run, target)
            tick("")
        if text is not None:
            say("reading the text")
            measure_quality(run, models, tokenize(text.read_text())[: tokens + 1])
            tick("")
    run.complete = True
    write(run, target)
    typer.echo(tables(run))


if __name__ == "__main__":
    run_command(formats)
