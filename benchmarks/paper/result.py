"""What a paper's table measured: our figures by row and column. Knows no figures of the paper."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from benchmarks.paper.table import PaperRow
from selfspec.bench.schema import Result


@dataclass(frozen=True)
class CopyTurn:
    """One question answered by or with a copy of the model."""

    question: str
    drafted: int
    accepted: int
    verifications: int
    decoded: int
    """Tokens after the first."""
    seconds: float | None
    """Of those; None where no times were taken."""


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
    turns: dict[str, list[CopyTurn]] = field(default_factory=dict)
    """Of a table of copies: what was counted, by row."""
    samples: list[str] = field(default_factory=list)
    """Which questions those were, by names that tell them apart."""
    halves: dict[str, list[int]] = field(default_factory=dict)
    """Of a table of trained drafts: the layers whose attention and whose MLP are left out."""
    draft: str = ""
    """What drafted there instead of the table's drafter."""
    timed: bool = True

    def plan(self) -> dict[str, Any]:
        """What makes another run of a table of copies the same."""
        names = ("table", "model", "layers", "new_tokens", "samples", "draft", "timed")
        return {name: getattr(self, name) for name in names}


def key_of(row: PaperRow) -> str:
    """A row's name in the result."""
    return f"{row.task}: {row.name}"
