"""Each drafted token leaves at the layer that its predictor says. The text stays the model's.

While drafting, a token runs layer after layer. Where a predictor fires and the whole head's best
token is a candidate, that is the guess. Before a token goes deeper than those before it did, they
are caught up in the same call, and verification resumes every token from its own layer. So no layer
is run twice for a token. Where no predictor fires by the last look, the draft ends: the model knows
better. With one layer in `layers` that is a fixed exit with a predictor as its stop rule. The
predictors are SpecEE's (Xu et al., ISCA 2025), its exits are not verified. That tokens of a draft
may leave at different layers is what LayerSkip names as future work.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from ...core.contract import Budget, Draft, ExitStates, Outcome
from ...core.sampling import Sampler
from ...core.tree import Tree
from ...errors import OptionError
from ...exits.part import Wanted, find_predictors
from ...exits.rules import Counts, Predicted
from ...exits.schedule import Level, Looks, Schedule
from ...exits.stairs import Stairs
from ...exits.walk import Left, walk
from ...model.compute.cache import TokenLayout
from ...model.compute.hidden_states import layers_of
from ...trained.files import TrainedPart
from ..base import Drafter, DraftSession, Target, Texts
from ..chain import ChainRow, ChainSession
from ..naming import names, start_naming


@dataclass(frozen=True)
class DynamicExit(Drafter):
    """Draft with as many layers as each token needs."""

    name: ClassVar[str] = "dynamic-exit"

    part: str | os.PathLike[str] | TrainedPart | None = None
    """Folder of predictors fitted for this model. None is what selfspec ships for it."""
    threshold: float = 0.5
    """A predictor fires at this chance or above. Higher drafts deeper, and is right more often."""
    candidates: str | None = None
    """The drafter that names candidates: recycle, ngram, hybrid, draft-head or quantised, whose
    copy runs for every token. None is the one that the predictors were fitted with."""
    head: str | os.PathLike[str] | TrainedPart | None = None
    """Folder of the head that names candidates, with candidates="draft-head". None is the one that
    selfspec ships for this model."""
    layers: tuple[int, ...] = ()
    """Leave after these numbers of layers only. () allows all that have a predictor."""
    schedule: Level = "both"
    """Where to look: all, offline (where exits were frequent), online (near the last exits), both
    (their union)."""
    deepest: float = 1.0
    """Do not look beyond this share of the layers: a guess that costs a pass gains little."""
    sample: bool = False
    """Under sampling, draw drafts at random and verify them by rejection: the same distribution,
    other tokens for a seed."""

    def __post_init__(self) -> None:
        Schedule(self.schedule)  # says itself what is wrong
        if not 0 < self.deepest <= 1:
            raise OptionError(
                f"deepest={self.deepest} is no share of the layers; use more than 0, up to 1"
            )

    def start(self, target: Target) -> DraftSession:
        target.model.needs_layers("draft='dynamic-exit'")
        found = find_predictors(self.part, target.model, Wanted(layers=self.layers))
        rule = Predicted(target.model, found, self.threshold)
        most = self.deepest * target.model.layers
        layers = [each for each in self.layers or found.layers if each <= most]
        if not layers:
            raise OptionError(
                f"deepest={self.deepest} leaves no layer to look after: the first predictor stands "
                f"after layer {min(self.layers or found.layers)} of {target.model.layers}; use more"
            )
        return _Drafting(target, rule, sorted(layers), self)


class _Drafting(ChainSession):
    def __init__(
        self, target: Target, rule: Predicted, layers: Sequence[int], options: DynamicExit
    ) -> None:
        super().__init__(target, sample=options.sample)
        self.reads_wait = False  # where a token leaves is read at each look
        source, head = options.candidates or rule.source, options.head
        self._naming = start_naming(source, target, rule.pool, head)
        self.ranks, self.collectors = self._naming.ranks, self._naming.collectors
        self._rule, self._layers = rule, layers
        self._schedule = Schedule(options.schedule)
        self._frequent = self._schedule.frequent(layers, rule.shares(layers))
        self._stairs = Stairs(target.model, target.cache, layers_of(self.collectors))
        self._looks: dict[int, Looks] = {}
        self._texts: Mapping[int, Sequence[int]] = {}
        self._left: list[Left] = []
        self.counts = Counts()

    def admit(
        self, row: int, prompt: Sequence[int], sampler: Sampler, ends: frozenset[int] = frozenset()
    ) -> None:
        super().admit(row, prompt, sampler, ends)
        self._naming.admit(row, prompt, sampler, ends)
        self._looks[row] = Looks(self._schedule, self._layers, self._frequent)

    def drop(self, row: int) -> None:
        super().drop(row)
        self._naming.drop(row)
        self._stairs.drop(row)
        del self._looks[row]

    def observe(self, outcome: Outcome) -> None:
        self._naming.observe(outcome)

    def propose(self, rows: Sequence[int], texts: Texts, budget: Budget) -> Sequence[Draft]:
        self._texts = dict(zip(rows, texts, strict=True))
        for row, text in zip(rows, texts, strict=True):
            self._stairs.begin(row, len(text) - 1)
        return super().propose(rows, texts, budget)

    def _finished(self, row: int, text: Sequence[int]) -> Draft:
        """A row that guessed nothing has run some layers all the same."""
        state = self.rows[row]
        tree = Tree.chain(text[-1], state.guesses)
        return Draft(tree, state.drawn_from if state.drawn else None, self.exits(row))

    def exits(self, row: int) -> ExitStates | None:
        return self._stairs[row].exits

    def hidden(self, tokens: Tensor, layout: TokenLayout, rows: Sequence[int]) -> Tensor:
        """Where the tokens left. The head's word of those is kept for `_logits`."""
        guessed = [[*self._texts[row], *self.rows[row].guesses] for row in rows]
        named = names(self._naming, rows, guessed, self._rule.candidates)
        judge = self._rule.judge(named, self.counts, drafts=True)
        looks = [self._looks[row].next() for row in rows]
        x = self.target.model.embed(tokens)
        self._left = walk(self._stairs, rows, x, looks, judge)
        for row, left in zip(rows, self._left, strict=True):  # nobody let it leave: the end
            self._looks[row].left(self.target.model.layers if left.logits is None else left.layer)
        return torch.cat([self._stairs[row].states[-1] for row in rows])

    def _logits(self, x: Tensor) -> Tensor:
        """Of the tokens that left, which may be none."""
        known = [left.logits for left in self._left if left.logits is not None]
        return torch.cat(known) if known else x[:0]

    def _choose(
        self,
        logits: Tensor,
        best: Sequence[int] | None,
        states: Sequence[ChainRow],
        texts: Texts,
        threshold: float | None,
    ) -> tuple[Sequence[int | None], list[bool]]:
        """Tokens that no look let leave end their drafts."""
        gone = [at for at, left in enumerate(self._left) if left.logits is not None]
        tokens: list[int | None] = [None] * len(states)
        sure = [False] * len(states)
        if gone:
            some = [states[at] for at in gone], [texts[at] for at in gone]
            chosen, confident = super()._choose(logits, best, *some, threshold)
            for at, token, is_sure in zip(gone, chosen, confident, strict=True):
                tokens[at], sure[at] = token, is_sure
        return tokens, sure
