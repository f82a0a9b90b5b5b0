"""What a sweep measured, and the speeds that it says. Knows no model and no tables.

A cell's speedup is plain decoding's seconds a token over the setting's, each the mean over prompts
and rounds. Plain decoding's are those of the two turns at the ends of the same group.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean, pstdev

from ..errors import OptionError, nearest
from .schema import PLAIN, Result

RANKINGS = ("cosine", "damage")
WINDOW = 64  # rounds of the moving average, as in Draft & Verify's Figure 5


@dataclass(frozen=True)
class SweepOptions:
    """What to measure. Empty lists are filled in from the model's depth."""

    parts: tuple[str, ...] = ("grid", "skips", "gamma")
    """What to measure, in this order, separated by spaces."""
    exits: tuple[int, ...] = ()
    """Exit layers of the grid. By default some over the model's depth."""
    drafts: tuple[int, ...] = (1, 2, 3, 4, 6, 8)
    """Drafts a round in the grid."""
    skips: tuple[int, ...] = ()
    """Numbers of halves that the draft leaves out. By default some over the model's depth."""
    by: str = "cosine"
    """What says which halves matter least: cosine or damage."""
    new_tokens: int = 64
    """Write this many tokens in each turn."""
    rounds: int = 1
    """How often everything is measured."""

    def filled(self, layers: int) -> SweepOptions:
        """Checked, and with lists for a model of that depth."""
        for part in self.parts:
            if part not in SweepOptions.parts:
                near = nearest(part, SweepOptions.parts)
                raise OptionError(f"there is no part {part!r} of a sweep; {near}")
        if self.by not in RANKINGS:
            raise OptionError(
                f"halves cannot be ranked by {self.by!r}; {nearest(self.by, RANKINGS)}"
            )
        if self.new_tokens < 2 or self.rounds < 1:
            raise OptionError(
                f"--max-new-tokens {self.new_tokens}, --rounds {self.rounds}: nothing would be "
                "timed; use at least 2 and 1"
            )
        shares = {max(1, round(layers * share / 8)) for share in range(1, 8)} - {layers}
        halves = {max(1, round(2 * layers * share / 16)) for share in range(1, 11)}
        exits, skips = self.exits or tuple(sorted(shares)), self.skips or tuple(sorted(halves))
        _inside("--exits", exits, layers - 1)
        _inside("--skips", skips, 2 * layers - 1)
        _inside("--drafts", self.drafts, 64)
        return replace(self, exits=exits, skips=skips)


def _inside(name: str, values: Sequence[int], most: int) -> None:
    if not values or not 1 <= min(values) <= max(values) <= most:
        given = ",".join(map(str, values)) or "(empty)"
        raise OptionError(f"{name} {given}: give numbers from 1 to {most} for this model")


@dataclass(frozen=True)
class SweepTurn:
    """One generation. Turns of a group are compared with one another."""

    group: str
    part: str
    prompt: str
    kind: str
    """The part, or plain."""
    first: int
    """Grid: the exit layer; skips and gamma: the halves left out."""
    drafts: int
    decoded: int
    seconds: float
    verifications: int
    drafted: int
    accepted: int
    identical: bool

    @property
    def per_token(self) -> float:
        return self.seconds / self.decoded


@dataclass(frozen=True)
class Half:
    """Half of a layer, and how much it matters."""

    layer: int
    attention: bool
    score: float


@dataclass(frozen=True)
class Threshold:
    """The adaptive threshold in one round."""

    prompt: str
    threshold: float
    drafted: int
    accepted: int


@dataclass
class Sweep(Result):
    """Everything that was measured."""

    kind = "sweep"
    measured_by = "selfspec sweep MODEL"

    model: str
    kernel: str
    dtype: str
    layers: int
    options: SweepOptions
    prompts: dict[str, int]
    """Names, and how many tokens they have."""
    turns: list[SweepTurn] = field(default_factory=list)
    done: list[str] = field(default_factory=list)
    """Groups that were measured to the end."""
    ranking: list[Half] = field(default_factory=list)
    """Those first that matter least."""
    gamma: list[Threshold] = field(default_factory=list)

    @property
    def plan(self) -> dict[str, object]:
        """What two sittings must agree in."""
        names = ("model", "kernel", "dtype", "layers", "options", "prompts")
        return {name: getattr(self, name) for name in names}

    @property
    def identical(self) -> bool:
        """Whether all texts are those of plain decoding."""
        return all(turn.identical for turn in self.turns)


@dataclass(frozen=True)
class CellSpeed:
    """One setting: grid (exit, drafts) or skips (halves left out, most drafts)."""

    first: int
    drafts: int
    speedup: float
    acceptance: float
    tokens_per_verification: float


def speeds(run: Sweep, part: str) -> list[CellSpeed]:
    """The settings of a part that were measured."""
    turns = [turn for turn in run.turns if turn.part == part]
    plain = _plain(turns)
    mine: dict[tuple[int, int], list[SweepTurn]] = {}
    for turn in turns:
        if turn.kind == part:
            mine.setdefault((turn.first, turn.drafts), []).append(turn)
    return [
        CellSpeed(
            *setting,
            fmean(fmean(plain[turn.group]) for turn in some) / fmean(t.per_token for t in some),
            sum(turn.accepted for turn in some) / max(1, sum(turn.drafted for turn in some)),
            sum(turn.decoded for turn in some) / sum(turn.verifications for turn in some),
        )
        for setting, some in sorted(mine.items())
    ]


def _plain(turns: Sequence[SweepTurn]) -> dict[str, list[float]]:
    """Plain decoding's seconds a token at the two ends of each group."""
    times: dict[str, list[float]] = {}
    for turn in turns:
        if turn.kind == PLAIN:
            times.setdefault(turn.group, []).append(turn.per_token)
    return times


def best(cells: Sequence[CellSpeed]) -> CellSpeed:
    return max(cells, key=lambda cell: cell.speedup)


def unrest(run: Sweep) -> float:
    """How far apart the two plain turns of a group were on average, as a share: what a speedup may
    be off by for no reason."""
    ends = _plain(run.turns).values()
    return fmean(abs(a - b) / ((a + b) / 2) for a, b in ends) if ends else 0.0


def smoothed(run: Sweep, window: int = WINDOW) -> list[tuple[float, float]]:
    """Moving average and standard deviation of the threshold over the last rounds, at each
    round."""
    values = [each.threshold for each in run.gamma]
    pieces = [values[max(0, end - window) : end] for end in range(1, len(values) + 1)]
    return [(fmean(piece), pstdev(piece)) for piece in pieces]
