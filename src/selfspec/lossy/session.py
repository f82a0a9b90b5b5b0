"""The decoding in which every token may leave early, as the engine sees it: a drafter that guesses
nothing and says that its last token has been through all layers.

So prompts, sampling, stops, batches and log-probabilities are the engine's own. Where a token did
leave early, its keys and values in the layers that it skipped have to come from somewhere, or be
missing: `Fill` says how. Not in the drafters' registry: what it says of its states is not true.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Literal

import torch
from torch import Tensor

from ..control.base import ControlSession
from ..core.contract import Budget, Draft, ExitStates, Outcome
from ..core.sampling import Sampler
from ..core.tree import Tree
from ..draft.base import Drafter, DraftSession, Target, Texts
from ..draft.naming import names, start_naming
from ..exits.first_look import Named
from ..exits.part import Source
from ..exits.rules import Counts, Rule
from ..exits.schedule import Looks, Schedule
from ..exits.stairs import Stairs
from ..exits.walk import Left, finish, walk
from ..model.compute.cache import RowSpan
from ..model.compute.hidden_states import layers_of
from ..model.compute.plan import LayerPlan
from ..model.partial_head import PartialHead
from .holes import StairsWithHoles

Fill = Literal["caught-up", "state", "holes"]


class EveryRound(ControlSession):
    """Asks for a draft in every round, also where a row has room for one more token only."""

    def budget(self, rooms: Sequence[int], beside: int = 0) -> Budget:
        return Budget([1] * len(rooms))


@dataclass(frozen=True)
class Said:
    """What became of the last token of each of some rows."""

    states: Tensor  # (rows, width): the last of each
    logits: Tensor  # (rows, vocabulary): what the head said of it
    below: Mapping[int, Tensor]
    """Of each tapped layer: what left it, or what a token left with that did not come so far."""


class WholeTokenSession(DraftSession):
    """Runs a row's last token itself and hands the engine its last state and the head's word."""

    def __init__(
        self,
        target: Target,
        source: str,
        count: int,
        pool: PartialHead | None = None,
        head: Source | None = None,
    ) -> None:
        self.control = EveryRound()
        self._target, self._count = target, count
        self._naming = start_naming(source, target, pool, head) if count else None
        self.ranks = self._naming.ranks if self._naming else 1
        self.collectors = self._naming.collectors if self._naming else ()
        self._taps = layers_of(self.collectors)

    def admit(
        self, row: int, prompt: Sequence[int], sampler: Sampler, ends: frozenset[int] = frozenset()
    ) -> None:
        if self._naming:
            self._naming.admit(row, prompt, sampler, ends)

    def drop(self, row: int) -> None:
        if self._naming:
            self._naming.drop(row)

    def observe(self, outcome: Outcome) -> None:
        if self._naming:
            self._naming.observe(outcome)

    def propose(self, rows: Sequence[int], texts: Texts, budget: Budget) -> Sequence[Draft]:
        named: Sequence[Named] = [[] for _ in rows]
        if self._naming:
            named = names(self._naming, rows, texts, self._count)
        tokens = torch.tensor([text[-1] for text in texts], device=self._target.model.device)
        said = self.said(rows, texts, self._target.model.embed(tokens), named)
        drafts, layers = [], [self._target.model.layers]
        for at, text in enumerate(texts):
            own = slice(at, at + 1)
            below = {layer: states[own] for layer, states in said.below.items()}
            exits = ExitStates(layers, said.states[own], said.logits[own], below)
            drafts.append(Draft(Tree.chain(text[-1], []), exits=exits))
        return drafts

    @abstractmethod
    def said(self, rows: Sequence[int], texts: Texts, x: Tensor, named: Sequence[Named]) -> Said:
        """Of each row's last token, whose embedding is in x."""


@dataclass
class Log:
    """Where tokens left: of each row a list, in the order in which rows were admitted."""

    exits: list[list[int]] = field(default_factory=list)
    counts: Counts = field(default_factory=Counts)


@dataclass(frozen=True, eq=False)
class Leaving(Drafter):
    """One call's decoding."""

    name: ClassVar[str] = "lossy"
    decides_how_much: ClassVar[bool] = True

    rule: Rule
    source: str
    schedule: Schedule
    layers: Sequence[int]
    fill: Fill
    log: Log
    head: Source | None = None

    def start(self, target: Target) -> DraftSession:
        return _Leaving(target, self)


class _Leaving(WholeTokenSession):
    def __init__(self, target: Target, options: Leaving) -> None:
        rule = options.rule
        super().__init__(target, options.source, rule.candidates, rule.pool, options.head)
        self._options, self._log = options, options.log
        layers = options.layers
        self._frequent = options.schedule.frequent(layers, rule.shares(layers))
        kind = StairsWithHoles if options.fill == "holes" else Stairs
        self._stairs = kind(target.model, target.cache, self._taps)
        self._looks: dict[int, Looks] = {}
        self._exits: dict[int, list[int]] = {}

    def admit(
        self, row: int, prompt: Sequence[int], sampler: Sampler, ends: frozenset[int] = frozenset()
    ) -> None:
        super().admit(row, prompt, sampler, ends)
        options = self._options
        self._looks[row] = Looks(options.schedule, options.layers, self._frequent)
        self._exits[row] = []
        self._log.exits.append(self._exits[row])
        self._stairs.drop(row)

    def said(self, rows: Sequence[int], texts: Texts, x: Tensor, named: Sequence[Named]) -> Said:
        model, stairs, caught_up = (
            self._target.model,
            self._stairs,
            self._options.fill == "caught-up",
        )
        for row, text in zip(rows, texts, strict=True):
            if row not in stairs or not caught_up:
                stairs.begin(row, len(text) - 1)
        judge = self._options.rule.judge(named, self._log.counts)
        looks = [self._looks[row].next() for row in rows]
        left = finish(model, stairs, rows, walk(stairs, rows, x, looks, judge))
        states = torch.cat([stairs[row].states[-1] for row in rows])
        below = self._below(rows)
        for row, each in zip(rows, left, strict=True):
            self._looks[row].left(each.layer)
            self._exits[row].append(each.layer)
            stairs[row].forget_done(model.layers)
        if self._options.fill == "state":
            self._fill(rows, texts, states, left)
        if isinstance(stairs, StairsWithHoles):
            for row, each in zip(rows, left, strict=True):
                stairs.leave(row, each.layer)
        logits = [each.logits for each in left if each.logits is not None]
        return Said(states, torch.cat(logits), below)

    def _below(self, rows: Sequence[int]) -> dict[int, Tensor]:
        """Of each tapped layer: what left it, or the state that a token left with."""
        stairs, states = [self._stairs[row] for row in rows], self._target.model.states
        return {
            layer: torch.cat([s.below[-1].get(layer, states(s.states[-1])) for s in stairs])
            for layer in self._taps
        }

    def _fill(
        self, rows: Sequence[int], texts: Texts, states: Tensor, left: Sequence[Left]
    ) -> None:
        """Keys and values of skipped layers from the state that the token left with (CALM's
        propagation)."""
        model, cache = self._target.model, self._target.cache
        for layer in range(min(each.layer for each in left), model.layers):
            some = [at for at, each in enumerate(left) if each.layer <= layer]
            spans = [RowSpan(rows[at], len(texts[at]) - 1, 1) for at in some]
            plan = LayerPlan(layer, layer + 1, skipped_mlp=frozenset({layer}))
            model.run(states[some], plan, cache, cache.layout_at(spans))
