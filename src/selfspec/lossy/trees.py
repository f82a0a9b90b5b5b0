"""Trees of guesses that leave the layers early (SpecEE's T3), as the engine sees them: a drafter
whose nodes have all been through all layers.

A drafter that works from the text guesses a tree: who names candidates, or `hybrid` where the model
names them itself. Its paths leave as `exits/paths.py` says, and the engine keeps what the head said
there. Layers that a node skipped are filled from the state that it left with.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from ..control.base import ControlSession
from ..core.contract import Budget, Draft, ExitStates, Outcome
from ..core.sampling import Sampler
from ..core.tree import Tree
from ..draft.base import DraftSession, Target, Texts
from ..draft.naming import names, start_naming
from ..errors import OptionError
from ..exits.first_look import SOURCE as FIRST_LOOK
from ..exits.first_look import Named
from ..exits.paths import PathRow, fill_by_state, walk_paths
from ..exits.rules import Predicted
from ..exits.schedule import Looks
from .session import Leaving, Said, WholeTokenSession

GUESSER = "hybrid"  # of trees, where candidates come from the model's first look


@dataclass(frozen=True)
class _EveryTree(ControlSession):
    """Asks in every round for the root, and for as many guesses as there is room for."""

    most: int

    def budget(self, rooms: Sequence[int], beside: int = 0) -> Budget:
        return Budget([1 + min(self.most, room) for room in rooms])


@dataclass(frozen=True, eq=False)
class LeavingTrees(Leaving):
    """One call's decoding."""

    trees: ClassVar[bool] = True

    tree: int = 0
    """Guesses of a round's tree."""

    def start(self, target: Target) -> DraftSession:
        return _LeavingTrees(target, self)


class _LeavingTrees(WholeTokenSession):
    def __init__(self, target: Target, options: LeavingTrees) -> None:
        rule = options.rule
        super().__init__(target, options.source, rule.candidates, rule.pool, options.head)
        if self._taps:
            raise OptionError(
                f"tree={options.tree} with candidates from {options.source!r}: it reads one text's "
                "states, and a tree has many texts; use candidates='recycle', 'ngram', 'hybrid' or "
                "'quantised', or tree=0"
            )
        assert isinstance(rule, Predicted), "other rules have no halves of a look"
        assert self._naming is not None, "predictors have candidates"
        self._guesser = self._naming
        if options.source == FIRST_LOOK:  # which guesses no trees
            self._guesser = start_naming(GUESSER, target)
            self.ranks = self._guesser.ranks
        self.control = _EveryTree(options.tree)
        self._rule, self._options = rule, options
        layers = options.layers
        self._frequent = options.schedule.frequent(layers, rule.shares(layers))
        self._looks: dict[int, Looks] = {}
        self._exits: dict[int, list[int]] = {}
        self._greedy: dict[int, bool] = {}
        self._ran: dict[int, int] = {}  # how many layers each row's tree did, in this round

    def admit(
        self, row: int, prompt: Sequence[int], sampler: Sampler, ends: frozenset[int] = frozenset()
    ) -> None:
        super().admit(row, prompt, sampler, ends)
        if self._guesser is not self._naming:
            self._guesser.admit(row, prompt, sampler, ends)
        self._looks[row] = Looks(self._options.schedule, self._options.layers, self._frequent)
        self._exits[row] = []
        self._greedy[row] = sampler.plain
        self._options.log.exits.append(self._exits[row])

    def drop(self, row: int) -> None:
        super().drop(row)
        if self._guesser is not self._naming:
            self._guesser.drop(row)

    def propose(self, rows: Sequence[int], texts: Texts, budget: Budget) -> Sequence[Draft]:
        model, cache, log = self._target.model, self._target.cache, self._options.log
        trees = self._guessed(rows, texts, [tokens - 1 for tokens in budget.tokens])
        named, going = list[Named](), list[PathRow]()
        for row, text, tree in zip(rows, texts, trees, strict=True):
            looks = frozenset(self._looks[row].next())
            going.append(PathRow(row, len(text) - 1, tree, looks, len(named), self._greedy[row]))
            named += self._named(row, tree.contexts(text))
        log.counts.tokens += len(rows)
        x = walk_paths(model, cache, going, self._rule.judge(named, log.counts))
        fill_by_state(model, cache, going, x)
        self._ran = {each.row: each.layers for each in going}
        return [self._draft(each, x) for each in going]

    def _guessed(self, rows: Sequence[int], texts: Texts, room: Sequence[int]) -> list[Tree]:
        if not any(room):
            return [Tree.chain(text[-1]) for text in texts]
        return [draft.tree for draft in self._guesser.propose(rows, texts, Budget(list(room)))]

    def _named(self, row: int, contexts: Sequence[Sequence[int]]) -> list[Named]:
        """Candidates behind each node, one after the other: a row's namer knows one text."""
        assert self._naming is not None
        return [names(self._naming, [row], [text], self._count)[0] for text in contexts]

    def _draft(self, row: PathRow, x: Tensor) -> Draft:
        layers = [self._target.model.layers] * len(row.tree)
        said = torch.cat([row.said[node] for node in range(len(row.tree))])
        states = x[row.begin : row.begin + len(row.tree)]
        return Draft(row.tree, exits=ExitStates(layers, states, said))

    def observe(self, outcome: Outcome) -> None:
        super().observe(outcome)
        if self._guesser is not self._naming:
            self._guesser.observe(outcome)
        for row in outcome.rows:
            self._exits[row.row] += [self._ran[row.row]] * len(row.kept)
            self._looks[row.row].left(self._ran[row.row])

    def said(self, rows: Sequence[int], texts: Texts, x: Tensor, named: Sequence[Named]) -> Said:
        raise NotImplementedError("trees are said by their paths")
