"""`scripts/bench plain --device cuda`: runs it, and makes its tables from the JSON that it leaves.
Measures nothing itself."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import torch

from benchmarks.command import device_name, made_by, result_path
from benchmarks.plain.gpu import GpuBenchmark, GpuOptions, GpuRun
from benchmarks.ratios import median, milliseconds
from selfspec.bench.html import Table
from selfspec.bench.schema import write
from selfspec.bench.tables import markdown as as_text
from selfspec.bench.tables import number, percent


def measure(options: GpuOptions, out: Path | None, say: Callable[[str], None]) -> Path:
    """Run the benchmark; says where the result is. An interrupted run leaves what it had."""
    options.check()
    device = torch.device(options.device)
    card, memory = device_name(device), psutil.virtual_memory().total
    if device.type == "cuda":
        memory = torch.cuda.mem_get_info(device)[1]
    provenance = made_by("plain", torch.get_num_threads())
    run = GpuRun(provenance, dict(vars(options)), card, int(memory))
    target = out or result_path("gpu", card, f"-{options.shape}")
    partial = target.with_suffix(".partial.json")
    GpuBenchmark(run, options, lambda each: write(each, partial), say).measure()
    write(run, target)
    partial.unlink(missing_ok=True)
    return target


def floor_seconds(run: GpuRun, batch: int, context: int) -> float:
    """What one step must read, at the best speed at which the card was seen to copy."""
    read = run.weight_bytes + batch * (context + 1) * run.kv_bytes
    return float(read / max(run.copy_bandwidth))


def summary(run: GpuRun) -> dict[str, Any]:
    """The figures that a program asks for: shares of the floor, and whether recordings change
    tokens."""
    cells = {f"{each['batch']}x{each['context']}": each for each in run.steps}
    return {
        "card": run.card,
        "recorded": run.recorded,
        "copy_bandwidth": max(run.copy_bandwidth),
        "share_of_floor": {name: _share(run, each, "recorded") for name, each in cells.items()},
        "same_tokens": all(each["same_tokens"] for each in cells.values()),
        "complete": run.complete,
    }


def _share(run: GpuRun, cell: dict[str, Any], name: str) -> float:
    seconds, floor = median(cell[name]), floor_seconds(run, cell["batch"], cell["context"])
    return round(floor / seconds, 4) if seconds else 0.0


def markdown(run: GpuRun) -> str:
    """All tables."""
    options = run.options
    head = (
        f"{run.card}: {options['shape']} with random weights in {options['dtype']}, "
        f"{run.parameters / 1e9:.2f} billion, {run.weight_bytes / 1e9:.2f} GB read a step; copying "
        f"runs at {max(run.copy_bandwidth) / 1e9:.0f} GB/s. Steps are recorded: {run.recorded}"
    )
    return as_text([head, _steps(run), _verify(run), _rounds(run), _peers(run), *run.notes])


def _steps(run: GpuRun) -> Table:
    header = ["batch", "context", "floor, ms", "recorded, ms", "of the floor", "eager, ms"]
    rows = []
    for each in run.steps:
        floor = floor_seconds(run, each["batch"], each["context"])
        row = [str(each["batch"]), str(each["context"]), milliseconds(floor)]
        for way in ("recorded", "eager"):
            row += [milliseconds(median(each[way])), percent(_share(run, each, way))]
        rows.append([*row, "yes" if each["same_tokens"] else "NO"])
    return Table([*header, "of the floor", "same tokens"], rows)


def _verify(run: GpuRun) -> Table | None:
    """verify(n)/decode(1)."""
    cells: dict[tuple[int, int], dict[int, float]] = {}
    for each in run.verify:
        row = cells.setdefault((each["batch"], each["context"]), {})
        row[each["tokens"]] = median(each["seconds"]) or 0.0
    counts = sorted({each["tokens"] for each in run.verify})
    if not counts or counts[0] != 1:
        return None
    rows = [
        [*map(str, cell), *(f"{row[count] / row[1]:.2f}" for count in counts if count in row)]
        for cell, row in cells.items()
    ]
    return Table(["batch", "context", *(f"verify({count})" for count in counts)], rows)


def _rounds(run: GpuRun) -> Table:
    rows = []
    for each in run.rounds:
        seconds = median(each["seconds"]) or 0.0
        times = [seconds / max(1, each[name]) for name in ("tokens", "rounds")]
        made = number(each["tokens_per_verification"], 2)
        rows.append([str(each["batch"]), each["way"], *map(milliseconds, times), made])
    header = ["batch", "drafts", "ms a token", "ms a round", "tokens a verification"]
    return Table(header, rows)


def _peers(run: GpuRun) -> Table:
    rows = [
        [each["peer"], milliseconds(median(each.get("seconds", []))), each.get("failure", "")]
        for each in run.peers
    ]
    return Table(["peer, batch 1", "ms a token", "failure"], rows)
