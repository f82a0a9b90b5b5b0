"""A tree that a model grows: at each depth its likeliest guesses are followed up, and the likeliest
of all are kept.

A guess's chance is the product of the model's probabilities on its path (EAGLE-2, arXiv 2406.16858,
section 4.1). A guess that is not among the best so far cannot have children that are, so growing
ends by itself. Shared by drafters that read guesses together; knows no model.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from ..core.tree import Tree
from ..model.compute.cache import RowSpan, TokenLayout


@dataclass
class Beam:
    """The guesses after one row's text. `most` of them are wanted; `width` are followed up at each
    depth, if their chance is at least `threshold`. Guesses that were read lie in the drafter's
    cache behind the text's `held` entries."""

    row: int
    root: int
    """The text's last token."""
    held: int
    most: int
    width: int
    threshold: float | None = None
    front: list[int] = field(default_factory=lambda: [0])
    """The nodes whose children are asked for next; after the first time, those to read next."""
    _tokens: list[int] = field(init=False)
    _parents: list[int] = field(init=False)
    _chances: list[float] = field(init=False)
    _paths: dict[int, tuple[int, ...]] = field(default_factory=lambda: {0: ()})
    """The slots of the guesses that were read: each one's ancestors' and its own."""

    def __post_init__(self) -> None:
        self._tokens, self._parents, self._chances = [self.root], [-1], [1.0]

    @property
    def front_tokens(self) -> list[int]:
        return [self._tokens[node] for node in self.front]

    def extend(
        self, tokens: Sequence[Sequence[int]], chances: Sequence[Sequence[float]]
    ) -> list[int]:
        """What may follow each guess of the front (of the text, at first), the likeliest first;
        chooses the next front.

        Returns for each guess of the new front which one of the old front is its parent.
        """
        before = self.front
        first = len(self._tokens)
        for parent, names, found in zip(before, tokens, chances, strict=True):
            self._tokens += names
            self._parents += [parent] * len(names)
            self._chances += [self._chances[parent] * chance for chance in found]
        new = [
            node
            for node in self._best()
            if node >= first and len(self._paths[self._parents[node]]) + 1 < self.most
        ]
        self.front = [
            node
            for node in new[: self.width]
            if self.threshold is None or self._chances[node] >= self.threshold
        ]
        return [before.index(self._parents[node]) for node in self.front]

    def _best(self) -> list[int]:
        """The likeliest `most` guesses; of equal ones the earlier, so that parents come before
        their children."""
        return heapq.nsmallest(
            self.most, range(1, len(self._tokens)), key=lambda node: (-self._chances[node], node)
        )

    def read(self) -> RowSpan:
        """Give the front its slots."""
        first = self.held + len(self._paths) - 1
        for index, node in enumerate(self.front):
            self._paths[node] = (*self._paths[self._parents[node]], first + index)
        return RowSpan(self.row, first, len(self.front))

    @property
    def front_paths(self) -> list[tuple[int, ...]]:
        return [self._paths[node] for node in self.front]

    def tree(self) -> Tree:
        """The root and the likeliest guesses."""
        best = [0, *sorted(self._best())]
        place = {node: index for index, node in enumerate(best)} | {-1: -1}
        return Tree(
            [self._tokens[node] for node in best], [place[self._parents[node]] for node in best]
        )


def layout_of(beams: Sequence[Beam]) -> TokenLayout:
    """Where the fronts of some beams go, and what they see: the text's entries and their own
    ancestors."""
    spans = [beam.read() for beam in beams]
    paths = [path for beam in beams for path in beam.front_paths]
    rows = [beam.row for beam in beams for _ in beam.front]
    held = [beam.held for beam in beams for _ in beam.front]
    positions = [first + len(path) - 1 for first, path in zip(held, paths, strict=True)]
    slots = [path[-1] for path in paths]
    as_tensor = torch.tensor
    return TokenLayout(
        tuple(spans),
        as_tensor(rows),
        as_tensor(slots),
        as_tensor(positions),
        as_tensor(held),
        tuple(paths),
    )
