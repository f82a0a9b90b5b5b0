"""A table of a paper as a specification: what to ask, with which methods and settings, and the
paper's own figures.

`layerskip.py`, `draft_verify.py` and `asd.py` hold the tables, `run.py` measures, `report.py` sets
the paper's columns beside ours. Figures are the papers' own, taken from
their text; where a table's body was not to be had, only what the text around it says stands here,
and `missing` says so. Measures nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from selfspec.errors import OptionError, nearest

OWN = "jsonl"  # the task of a row that asks questions of the user's
PLAIN = "plain"
LOSSY = "lossy"  # early exit without verification
SPEED = "speed"  # measured by the harness
EXITS = "exits"  # perplexity and accuracy by exit
COSINES = "cosines"  # similarities and times of halves
COPIES = "copies"  # drafts by and for copies of the model with other matrices
LEAVING = "leaving"  # tokens leave the layers early, and nobody verifies them
TRAINED = "trained"  # drafts without most halves, trained on the model's own text
SUMMARIES = "summarization"  # Spec-Bench's part of that name
ELSEWHERE = {
    "layerskip-table3": ("LayerSkip: After pre-training from scratch", "scripts/bench recipe"),
    "dv-table8": ("Draft & Verify: How long the search takes", "scripts/bench skipsets"),
    "dv-figure4": ("Draft & Verify: How many halves are skipped", "scripts/bench skipsets"),
    "dv-figure6": ("Draft & Verify: The halves that were found", "selfspec tune MODEL --png FILE"),
    "specee-figure5": ("SpecEE: How probabilities shift", "scripts/bench exit_figures"),
    "specee-figure6": ("SpecEE: What each feature is worth", "scripts/bench exit_figures"),
    "specee-figure7": ("SpecEE: The average exit beside the best", "scripts/bench exit_figures"),
    "specee-figure8": ("SpecEE: Width and depth of predictors", "scripts/bench exit_figures"),
    "specee-figure10": ("SpecEE: Where exits are frequent", "scripts/bench exit_figures"),
    "specee-figure11": ("SpecEE: Exits near those before", "scripts/bench exit_figures"),
    "specee-figure18": ("SpecEE: How many samples to fit", "scripts/bench exit_figures"),
    "specee-figure19": ("SpecEE: What each part brings", "scripts/bench exits"),
}
"""Tables and figures that other programs make: what they show, and the command."""
TIMED = ("tokens/s", "ms/token", "speedup", "draft share", "verify share")
MEASURES = ("tokens/s", "ms/token", "speedup", "accepted", "draft share", "verify share")


@dataclass(frozen=True)
class PaperRow:
    """One row. `method` is ours: `plain`, `lossy`, or drafter@controller, in which {draft} stands
    for the table's drafter."""

    task: str
    name: str
    method: str | None
    """None where we have no such method; then `why` says so."""
    figures: Mapping[str, str] = field(default_factory=dict)
    """The paper's, by column."""
    exit: float | None = None
    """The exit layer as a share of the model's layers, so that a model of another depth exits at a
    like place."""
    why: str = ""
    tokens: int = 0
    """In a table of memory: after how many tokens."""
    copy: str = ""
    """In a table of copies: which one runs, or drafts where the method begins with "copy". In one
    of trained drafts: how it is trained (lora, whole) and on how many tokens."""


@dataclass(frozen=True)
class PaperTable:
    """One table. `measures` are our columns: those of MEASURES, or a measure of quality by its
    name."""

    name: str
    paper: str
    title: str
    rows: tuple[PaperRow, ...]
    measures: tuple[str, ...]
    kind: str = SPEED
    draft: str = ""
    """The drafter of the rows with {draft}, in which {exit} stands for the row's exit layer.
    --methods replaces it."""
    new_tokens: int = 512
    temperature: float = 0.0
    top_p: float = 1.0
    samples: int = 1
    """Sampled answers a question for pass@k, drawn beside the timed run."""
    missing: str = ""
    """What of the table is not in the text that its figures were taken from."""
    apart: tuple[str, ...] = ()
    """What cannot be compared."""

    @property
    def tasks(self) -> list[str]:
        """What its rows ask, each once."""
        return list(dict.fromkeys(row.task for row in self.rows))

    @property
    def columns(self) -> list[str]:
        """The paper's columns, in the order of the rows that have most of them."""
        fullest = sorted(self.rows, key=lambda row: -len(row.figures))
        return list(dict.fromkeys(column for row in fullest for column in row.figures))

    def method_of(self, row: PaperRow, layers: int, draft: str | None = None) -> str | None:
        """Our method for a model of that depth; `draft` replaces the table's own drafter."""
        if row.method is None:
            return None
        method = row.method.replace("{draft}", draft or self.draft)
        return (
            method.replace("{exit}", str(exit_of(row, layers))) if row.exit is not None else method
        )


def exit_of(row: PaperRow, layers: int) -> int:
    """The exit layer of a model of that depth at the row's share."""
    assert row.exit is not None, "only rows with an exit are asked for it"
    return min(layers - 1, max(1, round(row.exit * layers)))


def tables() -> dict[str, PaperTable]:
    """All of them by name."""
    from benchmarks.paper.asd import ASD
    from benchmarks.paper.draft_verify import DRAFT_VERIFY
    from benchmarks.paper.layerskip import LAYERSKIP
    from benchmarks.paper.specee import TABLES

    return {table.name: table for table in (*LAYERSKIP, *DRAFT_VERIFY, *ASD, *TABLES)}


def find_table(name: str) -> PaperTable:
    """The table of that name."""
    known = tables()
    if name in ELSEWHERE:
        raise OptionError(f"{name} is not made here but by: {ELSEWHERE[name][1]}")
    if name not in known:
        raise OptionError(f"there is no paper table {name!r}; {nearest(name, known)}")
    return known[name]
