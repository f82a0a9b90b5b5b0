"""Tables of a `scripts/bench reuse` result, from its JSON and nothing else. Cells that fall short
stay in."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

from .report import milliseconds, table
from .schema import read_result
from .timing import Ratio

REUSE_SCHEMA = 1
AIM = 0.9  # of the allowed saving
TOO_LITTLE = (
    0.01  # of a round: a smaller saving cannot be told from noise, nor would anybody notice it
)
Pairs = Sequence[tuple[float, float]]


def load_reuse(path: Path) -> dict[str, Any]:
    """Read a result; another file is an error that says so."""
    return read_result(path, "reuse", REUSE_SCHEMA, "scripts/bench reuse")


def share(pairs: Pairs, draws: int = 1000) -> Ratio:
    """Median saved over median allowed, with a 95% interval by resampling rounds whole.

    Not the median of the quotients: where little can be saved a single round's allowance is noise
    around 0.
    """

    def of(sample: Pairs) -> float:
        allowed = median(b for _, b in sample)
        return median(a for a, _ in sample) / allowed if allowed else 0.0

    chance = random.Random(len(pairs))
    values = sorted(of(chance.choices(pairs, k=len(pairs))) for _ in range(draws))
    return Ratio(of(pairs), values[int(0.025 * draws)], values[int(0.975 * draws) - 1])


def saved(cell: dict[str, Any]) -> list[float]:
    """Seconds that reuse saved, round by round."""
    return [
        without - own
        for own, without in zip(cell["with_reuse"], cell["without_reuse"], strict=True)
    ]


def allowed(cell: dict[str, Any], share_of_layers: float) -> list[float]:
    """(E/L) * (v - 1) steps, round by round."""
    return [
        share_of_layers * (many - one)
        for many, one in zip(cell["verify"], cell["decode"], strict=True)
    ]


def exact(cell: dict[str, Any]) -> list[float]:
    """What the first E layers cost on K + 1 tokens a row more than on 1, round by round."""
    return [many - one for many, one in zip(cell["early_block"], cell["early_one"], strict=True)]


def rows(run: dict[str, Any]) -> list[dict[str, Any]]:
    """What each cell says."""
    part = run["exit_layer"] / run["layers"]
    found = []
    for cell in run["cells"]:
        gain = saved(cell)
        ways: dict[str, list[float]] = {"formula": allowed(cell, part), "exact": exact(cell)}
        found.append(
            {
                "batch": cell["batch"],
                "tokens": cell["tokens"],
                "rounds": len(gain),
                "v": median(cell["verify"]) / median(cell["decode"]),
                "round": median(cell["without_reuse"]),
                "saved": median(gain),
                **{name: median(seconds) for name, seconds in ways.items()},
                **{
                    f"{name}_share": share(list(zip(gain, seconds, strict=True)))
                    for name, seconds in ways.items()
                },
                "acceptance": cell["accepted"] / max(1, cell["drafted"]),
                "identical": cell["identical"],
            }
        )
    return found


def verdict(reached: Ratio, possible: float) -> str:
    """Whether a share is as high as was aimed at, as far as its interval can say. `possible`: 100%,
    in rounds."""
    if possible < TOO_LITTLE:
        return "too little to tell"
    if reached.low >= AIM:
        return "reached"
    return "missed" if reached.high < AIM else "within noise"


def _percent(reached: Ratio) -> str:
    return f"{reached.value:.0%} ({reached.low:.0%} to {reached.high:.0%})"


def markdown(run: dict[str, Any]) -> str:
    """The table: milliseconds a round, and the shares."""
    header = [
        "batch",
        "K",
        "v",
        "pass without, ms",
        "saved, ms",
        "(E/L)(v-1), ms",
        "share",
        "exact, ms",
        "share of exact",
    ]
    header += [f"{AIM:.0%} of exact", "accepted/drafted", "rounds", "same tokens"]
    lines = []
    for row in rows(run):
        cells: list[str] = [
            str(row["batch"]),
            str(row["tokens"]),
            f"{row['v']:.2f}",
            milliseconds(row["round"]),
        ]
        cells += [
            _fine(row["saved"]),
            _fine(row["formula"]),
            _percent(row["formula_share"]),
            _fine(row["exact"]),
        ]
        cells += [
            _percent(row["exact_share"]),
            verdict(row["exact_share"], row["exact"] / row["round"]),
            f"{row['acceptance']:.0%}",
            str(row["rounds"]),
        ]
        lines.append([*cells, "yes" if row["identical"] else "NO"])
    where = run["provenance"]
    note = (
        f"\nExit-state reuse, exit at {run['exit_layer']} of {run['layers']} layers of "
        f"{run['model']} with its later layers at "
        f"{run['factor']:g} of their size ({run['dtype']}, {run['kernel']} kernels, "
        f"{where['threads']} threads, {where['cpu']}). "
        "v = verify(K + 1)/decode(1). Medians over rounds that both variants took in turns with "
        "the passes; 95% intervals."
        + ("" if run["complete"] else " **Interrupted**: this is what had been measured.")
    )
    return table(header, lines) + note if lines else "nothing was measured"


def _fine(seconds: float) -> str:
    return f"{seconds * 1e3:.2f}"


def summary(run: dict[str, Any]) -> dict[str, Any]:
    """The figures for machines: the last line of a run."""
    made = rows(run)
    return {
        "kind": run["kind"],
        "complete": run["complete"],
        "share_of_exact": {
            f"{row['batch']}x{row['tokens']}": round(row["exact_share"].value, 3) for row in made
        },
        "share_of_formula": {
            f"{row['batch']}x{row['tokens']}": round(row["formula_share"].value, 3) for row in made
        },
        "identical": all(row["identical"] for row in made),
    }
