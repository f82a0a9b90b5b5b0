"""Jacobi decoding: guess anything, and next time guess what the model said to that.

After a wrong guess the model's choices at later positions follow a wrong text, but now and then
they are right nevertheless, so they are the next round's guesses: the fixed-point iteration of
Santilli et al. 2023. Costs no model, and gains little on one that was not trained for it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from ...core.contract import Budget, Draft, Outcome
from ...core.randomness import uniform
from ...errors import OptionError, nearest
from ..base import Drafter, DraftSession, Target, Texts

FILLS = ("text", "last")


@dataclass(frozen=True)
class Jacobi(Drafter):
    """Draft what the model chose after the last round's wrong guesses."""

    name: ClassVar[str] = "jacobi"

    fill: str = "text"
    """What to guess at first: "text" any tokens of the row's text, "last" its last token again."""

    def __post_init__(self) -> None:
        if self.fill not in FILLS:
            raise OptionError(f"fill={self.fill!r} is no way to begin; {nearest(self.fill, FILLS)}")

    def start(self, target: Target) -> DraftSession:
        return _Iterating(self.fill)


class _Iterating(DraftSession):
    def __init__(self, fill: str) -> None:
        self._fill = fill
        self._guesses: dict[int, list[int]] = {}

    def drop(self, row: int) -> None:
        self._guesses.pop(row, None)

    def propose(self, rows: Sequence[int], texts: Texts, budget: Budget) -> Sequence[Draft]:
        drafts = []
        for row, text, most in zip(rows, texts, budget.tokens, strict=True):
            guesses = self._guesses.get(row, [])[:most]
            # first guesses are a function of the text alone, so that runs repeat
            more = [
                text[-1 if self._fill == "last" else int(uniform(depth, len(text)) * len(text))]
                for depth in range(len(guesses), most)
            ]
            drafts.append(Draft.chain(text, guesses + more))
        return drafts

    def observe(self, outcome: Outcome) -> None:
        for row in outcome.rows:
            wrong = row.draft.tree.first_branch(row.path[-1])  # first guesses behind the kept ones
            self._guesses[row.row] = [row.choices[node] for node in wrong]
