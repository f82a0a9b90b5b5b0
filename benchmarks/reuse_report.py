"""Tables of a `scripts/bench reuse` result, from its JSON and nothing else. Cells that fall short
stay in."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from benchmarks.ratios import milliseconds, resampled
from selfspec.bench.html import Table
from selfspec.bench.schema import Result
from selfspec.bench.tables import markdown as as_text
from selfspec.bench.tables import number, percent
from selfspec.bench.timing import Ratio

AIM = 0.9  # of the allowed saving
TOO_LITTLE = 0.01  # of a round: a smaller saving cannot be told from noise, nor would one notice it
Pairs = Sequence[tuple[float, float]]


@dataclass
class Cell:
    """One batch size and draft length: seconds of each round, all six lists in step."""

    batch: int
    tokens: int
    with_reuse: list[float] = field(default_factory=list)
    """Of verifying, in whole rounds: drafting is the same in both."""
    without_reuse: list[float] = field(default_factory=list)
    verify: list[float] = field(default_factory=list)
    """All layers and the head on tokens + 1 a row."""
    decode: list[float] = field(default_factory=list)
    """The same on 1 a row."""
    early_block: list[float] = field(default_factory=list)
    """Layers 0 to E - 1 on tokens + 1 a row."""
    early_one: list[float] = field(default_factory=list)
    """The same on 1 a row."""
    drafted: int = 0
    accepted: int = 0
    identical: bool = True


@dataclass
class ReuseRun(Result):
    """Everything that was measured."""

    kind = "reuse"
    measured_by = "scripts/bench reuse"

    model: str
    factor: float
    kernel: str
    dtype: str
    layers: int
    exit_layer: int
    cells: list[Cell] = field(default_factory=list)


def share(pairs: Pairs, draws: int = 1000) -> Ratio:
    """Median saved over median allowed, with a 95% interval by resampling rounds whole.

    Not the median of the quotients: where little can be saved a single round's allowance is noise
    around 0.
    """

    def of(sample: Pairs) -> float:
        allowed = median(b for _, b in sample)
        return median(a for a, _ in sample) / allowed if allowed else 0.0

    return resampled(pairs, of, draws)


def saved(cell: Cell) -> list[float]:
    """Seconds that reuse saved, round by round."""
    return [b - a for a, b in zip(cell.with_reuse, cell.without_reuse, strict=True)]


def allowed(cell: Cell, share_of_layers: float) -> list[float]:
    """(E/L) * (v - 1) steps, round by round."""
    pairs = zip(cell.verify, cell.decode, strict=True)
    return [share_of_layers * (many - one) for many, one in pairs]


def exact(cell: Cell) -> list[float]:
    """What the first E layers cost on K + 1 tokens a row more than on 1, round by round."""
    return [many - one for many, one in zip(cell.early_block, cell.early_one, strict=True)]


@dataclass(frozen=True)
class Row:
    """What a cell says; seconds are medians of its rounds."""

    cell: Cell
    saved: float
    formula: float
    exact: float
    formula_share: Ratio
    exact_share: Ratio

    @property
    def name(self) -> str:
        return f"{self.cell.batch}x{self.cell.tokens}"

    @property
    def acceptance(self) -> float:
        return self.cell.accepted / max(1, self.cell.drafted)

    @property
    def v(self) -> float:
        return median(self.cell.verify) / median(self.cell.decode)

    @property
    def round(self) -> float:
        return median(self.cell.without_reuse)


def rows(run: ReuseRun) -> list[Row]:
    """What each cell says."""
    found = []
    for cell in run.cells:
        gain = saved(cell)
        formula, counted = allowed(cell, run.exit_layer / run.layers), exact(cell)
        shares = [share(list(zip(gain, way, strict=True))) for way in (formula, counted)]
        found.append(Row(cell, median(gain), median(formula), median(counted), *shares))
    return found


def verdict(reached: Ratio, possible: float) -> str:
    """Whether a share is as high as was aimed at, as far as its interval can say. `possible`: 100%,
    in rounds."""
    if possible < TOO_LITTLE:
        return "too little to tell"
    if reached.low >= AIM:
        return "reached"
    return "missed" if reached.high < AIM else "within noise"


def _between(reached: Ratio) -> str:
    return f"{reached.value:.0%} ({reached.low:.0%} to {reached.high:.0%})"


def markdown(run: ReuseRun) -> str:
    """The table: milliseconds a round, and the shares."""
    header = ["batch", "K", "v", "pass without, ms", "saved, ms", "(E/L)(v-1), ms", "share"]
    header += ["exact, ms", "share of exact", f"{AIM:.0%} of exact", "accepted/drafted", "rounds"]
    lines = []
    for row in rows(run):
        cell = row.cell
        line = [str(cell.batch), str(cell.tokens), number(row.v, 2), milliseconds(row.round)]
        line += [milliseconds(row.saved, 2), milliseconds(row.formula, 2)]
        line += [_between(row.formula_share), milliseconds(row.exact, 2), _between(row.exact_share)]
        line += [verdict(row.exact_share, row.exact / row.round)]
        line += [percent(row.acceptance), str(len(cell.verify))]
        lines.append([*line, "yes" if cell.identical else "NO"])
    where = run.provenance
    note = (
        f"Exit-state reuse, exit at {run.exit_layer} of {run.layers} layers of {run.model} with "
        "its "
        f"later layers at {run.factor:g} of their size ({run.dtype}, {run.kernel} kernels, "
        f"{where.threads} threads, {where.cpu}). v = verify(K + 1)/decode(1). Medians over rounds "
        "that both variants took in turns with the passes; 95% intervals."
        + ("" if run.complete else " **Interrupted**: this is what had been measured.")
    )
    table = Table([*header, "same tokens"], lines)
    return as_text([table, note]) if lines else "nothing was measured"


def summary(run: ReuseRun) -> dict[str, Any]:
    """The figures for machines: the last line of a run."""
    made = rows(run)
    return {
        "kind": run.kind,
        "complete": run.complete,
        "share_of_exact": {row.name: round(row.exact_share.value, 3) for row in made},
        "share_of_formula": {row.name: round(row.formula_share.value, 3) for row in made},
        "identical": all(row.cell.identical for row in made),
    }
