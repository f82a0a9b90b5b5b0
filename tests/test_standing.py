"""Budgets that stand for some rounds: their controller is told of these together, before it is
asked anew or a row comes or goes, and the text is the same."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import ClassVar

import pytest

from selfspec.control.base import ControlSession
from selfspec.core.contract import Budget, Draft, Outcome, RoundTime
from selfspec.core.sampling import Sampler, SamplingParams
from selfspec.draft.base import Drafter, DraftSession, Target, Texts
from selfspec.engine.generation import Generation
from selfspec.engine.row import Request
from selfspec.model.layered import LayeredModel
from selfspec.testing import tiny_llm

STANDS = 2
PROMPTS = [[5, 9, 31, 7], [40, 3, 2], [77, 12]]


class Steady(DraftSession, ControlSession):
    """Two drafts a row, for three rounds at a time; notes what happens in which order."""

    stands = STANDS

    def __init__(self, notes: list[tuple[str, int]]) -> None:
        self.control = self
        self._notes = notes

    def admit(self, row: int, *_: object) -> None:
        self._notes.append(("admit", row))

    def drop(self, row: int) -> None:
        self._notes.append(("drop", row))

    def budget(self, rooms: Sequence[int], beside: int = 0) -> Budget:
        self._notes.append(("budget", len(rooms)))
        return Budget([min(2, room) for room in rooms])

    def propose(self, rows: Sequence[int], texts: Texts, budget: Budget) -> Sequence[Draft]:
        pairs = zip(texts, budget.tokens, strict=True)
        return [Draft.chain(text, [text[-1]] * most) for text, most in pairs]

    def observe(self, outcome: Outcome) -> None:
        assert len(outcome.logits), "a drafter sees every round's tensors at once"
        self._notes.append(("round", len(outcome.rows)))

    def learn(self, outcome: Outcome, time: RoundTime) -> None:
        assert time.verify > 0
        self._notes.append(("learn", len(outcome.rows)))


@dataclass(frozen=True)
class Stand(Drafter):
    name: ClassVar[str] = "stand"
    decides_how_much: ClassVar[bool] = True

    notes: list[tuple[str, int]] = field(default_factory=list)

    def start(self, target: Target) -> DraftSession:
        return Steady(self.notes)


@pytest.fixture(scope="module")
def model() -> LayeredModel:
    return tiny_llm().model


def written(
    model: LayeredModel, drafter: Drafter | None, lengths: Sequence[int]
) -> list[list[int]]:
    """The texts of some prompts, each as long as it is told."""
    requests = [
        Request(prompt, Sampler(SamplingParams(), prompt_length=len(prompt)), length,
                drafter=drafter)
        for prompt, length in zip(PROMPTS, lengths, strict=False)
    ]  # fmt: skip
    generation = Generation(model, requests)
    rows = list(generation.rows)
    for _ in generation:
        pass
    return [row.tokens for row in rows]


def test_a_budget_is_asked_for_again_when_it_has_stood(model: LayeredModel) -> None:
    """Asked every round all the same, or told of a round only after the next question."""
    drafter = Stand()
    assert written(model, drafter, [24]) == written(model, None, [24])
    notes = [name for name, _ in drafter.notes if name != "round"]
    asked = [at for at, name in enumerate(notes) if name == "budget"]
    between = [notes[one + 1 : two] for one, two in pairwise(asked)]
    assert between[0] == ["learn"] * (STANDS + 1), "those of a whole span together"
    assert notes.count("learn") == [name for name, _ in drafter.notes].count("round")
    assert notes[-1] == "drop" and notes[-2] == "learn", "what was left is told before the row goes"


def test_rows_that_leave_end_what_stands(model: LayeredModel) -> None:
    """A budget of three rows taken for those of two; rounds told of a row that has left."""
    drafter = Stand()
    lengths = [4, 9, 24]
    assert written(model, drafter, lengths) == written(model, None, lengths)
    rows = 0
    for name, count in drafter.notes:
        rows += (name == "admit") - (name == "drop")
        if name in ("budget", "round", "learn"):
            assert count == rows, (name, count, rows)
