"""What a run of `scripts/bench plain` leaves behind. Knows no timing and no tables."""

from __future__ import annotations

from dataclasses import dataclass, field

from selfspec.bench.schema import Result, Seconds


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
class PlainRun(Result):
    """Everything `scripts/bench plain` measured."""

    kind = "plain"
    measured_by = "scripts/bench plain"

    model: str
    dtype: str
    reference: str  # the peer whose tokens the others are compared with
    rounds: int
    peers: list[PeerRow] = field(default_factory=list)
    cost: CostCard | None = None
    verify: list[VerifyPoint] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
