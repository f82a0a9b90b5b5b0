"""Who of two drafts in a round: lookups that know what they will bring there, or what runs part of
the model."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import pytest

from selfspec import LLM
from selfspec.core.contract import Budget, Draft, RoundTime, RowOutcome
from selfspec.core.sampling import Sampler, SamplingParams
from selfspec.draft.arms import Pair
from selfspec.draft.auto import TRIED_LENGTH, Auto, AutoSession
from selfspec.draft.base import Drafter, DraftSession, Target
from selfspec.draft.from_text.ngram import NGram
from selfspec.draft.hybrid import Hybrid
from selfspec.testing import tiny_llm
from worlds import outcome_of

OFTEN, SURE, SELDOM = 0.3, 0.97, 0.02  # that lookups find something; their guesses' chances
LENGTH = 6


@dataclass(frozen=True)
class Knowing(Drafter, DraftSession):
    """Lookups with six guesses, which are nearly sure in some rounds and in vain in the others."""

    name: ClassVar[str] = "knowing"
    looks_up = True
    weighs = True

    dice: random.Random = field(default_factory=lambda: random.Random(1))
    chances: list[float] = field(default_factory=list)  # of each round

    def start(self, target: Target) -> DraftSession:
        return self

    def propose(
        self, rows: Sequence[int], texts: Sequence[Sequence[int]], budget: Budget
    ) -> Sequence[Draft]:
        chance = SURE if self.dice.random() < OFTEN else SELDOM
        self.chances.append(chance)
        made = min(LENGTH, *budget.tokens)
        drafted = Draft.chain(texts[0], [7 if chance == SURE else 5] * made)
        return [Draft(drafted.tree, expected=sum(chance**n for n in range(1, made + 1)))]


@dataclass(frozen=True)
class Running(Drafter, DraftSession):
    """Right in four of five places, whatever the text."""

    name: ClassVar[str] = "running"

    def start(self, target: Target) -> DraftSession:
        return self

    def propose(
        self, rows: Sequence[int], texts: Sequence[Sequence[int]], budget: Budget
    ) -> Sequence[Draft]:
        return [Draft.chain(text, [7] * n) for text, n in zip(texts, budget.tokens, strict=True)]


@pytest.fixture(scope="module")
def llm() -> LLM:
    return tiny_llm(seed=4)


def begin(auto: Auto, llm: LLM) -> AutoSession:
    at_work = auto.start(Target(llm.model, llm.model.new_cache(1, 64)))
    at_work.admit(0, [7], Sampler(SamplingParams(), prompt_length=1))
    return at_work


def play(at_work: AutoSession, rounds: int) -> list[tuple[str, float]]:
    """Of each round who drafted, and the chance of lookups there: a pass takes 1 and a tenth for
    each guess, a draft of the running one a fifth more. The text is sevens as far as guesses are
    kept, and behind them a seven where lookups are sure, else an eight."""
    dice, text, told = random.Random(2), [7, 7], list[tuple[str, float]]()
    knowing = next(arm.session for arm in at_work._arms if arm.name == "knowing")
    assert isinstance(knowing, Knowing)
    for _ in range(rounds):
        before, count = at_work.rounds, len(knowing.chances)
        budget = at_work.budget([1000])
        drafts = at_work.propose([0], [text], budget) if any(budget.tokens) else [Draft.chain(text)]
        who = next((n for n, c in at_work.rounds.items() if c > before[n]), "nobody")
        here = knowing.chances[-1] if len(knowing.chances) > count else SELDOM
        chance, made, kept = (here if who == "knowing" else 0.8), len(drafts[0].guesses), 0
        while kept < made and dice.random() < chance:
            kept += 1
        text = [*text, *[7] * kept, 7 if here == SURE else 8]
        path = range(kept + 1)
        row = RowOutcome(0, text, drafts[0], path, text[-kept - 1 :], [7] * (made + 1))
        outcome = outcome_of([made], [kept])
        outcome = type(outcome)([row], outcome.logits, outcome.hidden)
        drafting = 0.2 * made if who == "running" else 0.001
        at_work.learn(outcome, RoundTime(drafting, 1 + 0.1 * made, 0.0))
        told.append((who, here))
    return told


def test_each_drafts_where_it_does_better(llm: LLM) -> None:
    """One of the two for good, though on average they are nearly as good; lookups in rounds in
    which they find nothing, or the model's part where they would do."""
    at_work = begin(Auto([Knowing(), Running()]), llm)
    told = play(at_work, 500)[100:]
    lookups = [here for who, here in told if who == "knowing"]
    running = [here for who, here in told if who == "running"]
    assert len(lookups) > 60 and lookups.count(SURE) > 0.9 * len(lookups)
    assert len(running) > 200 and running.count(SURE) < 0.1 * len(running)
    assert sum(at_work.rounds.values()) == pytest.approx(500, abs=30)


def test_guesses_that_lost_count_too(llm: LLM) -> None:
    """Lookups judged by the rounds that they won alone: they seem to be right nearly always, and
    what they cost seems to be worth everything."""
    at_work = begin(Auto([Knowing(), Running()]), llm)
    play(at_work, 500)
    chance = at_work._arms[0].costs.chances(1)[0]
    assert chance < 0.6, "right in three rounds of ten"


def test_a_pair_needs_two_that_are_known(llm: LLM) -> None:
    """A choice by made-up rates: of a drafter that was never timed, or does not pay, or of lookups
    that cannot say what they will bring; or for several rows, which lookups would hold up."""
    at_work = begin(Auto([Knowing(), Running()]), llm)
    assert Pair.of(at_work._arms, 9, 9, TRIED_LENGTH, 0) is None
    play(at_work, 100)
    pair = Pair.of(at_work._arms, 9, 9, TRIED_LENGTH, 0)
    assert pair and (pair.lookup.name, pair.other.name) == ("knowing", "running")
    assert pair.lookups.price and pair.others.price is None and pair.tokens <= 9
    assert Pair.of(at_work._arms[:1], 9, 9, TRIED_LENGTH, 0) is None
    assert Pair.of(at_work._arms[1:], 9, 9, TRIED_LENGTH, 0) is None
    at_work.budget([9, 9])
    assert at_work._pair is None


@pytest.mark.parametrize("first", [Hybrid(), NGram()], ids=lambda each: each.name)
def test_lookups_say_how_much_they_will_bring(llm: LLM, first: Drafter) -> None:
    """A draft that seems to bring nothing, or more than it has guesses."""
    text = [5, 9, 31, 7, 5, 9, 31, 7, 5, 9]
    at_work = first.start(Target(llm.model, llm.model.new_cache(1, 64)))
    at_work.admit(0, text, Sampler(SamplingParams(), prompt_length=len(text)))
    (draft,) = at_work.propose([0], [text], Budget([4]))
    assert draft.expected is not None and 0 < draft.expected <= len(draft.guesses)
