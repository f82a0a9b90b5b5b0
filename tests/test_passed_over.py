"""Rounds that a drafter passes over: plain ones, of which it hears later what was written."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import pytest

from selfspec.control.base import ControlSession
from selfspec.core.contract import Budget, Draft, Outcome, RoundTime
from selfspec.core.sampling import Sampler, SamplingParams
from selfspec.draft.base import Drafter, DraftSession, Target, Texts
from selfspec.draft.from_layers.quantised import Quantised
from selfspec.engine import groups, streak
from selfspec.engine.generation import Generation
from selfspec.engine.row import Request
from selfspec.model.layered import LayeredModel
from selfspec.testing import tiny_llm

RESTS = 3


class Dozing(DraftSession, ControlSession):
    """Passes over three rounds of four, and drafts the last token again in the others."""

    ranks = 2

    def __init__(self, heard: list[Outcome]) -> None:
        self.control = self
        self._heard, self._rest, self.seconds = heard, 0, 0.0

    def budget(self, rooms: Sequence[int], beside: int = 0) -> Budget:
        assert not self._rest, "it is asked though it passes this round over"
        return Budget([min(2, room) for room in rooms])

    def propose(self, rows: Sequence[int], texts: Texts, budget: Budget) -> Sequence[Draft]:
        pairs = zip(texts, budget.tokens, strict=True)
        return [Draft.chain(text, [text[-1]] * most) for text, most in pairs]

    def observe(self, outcome: Outcome) -> None:
        self._heard.append(outcome)

    def learn(self, outcome: Outcome, time: RoundTime) -> None:
        self._rest = RESTS

    @property
    def rests(self) -> int:
        return self._rest

    def passed_over(self, rows: int, tokens: int, seconds: float) -> None:
        self._rest -= 1
        self.seconds += seconds


@dataclass(frozen=True)
class Doze(Drafter):
    name: ClassVar[str] = "doze"
    decides_how_much: ClassVar[bool] = True

    heard: list[Outcome] = field(default_factory=list)

    def start(self, target: Target) -> DraftSession:
        return Dozing(self.heard)


class DozingBeside(Dozing):
    """The same beside another drafter, which learns from every round."""

    def __init__(self, heard: list[Outcome], beside: DraftSession) -> None:
        super().__init__(heard)
        self._beside, self.ranks = beside, beside.ranks

    def admit(
        self, row: int, prompt: Sequence[int], sampler: Sampler, ends: frozenset[int] = frozenset()
    ) -> None:
        self._beside.admit(row, prompt, sampler, ends)

    def drop(self, row: int) -> None:
        self._beside.drop(row)

    def observe(self, outcome: Outcome) -> None:
        super().observe(outcome)
        self._beside.observe(outcome)


@dataclass(frozen=True)
class DozeBeside(Doze):
    beside: Drafter = field(default_factory=Quantised)

    def start(self, target: Target) -> DraftSession:
        return DozingBeside(self.heard, self.beside.start(target))


@pytest.fixture(scope="module")
def model() -> LayeredModel:
    return tiny_llm().model


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_what_was_missed_is_told_as_drafts_that_were_kept(
    model: LayeredModel, temperature: float
) -> None:
    """Tokens that a drafter never hears of or hears twice, those of another row, or of a row that
    has left; likeliest tokens of another place."""
    sampler = Sampler(SamplingParams(temperature=temperature), 4)
    doze, prompts = Doze(), ([5, 6, 7], [9, 8, 9], [30, 31, 32, 33])
    requests = [
        Request(prompt, sampler, new, drafter=drafter)
        for prompt, new, drafter in zip(prompts, (30, 17, 26), (doze, None, doze), strict=True)
    ]
    # the row that nobody drafts for stands between the others, and leaves first
    alone = [Generation(model, [Request(each.prompt, sampler, 30)]) for each in requests]
    expected = [generation.rows[0] for generation in alone]
    for each in alone:
        list(each)
    generation = Generation(model, requests)
    rows = list(generation.rows)
    list(generation)
    for row, whole in zip(rows, expected, strict=True):
        assert row.tokens == whole.tokens[: len(row.tokens)] and row.finish == "length"
    told: dict[int, list[int]] = {0: [], 2: []}
    together = 0
    for outcome in doze.heard:
        best = iter(outcome.best or ())
        for each in outcome.rows:
            text = rows[each.row].tokens
            begin = len(rows[each.row].request.prompt) + 1 + len(told[each.row])
            assert each.draft.tree.tokens[0] == text[begin - 1]
            told[each.row] += each.kept
            together += len(each.kept) == len(each.path) == RESTS
            for node, choice in enumerate(each.choices):
                likeliest = next(best, None)
                if likeliest is not None and temperature == 0:
                    assert likeliest[0] == choice and len(likeliest) == 2, node
    for slot, kept in told.items():
        row = rows[slot]
        assert kept == row.tokens[len(row.request.prompt) + 1 :], slot
    assert together > 6


def test_what_was_missed_is_enough_for_what_guesses_for_a_copy(model: LayeredModel) -> None:
    """A copy that asks for fewer of the likeliest tokens than its own drafter learns from: of
    rounds that were passed over there are no logits left to look for more, and the request
    failed."""
    doze = DozeBeside()
    request = Request([5, 6, 7], Sampler(SamplingParams(), 3), 24, drafter=doze)
    generation = Generation(model, [request])
    row = generation.rows[0]
    list(generation)
    assert (row.finish, len(row.tokens)) == ("length", 3 + 24) and len(doze.heard) > 1


def test_kernels_run_rounds_that_nobody_asks_about(
    model: LayeredModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """More rounds than are passed over, or rounds of which the drafter hears something else."""
    if model.ops.kernel != "native":
        pytest.skip("no C++ compiler found (g++ or clang++)")
    monkeypatch.setattr(streak, "SECONDS", 1e9)  # however slow a machine is

    def steps(doze: Doze) -> list[int]:
        request = Request([5, 6, 7], Sampler(SamplingParams(), 4), 30, drafter=doze)
        return [len(step.rows) for step in Generation(model, [request])]

    at_once, one_by_one = Doze(), Doze()
    assert max(steps(at_once)) == RESTS
    monkeypatch.setattr(groups, "streak", lambda *_: ())
    assert max(steps(one_by_one)) == 1
    ours, theirs = (
        [(o.best, o.rows[0].kept) for o in each.heard] for each in (at_once, one_by_one)
    )
    assert ours == theirs and len(ours) > RESTS
