"""The public fake: drafts what it was told to. For tests, documentation and trying out the engine.

`ScriptedDrafter([answer])` is always right when `answer` is what the model will write, and can be made wrong on purpose.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from ..contract import Budget, Draft
from .base import Drafter, Drafting, as_draft


class ScriptedDrafter(Drafter):
    """Row i drafts from `script[i]`, a guess at all its new tokens, going on wherever the row is.

    `wrong_every=n` replaces the n-th, 2n-th, ... token of the script by another one, so a known share is rejected.
    """

    name: ClassVar[str] = "scripted"

    def __init__(self, script: Sequence[Sequence[int]], wrong_every: int = 0) -> None:
        self._script = [
            [abs(token - 1) if wrong_every and (index + 1) % wrong_every == 0 else token for index, token in enumerate(line)]
            for line in script
        ]

    def start(self, prompts: Sequence[Sequence[int]]) -> Drafting:
        return _Scripted(self._script, [len(prompt) for prompt in prompts])


class _Scripted(Drafting):
    def __init__(self, script: Sequence[Sequence[int]], begins: Sequence[int]) -> None:
        self._script, self._begins = script, begins

    def propose(self, rows: Sequence[int], texts: Sequence[Sequence[int]], budget: Budget) -> Draft:
        guesses = []
        for row, text, most in zip(rows, texts, budget.tokens, strict=True):
            written = len(text) - self._begins[row]
            guesses.append(self._script[row][written : written + most])
        return as_draft(guesses)
