"""`scripts/bench plain --device cuda`: runs it, and makes its tables from the JSON that it leaves.
Measures nothing itself."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import torch

from .gpu import GpuBenchmark, GpuOptions, GpuRun, as_dict
from .provenance import CHECKOUT, device_name, gather, package_versions, slug
from .report import milliseconds, table
from .schema import write_json
from .timing import median


def measure(options: GpuOptions, out: Path | None, say: Callable[[str], None]) -> Path:
    """Run the benchmark; says where the result is. An interrupted run leaves what it had."""
    options.check()
    device = torch.device(options.device)
    card = device_name(device)
    memory = (
        torch.cuda.mem_get_info(device)[1]
        if device.type == "cuda"
        else psutil.virtual_memory().total
    )
    command = shlex.join(["scripts/bench", "plain", *sys.argv[1:]])
    provenance = gather(
        command, torch.get_num_threads(), package_versions(["torch", "transformers", "selfspec"])
    )
    run = GpuRun(provenance, dict(vars(options)), card, int(memory))
    target = out or CHECKOUT / "benchmarks" / "results" / f"gpu-{slug(card)}-{options.shape}.json"
    partial = target.with_suffix(".partial.json")
    GpuBenchmark(run, options, lambda each: write_json(as_dict(each), partial), say).measure()
    write_json(as_dict(run), target)
    partial.unlink(missing_ok=True)
    return target


def floor_seconds(run: dict[str, Any], batch: int, context: int) -> float:
    """What one step must read, at the best speed at which the card was seen to copy."""
    read = run["weight_bytes"] + batch * (context + 1) * run["kv_bytes"]
    return float(read / max(run["copy_bandwidth"]))


def summary(run: dict[str, Any]) -> dict[str, Any]:
    """The figures that a program asks for: shares of the floor, and whether recordings change
    tokens."""
    cells = {f"{each['batch']}x{each['context']}": each for each in run["steps"]}
    shares = {name: _share(run, each, "recorded") for name, each in cells.items()}
    return {
        "card": run["card"],
        "recorded": run["recorded"],
        "copy_bandwidth": max(run["copy_bandwidth"]),
        "share_of_floor": shares,
        "same_tokens": all(each["same_tokens"] for each in cells.values()),
        "complete": run["complete"],
    }


def _share(run: dict[str, Any], cell: dict[str, Any], name: str) -> float:
    seconds = median(cell[name])
    return (
        round(floor_seconds(run, cell["batch"], cell["context"]) / seconds, 4) if seconds else 0.0
    )


def markdown(run: dict[str, Any]) -> str:
    """All tables."""
    options = run["options"]
    head = (
        f"{run['card']}: {options['shape']} with random weights in {options['dtype']}, "
        f"{run['parameters'] / 1e9:.2f} billion, "
        f"{run['weight_bytes'] / 1e9:.2f} GB read a step; copying runs at "
        f"{max(run['copy_bandwidth']) / 1e9:.0f} GB/s. "
        f"Steps are recorded: {run['recorded']}"
    )
    parts = [head, _steps(run), _verify(run), _rounds(run), _peers(run), *run["notes"]]
    return "\n\n".join(part for part in parts if part)


def _steps(run: dict[str, Any]) -> str:
    header = [
        "batch",
        "context",
        "floor, ms",
        "recorded, ms",
        "of the floor",
        "eager, ms",
        "of the floor",
        "same tokens",
    ]
    rows = [
        [
            str(each["batch"]),
            str(each["context"]),
            milliseconds(floor_seconds(run, each["batch"], each["context"])),
            milliseconds(median(each["recorded"])),
            f"{_share(run, each, 'recorded'):.0%}",
            milliseconds(median(each["eager"])),
            f"{_share(run, each, 'eager'):.0%}",
            "yes" if each["same_tokens"] else "NO",
        ]
        for each in run["steps"]
    ]
    return table(header, rows) if rows else ""


def _verify(run: dict[str, Any]) -> str:
    """verify(n)/decode(1)."""
    cells: dict[tuple[int, int], dict[int, float]] = {}
    for each in run["verify"]:
        cells.setdefault((each["batch"], each["context"]), {})[each["tokens"]] = (
            median(each["seconds"]) or 0.0
        )
    counts = sorted({each["tokens"] for each in run["verify"]})
    if not counts or counts[0] != 1:
        return ""
    rows = [
        [
            str(batch),
            str(context),
            *(f"{found[count] / found[1]:.2f}" for count in counts if count in found),
        ]
        for (batch, context), found in cells.items()
    ]
    return table(["batch", "context", *(f"verify({count})" for count in counts)], rows)


def _rounds(run: dict[str, Any]) -> str:
    rows = []
    for each in run["rounds"]:
        seconds = median(each["seconds"]) or 0.0
        per_token, per_round = seconds / max(1, each["tokens"]), seconds / max(1, each["rounds"])
        rows.append(
            [str(each["batch"]), each["way"], milliseconds(per_token), milliseconds(per_round),
             f"{each['tokens_per_verification']:.2f}"]
        )  # fmt: skip
    return (
        table(["batch", "drafts", "ms a token", "ms a round", "tokens a verification"], rows)
        if rows
        else ""
    )


def _peers(run: dict[str, Any]) -> str:
    rows = [
        [each["peer"], milliseconds(median(each.get("seconds", []))), each.get("failure", "")]
        for each in run["peers"]
    ]
    return table(["peer, batch 1", "ms a token", "failure"], rows) if rows else ""
