"""What a paper's table measured: our figures by row and column. Knows no figures of the paper."""

from __future__ import annotations

from dataclasses import dataclass, field

from benchmarks.paper.table import PaperRow
from selfspec.bench.schema import Result


@dataclass
class PaperResult(Result):
    """Our figures for a table."""

    kind = "paper"
    measured_by = "scripts/bench paper TABLE"

    table: str
    model: str
    layers: int
    new_tokens: int
    values: dict[str, dict[str, float]] = field(default_factory=dict)
    runs: list[str] = field(default_factory=list)
    """Files with the raw seconds."""


def key_of(row: PaperRow) -> str:
    """A row's name in the result."""
    return f"{row.task}: {row.name}"
