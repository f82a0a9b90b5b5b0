"""`selfspec info`: what a model is, how it runs here, and what bounds its speed on this machine."""

from __future__ import annotations

import json
import statistics
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

import typer
from rich.console import Console
from rich.table import Table

from . import common, options

if TYPE_CHECKING:
    from ..llm import LLM
    from ..results import ModelInfo


@dataclass(frozen=True)
class Bound:
    """The floor of plain decoding: every token reads every weight, as fast as memory allows."""

    bytes_per_token: int
    bandwidth: float  # bytes a second, measured
    products_seconds: float  # of one token's matrix products, measured through our own linears

    @property
    def floor_seconds(self) -> float:
        return self.bytes_per_token / self.bandwidth


@options.grouped
def info(
    name: options.Model = "demo", as_json: options.AsJson = False, *, model: options.Loading
) -> None:
    """Tell what a model is, how it runs here, and what bounds its speed on this machine.

    Example:  selfspec info demo --threads 2
    """
    llm = common.open_model(name, model)
    bound = measure(llm) if llm.info.device == "cpu" else None
    if as_json:
        typer.echo(json.dumps(as_dict(llm.info, bound)))
        return
    console = Console(highlight=False)
    console.print(table(llm.info, bound))
    if bound is not None:
        console.print(explanation(bound), soft_wrap=True)


def measure(llm: LLM) -> Bound:
    """Memory bandwidth by the fastest way to read, and one token's products, by these threads."""
    from ..bench.meters import read_bandwidth
    from ..model.measuring import product_seconds

    size = llm.info.weight_bytes
    bandwidth = max(max(values) for values in read_bandwidth(size).values())
    product_seconds(llm.model)  # warm-up
    return Bound(size, bandwidth, statistics.median(product_seconds(llm.model) for _ in range(5)))


def table(info: ModelInfo, bound: Bound | None) -> Table:
    """Names on the left, facts on the right."""
    grid = common.facts(info.name)
    halves = f"{info.halves} halves: attention and MLP of each can be skipped alone"
    layers = "run in one piece" if info.kernel == "floor" else f"{info.layers} ({halves})"
    grid.add_row("family", info.family)
    grid.add_row("layers", layers)
    grid.add_row("parameters", f"{info.parameters / 1e6:,.1f} million")
    grid.add_row("context", f"{info.context:,} tokens")
    grid.add_row("vocabulary", f"{info.vocabulary:,} tokens")
    grid.add_row("runs in", f"{info.dtype} on {info.device}, {info.threads} threads")
    grid.add_row("kernel", products(info))
    grid.add_row("weights", stored(info))
    for note in info.notes:
        grid.add_row("", note)
    if reading := reads(info):
        grid.add_row("reads weights", f"{reading} (chosen by a measurement on this machine)")
    grid.add_row("passes", passes(info))
    if info.kernel == "native":
        grid.add_row("kept packed", kept_packed())
    if info.device != "cpu":
        grid.add_row("recorded", info.recorded)
    grid.add_row("bit-exact", exactness(info))
    grid.add_row("read per token", f"{common.megabytes(info.weight_bytes)} of weights")
    if bound is not None:
        floor = bound.floor_seconds
        grid.add_row("memory bandwidth", f"{bound.bandwidth / 1e9:.1f} GB/s, measured")
        grid.add_row("floor", f"{floor * 1e3:.1f} ms a token, {1 / floor:.1f} tokens/s")
        grid.add_row("matrix products", f"{bound.products_seconds * 1e3:.1f} ms a token, measured")
    return grid


def products(info: ModelInfo) -> str:
    """The kernel, and who multiplies where it does not."""
    return info.kernel + (f" (products by {', '.join(info.modules)})" if info.modules else "")


def stored(info: ModelInfo) -> str:
    """How the weights are stored, and for whom."""
    ours = info.kernel == "native"
    return f"{info.weights}, {'packed for our kernels' if ours else 'as torch stores them'}"


def reads(info: ModelInfo) -> str:
    """How our kernels read weights here; "" where they do not."""
    if info.kernel != "native":
        return ""
    from ..model.compute.cpu.few_bits import reading
    from ..model.compute.cpu.native import library
    from ..model.compute.cpu.tuning import tuning

    return str(tuning(library()) if info.weights == "float32" else reading())


def kept_packed() -> str:
    """What is kept of packed weights, of all models."""
    from ..model.compute.cpu import packs

    held, most = common.megabytes(packs.kept_bytes()), common.megabytes(packs.limit())
    return f"{held} of at most {most} (${packs.LIMIT_VARIABLE}) in {packs.packed_folder()}"


def passes(info: ModelInfo) -> str:
    """Whether a pass is one call to our kernels, and what stays outside."""
    if not info.alone:
        return "one call to our kernels"
    return f"not in one call: {'; '.join(info.alone)}"


def exactness(info: ModelInfo) -> str:
    """What can be promised about the output here."""
    if info.row_stable:
        return "yes: drafts and neighbours in a batch cannot change a bit of a token's logits"
    return (
        f"no: {info.dtype} with kernel {products(info)} rounds differently for different numbers "
        "of rows, so near-ties may turn"
    )


def explanation(bound: Bound) -> str:
    """The numbers as a sentence, with what follows from them."""
    times = bound.products_seconds / bound.floor_seconds
    if times < 1.5:
        reason = "Reading the weights is what takes the time"
        remedy = "verifying several drafted tokens in one pass shares that one read"
    else:
        reason = (
            f"The products take {times:.1f}x the time that reading their weights takes, so "
            "arithmetic bounds the speed too"
        )
        remedy = "more threads may help"
    floor = f"{bound.floor_seconds * 1e3:.1f} ms"
    return f"\nPlain decoding cannot go under {floor} a token here. {reason}: {remedy}."


def as_dict(info: ModelInfo, bound: Bound | None) -> dict[str, object]:
    """The same facts for a program."""
    facts: dict[str, object] = {**asdict(info), "halves": info.halves}
    if reading := reads(info):
        facts["reads_weights"] = reading
    if bound is not None:
        facts["bound"] = {**asdict(bound), "floor_seconds": bound.floor_seconds}
    return facts
