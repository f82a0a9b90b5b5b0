"""What `selfspec bench` leaves behind: one JSON with the raw seconds of every turn, and how it is
read again.

A *contestant* is an engine with a method, "selfspec/auto" or "transformers/plain". A *turn* is one
contestant's answer to one unit: a question, or as many of a task as the batch is large. Nothing
derived is stored but comparisons of tokens, which need the model: speeds and intervals are made by
`suite_stats.py`. Knows no timing, no tables and no paths of a machine.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from ..errors import OptionError
from .schema import Provenance, read_result, write_json

SUITE_SCHEMA = 1
KIND = "suite"
PLAIN = "plain"
OURS = "selfspec"


@dataclass(frozen=True)
class Sample:
    """A task as it was asked: a name that says which questions these are, so that two runs can be
    told apart."""

    task: str
    name: str
    """As in "gsm8k-5-1f3a9c02": task, number of questions, digest of their texts."""
    source: str
    """File name or hub name."""
    questions: int
    of: int
    """How many there were to choose from."""
    chat: bool
    """Asked through the model's chat template; otherwise continued as text."""
    skipped: list[str] = field(default_factory=list)
    """Lines that could not be read and were left out with --skip-bad."""


@dataclass(frozen=True)
class Question:
    """One question of a sample."""

    task: str
    id: str
    prompt_tokens: int
    cut: int = 0
    """Tokens of the prompt's beginning that were left out because the context is too short."""


@dataclass(frozen=True)
class Plan:
    """What is measured. An unfinished run is continued by a run with an equal plan, and by no
    other."""

    model: str
    dtype: str
    device: str
    threads: int
    new_tokens: int
    rounds: int
    batches: list[int]
    contestants: list[str]
    reference: str
    """The contestant whose tokens the others' are compared with."""
    samples: list[Sample]
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0


@dataclass
class EngineRow:
    """One peer process: what it takes to get it going, and why it is not there if it is not."""

    name: str
    precision: str | None = None
    """Of its weights and its cache; only like precisions share a table."""
    versions: dict[str, str] = field(default_factory=dict)
    load_seconds: float | None = None
    """From starting the process to its word that the model is loaded; files may have been in the
    system's cache."""
    pipe_seconds: float | None = None
    """What a request that asks for nothing takes: the harness's share of every turn."""
    failure: str | None = None


@dataclass
class ContestantRow:
    """One contestant: its first answer, which nothing else measures, or why it could not go on."""

    name: str
    first_answer_seconds: float | None = None
    """Of the warm-up, which compiles and fills caches: with the engine's load_seconds this is the
    cold start."""
    failure: str | None = None


@dataclass
class Counts:
    """What a peer says about its own work: shown beside the measurements, never used for speed."""

    drafted: int | None = None
    accepted: int | None = None
    verifications: int | None = None
    draft_seconds: float | None = None
    verify_seconds: float | None = None
    host_seconds: float | None = None
    drafted_at: list[int] = field(default_factory=list)
    accepted_at: list[int] = field(default_factory=list)
    verified: list[int] = field(default_factory=list)
    """How many rounds verified 1, 2, ... tokens."""


@dataclass
class Difference:
    """Where a text first parts from the reference's, and by how much the reference's model
    preferred its own token."""

    question: str
    at: int
    gap: float | None = None
    """Logit of the reference's token less that of this one, by our float32 forward; None where
    nothing could say."""
    largest: float | None = None
    """The largest absolute logit there, to judge the gap by in half precision."""
    text: str = ""
    tokens: list[int] = field(default_factory=list)


