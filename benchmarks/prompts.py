"""`scripts/bench prompts`: how long reading a prompt takes, next to transformers and to the
arithmetic.

Both read the same tokens in turns, whole, on the same weights (float32), and make the logits of the
last token only. Beside them, in the same rounds, the processor multiplies and adds on registers:
that is what its threads can do. The bound is the operations of a prompt (every matrix product of
every token, and attention over what it sees) at the best of these speeds; where a machine changes
its own from minute to minute, the ratio at each round's speed stands beside it.
"""

from __future__ import annotations

import ctypes
import gc
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from benchmarks.command import Model, Out, Show, Threads, made_by, result_path, run_command
from benchmarks.models import folder_of
from benchmarks.ratios import median, ratio
from selfspec import LLM
from selfspec.bench.html import Table
from selfspec.bench.schema import Result, Seconds, read, write
from selfspec.bench.tables import interval
from selfspec.bench.tables import markdown as as_text
from selfspec.bench.timing import Contestant, interleave, timed
from selfspec.cli.bench import progress_bar
from selfspec.core.options import numbers
from selfspec.model.compute.cpu.native import compiled

PEAK_STEPS = 30_000_000  # about a third of a second


@dataclass
class LengthRow:
    """Prompts of one length: seconds of every reader, one a round, and operations a second on
    registers in the same rounds."""

    tokens: int
    operations: int
    seconds: dict[str, Seconds] = field(default_factory=dict)
    peak: list[float] = field(default_factory=list)


@dataclass
class PromptsRun(Result):
    """Everything that was measured."""

    kind = "prompts"
    measured_by = "scripts/bench prompts"

    model: str
    rows: list[LengthRow] = field(default_factory=list)


def operations(config: Any, weights: int, tokens: int) -> int:
    """Multiplications and additions of a prompt. `weights`: of the layers' matrices."""
    heads, layers = int(config.num_attention_heads), int(config.num_hidden_layers)
    size = int(getattr(config, "head_dim", None) or config.hidden_size // heads)
    pairs = tokens * (tokens + 1) // 2
    return 2 * weights * tokens + 4 * size * heads * layers * pairs


class Peak:
    """What the threads can do on registers."""

    def __init__(self, threads: int) -> None:
        self._native = compiled(Path(__file__).with_name("peak.cpp"))
        self._native.operations_of_a_step.restype = ctypes.c_int64
        self._threads, self._out = threads, (ctypes.c_float * threads)()
        self.found: list[float] = []

    def __call__(self) -> float:
        start = time.perf_counter()
        self._native.multiply_and_add(ctypes.c_int64(PEAK_STEPS), self._threads, self._out)
        seconds = time.perf_counter() - start
        steps = PEAK_STEPS * self._threads
        self.found.append(steps * self._native.operations_of_a_step() / seconds)
        return seconds


def readers(llm: LLM, other: Any, ids: list[int]) -> dict[str, Contestant]:
    """Ours and transformers'. Each call has a cache of its own."""

    def ours() -> None:
        llm.model.prefill([ids], llm.model.new_cache(1, len(ids) + 1))

    def theirs() -> None:
        with torch.inference_mode():
            other(torch.tensor([ids]), use_cache=True, logits_to_keep=1)

    return {"selfspec": timed(ours), "transformers": timed(theirs)}


def measure(model: str, lengths: list[int], rounds: int, threads: int, out: Path) -> PromptsRun:
    """All lengths; what is done is saved after each."""
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(threads)
    folder = folder_of(model)
    llm = LLM.from_pretrained(str(folder), dtype="float32", threads=threads)
    other: Any = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="sdpa"
    )
    layers = other.get_submodule(other.base_model_prefix).layers
    weights = sum(each.numel() for each in layers.parameters() if each.dim() == 2)
    run = PromptsRun(made_by("prompts", threads), Path(model).name)
    chance = torch.Generator().manual_seed(0)
    with progress_bar(len(lengths) * 3 * (rounds + 1)) as (tick, say):
        for length in lengths:
            say(f"{length} tokens")
            ids = torch.randint(0, llm.info.vocabulary, (length,), generator=chance).tolist()
            peak = Peak(threads)
            contestants: dict[str, Contestant] = {**readers(llm, other, ids), "peak": peak}
            timings = interleave(contestants, rounds, warmup=1, on_turn=tick)
            row = LengthRow(length, operations(other.config, weights, length))
            row.seconds = {name: timings.seconds[name] for name in ("selfspec", "transformers")}
            row.peak = peak.found
            run.rows.append(row)
            write(run, out)
            gc.collect()
    run.complete = True
    write(run, out)
    return run


def markdown(run: PromptsRun) -> str:
    """The table."""
    lines = []
    for row in run.rows:
        ours, theirs = row.seconds["selfspec"], row.seconds["transformers"]
        bound = row.operations / max(row.peak)
        in_rounds = [row.operations / each for each in row.peak[-len(ours) :]]  # no warm-up
        mine, other = median(ours), median(theirs)
        lines.append(
            [
                f"{row.tokens:,}",
                "-" if mine is None else f"{mine:.2f}",
                "-" if other is None else f"{other:.2f}",
                interval(ratio(theirs, ours)),
                f"{bound:.2f}",
                "-" if mine is None else f"{mine / bound:.2f}",
                interval(ratio(ours, in_rounds)),
            ]
        )
    where = run.provenance
    heads = ["tokens", "ours, s", "transformers, s", "times as fast"]
    heads += ["arithmetic, s", "ours / it", "at its round's speed"]
    note = (
        f"{run.model}, float32, {where.threads} threads, {where.cpu}. Medians, taken in turns. The "
        "arithmetic: at the best speed that registers showed, and beside it at that of each round."
    )
    return as_text([Table(heads, lines), note])


def prompts(
    model: Model = "demo",
    lengths: Annotated[str, typer.Option(help="Prompt lengths in tokens.")] = "512,2048,4096,8000",
    rounds: Annotated[int, typer.Option(min=1, help="Measured rounds.")] = 3,
    threads: Threads = 2,
    out: Out = None,
    show: Show = None,
) -> None:
    """Reading prompts of several lengths, next to transformers and to the arithmetic.

    Example: scripts/bench prompts --lengths 512 --rounds 2
    """
    if show is not None:
        typer.echo(markdown(read(PromptsRun, show)))
        return
    target = out or result_path("prompts")
    wanted = list(numbers(lengths, "--lengths"))
    typer.echo(markdown(measure(model, wanted, rounds, threads, target)))


if __name__ == "__main__":
    run_command(prompts)
