"""What a measurement leaves behind: one JSON with the raw seconds of every turn, how it is written,
and how it is read again.

Every kind of result is a dataclass with the fields of its file. Those of `selfspec bench` stand
here, the others beside what measures them. Raw seconds are stored, never medians: a table made
later may ask another question. Nothing derived is stored but comparisons of tokens, which need the
model. Knows no machine paths (a model has a name), no timing and no tables.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, ClassVar, TypeVar

from ..core.files import write_whole
from ..core.json_text import from_json
from ..core.schema import Unfit, made
from ..errors import OptionError

PLAIN = "plain"
OURS = "selfspec"
Seconds = list[float | None]  # one per round; None where the peer had failed


def engine_of(contestant: str) -> str:
    """A contestant is an engine with a method: "selfspec/auto", "transformers/plain"."""
    return contestant.partition("/")[0]


def method_of(contestant: str) -> str:
    return contestant.partition("/")[2]


@dataclass(frozen=True)
class Provenance:
    """How and where a run was made."""

    command: str
    date: str
    commit: str | None
    uncommitted_changes: bool | None
    cpu: str
    cores: int
    threads: int
    memory_bytes: int
    system: str
    python: str
    versions: dict[str, str]
    environment: dict[str, str]


@dataclass
class Result:
    """What every result has. Its file also says the kind and the version of its fields."""

    kind: ClassVar[str]
    version: ClassVar[int] = 1
    measured_by: ClassVar[str]
    """The command, for messages."""

    provenance: Provenance
    complete: bool = field(default=False, kw_only=True)
    """Whether it was measured to the end; otherwise it is what there was when it was
    interrupted."""

    def as_dict(self) -> dict[str, Any]:
        """The content of its file."""
        return {"kind": self.kind, "schema_version": self.version, **asdict(self)}


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
    weights: str = "auto"
    """How engines that can be told store weights, where that is no dtype."""


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
class SuiteRun(Result):
    """Everything that `selfspec bench` measured."""

    kind = "suite"
    measured_by = "selfspec bench MODEL"

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

    def failure(self, contestant: str) -> str | None:
        """Why a contestant has fewer turns than the others, if it failed."""
        of_engines = {row.name: row.failure for row in self.engines}
        own = {row.name: row.failure for row in self.contestants}
        return of_engines.get(engine_of(contestant)) or own.get(contestant)


def write(run: Result, path: Path) -> None:
    """Write the whole result."""
    write_json(run.as_dict(), path)


def write_json(data: Mapping[str, Any], path: Path) -> None:
    """Write it all, or leave what was there: a full disk or a kill never leaves half a file."""
    text = json.dumps(data, indent=1, allow_nan=False) + "\n"
    write_whole(path, text)


R = TypeVar("R", bound=Result)


def read(kind: type[R], path: Path) -> R:
    """Read a result of one kind; another kind or version, or a damaged file, is an error."""
    data = parsed(path, kind.measured_by)
    wanted, actual = (kind.kind, kind.version), None
    if isinstance(data, dict):
        actual = (data.pop("kind", None), data.pop("schema_version", 1))
    if actual != wanted:
        raise OptionError(
            f"{path.name} holds {actual}, and this selfspec reads {wanted}: its fields would be "
            f"misread. Measure again with: {kind.measured_by}, or read it with the selfspec that "
            "wrote it."
        )
    try:
        run: R = made(kind, data)
    except Unfit as error:
        raise OptionError(
            f"{path.name} is damaged: {error}. Measure again with: {kind.measured_by}"
        ) from error
    return run


def continued(fresh: R, path: Path, plan: Callable[[R], Mapping[str, Any]]) -> R:
    """What an earlier sitting at the same run left in `path`, or `fresh`. Another run is never
    written over; `plan` says what makes a run the same."""
    if not path.exists():
        return fresh
    run = read(type(fresh), path)
    mine, theirs = plan(fresh), plan(run)
    other = [name for name, value in mine.items() if value != theirs[name]]
    if other:
        raise OptionError(
            f"{path.name} holds another run (it differs in {', '.join(other)}), which would be "
            "lost; write elsewhere with --out, or measure over it with --fresh"
        )
    now, then = fresh.provenance, run.provenance
    versions = {name: then.versions.get(name) for name in now.versions}
    before = (then.cpu, then.threads, then.commit, versions)
    if not run.complete and before != (now.cpu, now.threads, now.commit, now.versions):
        raise OptionError(
            f"{path.name} was begun on another machine, at another commit or with other versions "
            f"{before}, so going on would mix two things in one table; measure it anew with --fresh"
        )
    return run


def parsed(path: Path, command: str) -> Any:
    """What a JSON file holds; an error about a missing or damaged one names `command`."""
    try:
        if path.exists() and not path.is_file():
            raise ValueError("it is no file")
        return from_json(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise OptionError(
            f"There is no result file {path.name!r}. Make one with: {command}"
        ) from error
    except (ValueError, OSError) as error:  # also a wrong encoding, or a folder
        raise OptionError(
            f"{path.name} is not a result: {error}. Measure again with: {command}"
        ) from error
