"""Jacobi decoding: guess anything, and next time guess what the model said to that.

After a wrong guess the model's choices at the later positions were made after a wrong text, but now
and then they are right nevertheless, so they are the next round's guesses: the fixed-point
iteration of Santilli et al. 2023 (the blog's relative). Costs no model; on a model that was not
trained for it, it gains little. Knows only the last round.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from ...core.contract import Budget, Draft, Outcome
from ...core.randomness import uniform
from ...errors import OptionError, nearest
from ..base import Drafter, DraftSession, Target
from ..guess_tree import families

FILLS = ("text", "last")


@dataclass(frozen=True)
class Jacobi(Drafter):
    """Draft what the model chose after the last round's wrong guesses."""

    name: ClassVar[str] = "jacobi"

    fill: str = "text"
    """What to guess where there are no guesses yet: "text" takes tokens from anywhere in the row's
    text, "last" repeats its last token."""

    def __post_init__(self) -> None:
        if self.fill not in FILLS:
            raise OptionError(f"fill={self.fill!r} is no way to begin; {nearest(self.fill, FILLS)}")

    def start(self, target: Target) -> DraftSession:
        return _Iterating(self.fill, len(target.prompts))


class _Iterating(DraftSession):
    def __init__(self, fill: str, rows: int) -> None:
        self._fill = fill
        self._guesses: list[list[int]] = [[] for _ in range(rows)]

    def propose(self, rows: Sequence[int], texts: Sequence[Sequence[int]], budget: Budget) -> Draft:
        drafted = []
        for row, text, most in zip(rows, texts, budget.tokens, strict=True):
            guesses = self._guesses[row][:most]
            drafted.append(
                guesses + [self._any(text, depth) for depth in range(len(guesses), most)]
            )
        return Draft(drafted)

    def _any(self, text: Sequence[int], depth: int) -> int:
        """A first guess; a function of the text alone, so that runs repeat."""
        return (
            text[-1] if self._fill == "last" else text[int(uniform(depth, len(text)) * len(text))]
        )

    def observe(self, outcome: Outcome) -> None:
        shown = zip(
            outcome.rows,
            outcome.draft.tokens,
            families(outcome.draft),
            outcome.accepted,
            outcome.choices,
            strict=True,
        )
        for row, tokens, parents, path, choices in shown:
            here, guesses = (path[-1] if path else -1), []
            # down the first guesses after the kept text; parents come first
            for index in range(len(tokens)):
                if parents[index] == here:
                    guesses.append(choices[index + 1])
                    here = index
            self._guesses[row] = guesses