@dataclass
class Turn:
    """One contestant's answer to one unit, timed from outside. With the first token(s) the prefill
    ends."""

    contestant: str
    task: str
    questions: list[str]
    batch: int
    round: int
    seconds: float
    first_seconds: float | None
    """Until the first tokens were there; from a separate call for 1 token where the peer does not
    stream."""
    first_tokens: int
    """How many came then, over all rows; the others were decoded in seconds - first_seconds."""
    made: list[int]
    """New tokens of each row, an end token included."""
    peak_memory_bytes: int | None = None
    """Of the peer's process during this turn, or of its device where it says so."""
    joules: float | None = None
    differences: list[Difference] = field(default_factory=list)
    counts: Counts | None = None

    @property
    def decoded(self) -> int:
        return sum(self.made) - self.first_tokens

    @property
    def decode_seconds(self) -> float | None:
        return None if self.first_seconds is None else self.seconds - self.first_seconds


@dataclass
class Answer:
    """What the reference wrote to a question."""

    task: str
    question: str
    tokens: list[int]
    text: str


@dataclass
class StepPoint:
    """Seconds of one kind of step behind `context` tokens: a pass over `tokens` tokens, or one
    draft of a method."""

    kind: str
    """"verify", or a method of ours."""
    context: int
    tokens: int
    seconds: list[float] = field(default_factory=list)


@dataclass
class Score:
    """Quality of what a contestant wrote to a task; filled in by the quality measures, empty where
    none were asked for."""

    contestant: str
    task: str
    metric: str
    value: float
    count: int


@dataclass
class SuiteRun:
    """Everything that was measured."""

    provenance: Provenance
    plan: Plan
    questions: list[Question] = field(default_factory=list)
    engines: list[EngineRow] = field(default_factory=list)
    contestants: list[ContestantRow] = field(default_factory=list)
    turns: list[Turn] = field(default_factory=list)
    answers: list[Answer] = field(default_factory=list)
    steps: list[StepPoint] = field(default_factory=list)
    scores: list[Score] = field(default_factory=list)
    energy: str = ""
    """What the joules are of, or why there are none."""
    wall_seconds: float = 0.0
    """Of the measuring part, over all sittings: turns and everything between them."""
    sittings: int = 0
    """1 unless the run was interrupted and continued."""
    complete: bool = False
    kind: str = KIND
    schema_version: int = SUITE_SCHEMA

    def failure(self, contestant: str) -> str | None:
        """Why a contestant has fewer turns than the others, if it failed."""
        engine = contestant.partition("/")[0]
        rows = [row.failure for row in self.contestants if row.name == contestant]
        return next(
            filter(None, [*(row.failure for row in self.engines if row.name == engine), *rows]),
            None,
        )


def save_suite(run: SuiteRun, path: Path) -> None:
    """Write the whole run, or leave what was there."""
    write_json(asdict(run), path)


def load_suite(path: Path) -> SuiteRun:
    """Read a run; a file of another kind or version, or a damaged one, is an error that says so."""
    data = read_result(path, KIND, SUITE_SCHEMA, "selfspec bench MODEL")
    try:
        return _suite(data)
    except (TypeError, KeyError, AttributeError) as error:
        raise OptionError(
            f"{path.name} is damaged: {error!r}. Measure again with: selfspec bench --fresh"
        ) from error


T = TypeVar("T")


def _suite(data: dict[str, Any]) -> SuiteRun:
    plan = dict(data["plan"])
    plan["samples"] = _all(Sample, plan["samples"])
    turns = [_turn(turn) for turn in data["turns"]]
    lists = {
        "questions": Question, "engines": EngineRow, "contestants": ContestantRow, "answers": Answer, "steps": StepPoint,
        "scores": Score,
    }  # fmt: skip
    made: dict[str, Any] = {name: _all(kind, data[name]) for name, kind in lists.items()}
    rest = {"provenance": Provenance(**data["provenance"]), "plan": Plan(**plan), "turns": turns}
    return SuiteRun(**{**data, **made, **rest})


def _turn(data: dict[str, Any]) -> Turn:
    counts = None if data["counts"] is None else Counts(**data["counts"])
    return Turn(**{**data, "differences": _all(Difference, data["differences"]), "counts": counts})


def _all(kind: type[T], rows: list[dict[str, Any]]) -> list[T]:
    return [kind(**row) for row in rows]
