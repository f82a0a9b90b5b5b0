"""What a drafter is. A new method is one new file beside this one: its options, `propose`, and, if it learns, `observe`.

A drafter can only be fast or slow, right or wrong; it cannot change what is generated, since every token it proposes is
verified by the full model. State belongs to one generation and lives in the `Drafting`, so one LLM serves many at once.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar

import torch

from ..contract import Budget, Draft, Outcome


class Drafting(ABC):
    """A drafter at work on one generation."""

    @abstractmethod
    def propose(self, rows: Sequence[int], texts: Sequence[Sequence[int]], budget: Budget) -> Draft:
        """Guess what follows each of `texts` (the full ids of the unfinished rows `rows`), at most `budget.tokens[i]` tokens each."""

    def observe(self, outcome: Outcome) -> None:  # noqa: B027  (most drafters learn nothing)
        """Told after every round what became of the draft."""


class Drafter(ABC):
    """A way to draft, with its options; makes a `Drafting` for each generation."""

    name: ClassVar[str]

    @abstractmethod
    def start(self, prompts: Sequence[Sequence[int]]) -> Drafting:
        """Begin a generation of these prompts."""


def as_draft(guesses: Sequence[Sequence[int]]) -> Draft:
    """A draft from one list of tokens a row, padded."""
    counts = [len(guess) for guess in guesses]
    tokens = torch.zeros((len(guesses), max(counts, default=0)), dtype=torch.long)
    for row, guess in enumerate(guesses):
        tokens[row, : len(guess)] = torch.tensor(guess, dtype=torch.long)
    return Draft(tokens, counts)
