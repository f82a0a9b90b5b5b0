"""The public fake: drafts what it was told to. For tests, documentation and trying out the engine.

`ScriptedDrafter([answer])` is right where `answer` is what the model writes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from ..core.contract import Budget, Draft
from .base import Drafter, DraftSession, Target, Texts


@dataclass(frozen=True)
class ScriptedDrafter(Drafter):
    """Row i drafts from `script[i]`, a guess at all its new tokens, wherever the row is."""

    name: ClassVar[str] = "scripted"

    script: Sequence[Sequence[int]] = ()
    """One list of tokens a row; rows without one draft nothing."""
    wrong_every: int = 0
    """Replace every n-th token of the script, so that a known share is wrong. 0 replaces none."""

    def start(self, target: Target) -> DraftSession:
        def told(place: int, token: int) -> int:
            wrong = self.wrong_every and place % self.wrong_every == 0
            return abs(token - 1) if wrong else token

        return _Scripted([[told(*item) for item in enumerate(line, 1)] for line in self.script])


class _Scripted(DraftSession):
    def __init__(self, script: Sequence[Sequence[int]]) -> None:
        self._script = script
        self._begins: dict[int, int] = {}

    def admit(self, row: int, prompt: Sequence[int], *_: object) -> None:
        self._begins[row] = len(prompt)

    def propose(self, rows: Sequence[int], texts: Texts, budget: Budget) -> Sequence[Draft]:
        drafts = []
        for row, text, most in zip(rows, texts, budget.tokens, strict=True):
            written = len(text) - self._begins[row]
            line = self._script[row] if row < len(self._script) else []
            drafts.append(Draft.chain(text, line[written : written + most]))
        return drafts
