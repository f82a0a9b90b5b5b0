"""A candidate of `auto` at work, and who of two drafts in a round.

Lookups find much in some rounds and nothing in others, and know which: they say how many of their
guesses will be kept. What runs part of the model is right about as often everywhere. So on average
neither need be better, and choosing anew in each round still is: there lookups draft where their
guesses bring more in the same time, and the other everywhere else. Knows no drafter by its file.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from ..control.costs import CLOSE, HARDLY, CostModel, Pass, best
from ..control.looks import Looks
from ..core.contract import Budget, Draft, Outcome
from ..core.price import Price
from .base import DraftSession, Texts
from .trial import Trial

MANY_ROWS = 8  # of more of them a single one matters little
CLEARLY = 1.25  # how much better than others what runs the model for so many has to be


@dataclass
class Arm:
    """One candidate at work."""

    name: str
    session: DraftSession
    costs: CostModel
    looks: Looks
    looks_up: bool  # it guesses without running the model
    share: float  # of what a pass reads, about what each of its drafts reads
    rounds: int = 0  # in which it was asked
    missed: list[Pass] = field(default_factory=list)
    """Passes that it was not told of yet."""
    trials: list[tuple[Trial, int]] = field(default_factory=list)
    """Guesses that nobody verifies, and how many were asked for."""

    def drop(self, row: int) -> None:
        self.costs.forget(row)
        for trial, _ in self.trials:
            trial.drop(row)

    def catch_up(self) -> None:
        """Passes that it missed count as waited, and as what passes take. Those in which nobody was
        asked take less than those in which somebody was and nobody guessed."""
        missed, self.missed = self.missed, []
        self.looks.pass_over([each.seconds for each in missed])
        self.costs.hear(missed)

    def compare_later(
        self, rows: Sequence[int], texts: Texts, drafts: Sequence[Draft], asked: int
    ) -> None:
        """What these texts go on with shows how good guesses are that nobody verifies."""
        lengths = map(len, texts)
        trees = (draft.tree for draft in drafts)
        trees_by_row = dict(zip(rows, zip(lengths, trees, strict=True), strict=True))
        self.trials.append((Trial(trees_by_row), asked))

    def compare(self, outcome: Outcome) -> None:
        """What came true of earlier guesses, once that is known of all their rows."""
        for trial, asked in self.trials:
            for row in outcome.rows:
                trial.compare(row.row, row.text)
            if trial.over and trial.paths:
                self.costs.tried(trial.trees, trial.paths, asked)
        self.trials = [each for each in self.trials if not each[0].over]

    def length(self, rates: Sequence[float], dear: bool = False) -> int:
        """How much to ask it for, 0 if nothing pays: of `dear` guesses few are worth it, so that
        they have to gain more. What knows which ones are may guess as many as it likes."""
        found = best(rates, gain=CLOSE if dear else HARDLY)
        return len(rates) - 1 if found and self.session.weighs else found

    def price(self, rows: int, count: int, most: int, beside: int = 0) -> Price | None:
        """What guesses cost, for a drafter that asks."""
        return self.costs.price(rows, count, most, beside) if self.session.weighs else None

    def bar(self, rows: int) -> float:
        """How much better than others it has to be. What runs the model, clearly: both are guesses
        about a text that changes, and a lookup that is wrong costs little. For many rows more so:
        tokens that some of them gain end the others no sooner."""
        if self.looks_up:
            return 1
        return CLOSE if rows <= MANY_ROWS else CLEARLY


@dataclass(frozen=True)
class Pair:
    """Lookups and what runs part of the model, for a row that is alone."""

    lookup: Arm
    other: Arm
    rate: float
    """Tokens per second with the other one."""
    lookups: Budget
    others: Budget
    beside: int

    @classmethod
    def of(cls, arms: Sequence[Arm], room: int, most: int, least: int, beside: int) -> Pair | None:
        """The two to choose from, none if one of them is missing, cannot say what it will bring or
        is hardly known, or if the other one does not pay. `least`: guesses that lookups are asked
        for if few of them paid so far."""
        lookup = next((a for a in arms if a.looks_up and a.session.weighs and a.costs.known), None)
        others = [a for a in arms if not a.looks_up and a.costs.known and a.costs.drafting.certain]
        offers = [(arm, arm.costs.rates(1, most, beside)) for arm in others]
        pay = [(max(rates), arm, length) for arm, rates in offers if (length := arm.length(rates))]
        if lookup is None or not pay:
            return None
        rate, other, length = max(pay, key=lambda each: each[0])
        few = max(least, len(lookup.costs.rates(1, most, beside)) - 1)
        price = lookup.costs.price(1, few, most, beside, rate)
        return cls(
            lookup,
            other,
            rate,
            Budget([min(few, room)], price=price),
            Budget([min(length, room)], price=other.price(1, length, most, beside)),
            beside,
        )

    @property
    def tokens(self) -> int:
        """The most that either may draft."""
        return max(*self.lookups.tokens, *self.others.tokens)

    def wins(self, draft: Draft) -> bool:
        """Whether this draft of the lookups is to be verified."""
        count = len(draft.guesses)
        return self.lookup.costs.rate_of(draft.expected or 0.0, count, self.beside) >= self.rate
