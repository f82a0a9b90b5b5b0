"""What a run of the benchmark leaves behind: one JSON with everything that a table needs, and how
it is written and read.

Raw seconds are stored, never medians: a table made later may ask another question. Knows no machine
paths (a model has a name), no timing and no layout of tables.
"""

from __future__ import annotations

import dataclasses
import errno
import json
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from ..errors import OptionError, ResourceError

SCHEMA_VERSION = 1
Seconds = list[float | None]  # one per round; None where the peer had failed


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
class PeerRow:
    """One peer at one prompt length. `first` are the seconds of a generation of 1 token, `full`
    those of `new_tokens`."""

    peer: str
    prompt_tokens: int
    new_tokens: int
    first: Seconds = field(default_factory=list)
    full: Seconds = field(default_factory=list)
    identical: bool | None = None  # None: there was nothing to compare with
    first_difference: int | None = None
    failure: str | None = None


@dataclass
class CostCard:
    """What the hardware allows: the weights a token must read, how fast memory gives them, and the
    matrix products alone."""

    weight_bytes: int
    bandwidth: dict[str, list[float]]  # bytes a second, by way of reading, one per repetition
    products: list[float]  # seconds of every matrix product of one pass at one row
    step: list[float]  # seconds of one whole pass of one token, in the same rounds
    context: int


@dataclass
class VerifyPoint:
    """Passes over `tokens` new tokens behind `context` cached ones."""

    context: int
    tokens: int
    seconds: Seconds


@dataclass
class PlainRun:
    """Everything `scripts/bench plain` measured."""

    provenance: Provenance
    model: str
    dtype: str
    reference: str  # the peer whose tokens the others are compared with
    rounds: int
    peers: list[PeerRow] = field(default_factory=list)
    cost: CostCard | None = None
    verify: list[VerifyPoint] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    complete: bool = False
    kind: str = "plain"
    schema_version: int = SCHEMA_VERSION


def save(run: PlainRun, path: Path) -> None:
    """Write the whole run."""
    write_json(dataclasses.asdict(run), path)


def write_json(result: dict[str, Any], path: Path) -> None:
    """Write a result, or leave what was there untouched: a full disk or a kill never leaves half a
    file."""
    text = json.dumps(result, indent=1, allow_nan=False) + "\n"
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        with partial.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        raise ResourceError(
            f"No disk space for the {len(text)} bytes of {path.name}; the file from before this "
            f"write is intact. "
            "Free some space, or write elsewhere with --out."
        ) from error
    finally:
        partial.unlink(missing_ok=True)


def parsed(path: Path, command: str, what: str = "a benchmark result") -> Any:
    """What a JSON file holds; a missing or damaged one is an error that names the command that
    measures it."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise OptionError(
            f"There is no result file {path.name!r}. Make one with: {command}"
        ) from error
    except ValueError as error:  # also a wrong encoding
        raise OptionError(
            f"{path.name} is not {what}: {error}. Measure again with: {command}"
        ) from error


def read_result(
    path: Path, kind: str, version: int, command: str, what: str = "a benchmark result"
) -> dict[str, Any]:
    """Read a result of one kind and version; anything else is an error that says so."""
    data = parsed(path, command, what)
    found = (data.get("kind"), data.get("schema_version")) if isinstance(data, dict) else None
    if found != (kind, version):
        raise OptionError(
            f"{path.name} holds {found}, and this selfspec reads {(kind, version)}: its fields "
            f"would be misread. "
            f"Measure again with: {command}, or read it with the selfspec that wrote it."
        )
    return dict(data)


def read_json(path: Path) -> dict[str, Any]:
    """Read a result of `scripts/bench plain`, of either kind; another version is an error that says
    so."""
    data = parsed(path, "scripts/bench plain")
    version = data.get("schema_version") if isinstance(data, dict) else None
    if version != SCHEMA_VERSION:
        raise OptionError(
            f"{path.name} has schema_version {version!r} and this selfspec reads "
            f"{SCHEMA_VERSION}: its fields would be misread. "
            "Measure again with: scripts/bench plain, or read it with the selfspec that wrote it."
        )
    assert isinstance(data, dict)
    return data


def load(path: Path) -> PlainRun:
    """Read a run; a file of another kind is an error that says so too."""
    data = read_json(path)
    if data.get("kind") != "plain":
        raise OptionError(
            f"{path.name} is a result of kind {data.get('kind')!r}, not 'plain'. Give a file that "
            f"scripts/bench plain wrote."
        )
    return _plain_run(data, path.name)


T = TypeVar("T")


def _build(cls: type[T], data: Any, name: str) -> T:
    try:
        return cls(**data)
    except TypeError as error:
        raise OptionError(
            f"{name} is damaged: {error}. Measure again with: scripts/bench plain"
        ) from error


def _plain_run(data: dict[str, Any], name: str) -> PlainRun:
    fields = dict(data)
    fields["provenance"] = _build(Provenance, fields.get("provenance"), name)
    fields["peers"] = [_build(PeerRow, row, name) for row in fields.get("peers", [])]
    fields["verify"] = [_build(VerifyPoint, point, name) for point in fields.get("verify", [])]
    if fields.get("cost") is not None:
        fields["cost"] = _build(CostCard, fields["cost"], name)
    return _build(PlainRun, fields, name)
