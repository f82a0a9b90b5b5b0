"""What a run of `scripts/bench plain` leaves behind. Knows no timing and no tables."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from selfspec.bench.schema import Result, Seconds


@dataclass
class PeerRow:
    """One contestant at one prompt length. `first` are the seconds of a generation of 1 token,
    `full` those of `new_tokens`."""

    peer: str
    """As it was asked for: a peer, or a peer with a kind of weights ("ctranslate2:int8")."""
    prompt_tokens: int
    new_tokens: int
    first: Seconds = field(default_factory=list)
    full: Seconds = field(default_factory=list)
    identical: bool | None = None  # None: there was nothing to compare with
    first_difference: int | None = None
    failure: str | None = None
    precision: str = ""
    """What the peer says of how its weights and cache are stored."""


@dataclass
class CostCard:
    """What the hardware allows: the weights a token must read, how fast memory gives them, and the
    matrix products alone."""

    weight_bytes: int
    bandwidth: dict[str, list[float]]  # bytes a second, by way of reading, one per repetition
    products: list[float]  # seconds of every matrix product of one pass at one row
    step: list[float]  # seconds of one whole pass of one token, in the same rounds
    context: int
    in_turns: bool = False
    """Whether memory was read in the same rounds."""


@dataclass
class VerifyPoint:
    """Passes over `tokens` new tokens behind `context` cached ones."""

    context: int
    tokens: int
    seconds: Seconds


@dataclass
class Reading:
    """What one contestant made of the text: the summed loss of its tokens, and at how many places
    its likeliest token is the reference's."""

    peer: str
    tokens: int = 0
    loss: float = 0.0
    same: int = 0
    failure: str | None = None


@dataclass
class PlainRun(Result):
    """Everything `scripts/bench plain` measured."""

    kind = "plain"
    version = 2
    measured_by = "scripts/bench plain"

    model: str
    dtype: str
    reference: str  # the contestant with whose speed and tokens the others are compared
    rounds: int
    peers: list[PeerRow] = field(default_factory=list)
    costs: dict[str, CostCard] = field(default_factory=dict)
    """Of every contestant of ours."""
    verify: list[VerifyPoint] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    text: str = ""
    """Name of the text that was read."""
    readings: list[Reading] = field(default_factory=list)
    asked: dict[str, Any] = field(default_factory=dict)
    """What was to be measured. A run that was interrupted goes on with the same."""

    def plan(self) -> Mapping[str, Any]:
        """What makes another run the same."""
        return {"model": self.model, "text": self.text, **self.asked}
