"""Worlds for controllers: what passes and drafts cost and which drafts are kept, all made up, so
that the best is known. And a clock for what measures them."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch

from selfspec.control.base import ControlSession
from selfspec.core.contract import Draft, Outcome, RoundTime, RowOutcome
from selfspec.engine import generation, group

NOTHING = torch.empty(0)
# of 1 to 49 tokens: a small model's
MEMORY_BOUND = (
    *(1.0, 1.02, 1.05, 1.08, 1.12, 1.16, 1.2, 1.24),
    *(1.3 + 0.15 * more for more in range(41)),
)
# a machine on which a token more costs nearly as much as a pass
LINEAR = tuple(1 + 0.5 * more for more in range(49))


def on_even_clock(replace: Callable[[Any, str, Any], None] = setattr) -> None:
    """Rounds are timed by a clock of which each look takes a millisecond, so a pass takes as long
    whatever its size and whatever else the machine does."""
    clock = SimpleNamespace(perf_counter=itertools.count(0.0, 0.001).__next__)
    for module in (generation, group):
        replace(module, "time", clock)


@dataclass(frozen=True)
class World:
    """One row. `passes[n]`: seconds of a pass of n + 1 tokens. `draft`: seconds of each draft.
    `chance`: that a draft is kept whose predecessors were. `found`: how often there is a draft at
    all. `spikes`: how often a round takes ten times as long.
    """

    passes: Sequence[float] = MEMORY_BOUND
    draft: float = 0.25
    chance: float = 0.7
    found: float = 1.0
    spikes: float = 0.0
    jitter: float = 0.02

    def expected(self, length: int) -> tuple[float, float]:
        """Tokens and seconds of a round of this length."""
        kept = sum(self.chance**place for place in range(1, length + 1))
        seconds = (
            self.found * (self.passes[length] + self.draft * length)
            + (1 - self.found) * self.passes[0]
        )
        return 1 + self.found * kept, seconds

    def rate(self, *lengths: int) -> float:
        """Expected tokens per second of rounds of these lengths."""
        tokens, seconds = zip(*map(self.expected, lengths), strict=True)
        return sum(tokens) / sum(seconds)

    @property
    def best(self) -> float:
        return max(self.rate(length) for length in range(len(self.passes)))

    def round(self, tokens: int, dice: random.Random) -> tuple[Outcome, RoundTime]:
        made = tokens if dice.random() < self.found else 0
        kept = 0
        while kept < made and dice.random() < self.chance:
            kept += 1
        slow = dice.gauss(1, self.jitter) * (10 if dice.random() < self.spikes else 1)
        outcome = outcome_of([made], [kept])
        return outcome, RoundTime(slow * self.draft * made, slow * self.passes[made], 0.0)


def outcome_of(made: Sequence[int], kept: Sequence[int]) -> Outcome:
    """A round in which row i drafted made[i] tokens, a chain, of which kept[i] were kept."""
    rows = []
    for row, (count, right) in enumerate(zip(made, kept, strict=True)):
        added = [7] * (right + 1)
        draft = Draft.chain([7], [7] * count)
        rows.append(RowOutcome(row, [7, *added], draft, range(right + 1), added, []))
    return Outcome(rows, NOTHING, NOTHING)


def play(controlling: ControlSession, world: World, rounds: int, seed: int = 0) -> list[int]:
    """Let a controller run in a world; says how much it drafted in each round."""
    dice = random.Random(seed)
    lengths = []
    for _ in range(rounds):
        lengths.append(controlling.budget([1000]).tokens[0])
        controlling.learn(*world.round(lengths[-1], dice))
    return lengths
