"""A tree that a model grows: at each depth its likeliest guesses are followed up.

A guess's chance is the product of the model's probabilities on its path (EAGLE-2, arXiv 2406.16858,
section 4.1). A guess that is not among the best so far cannot have children that are, so growing
ends by itself. Shared by drafters that read guesses together. Knows no model.
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
    """The guesses after one row's text, of which the `most` likeliest are kept.

    At each depth `width` of them are followed up, if their chance is at least `threshold`. Guesses
    that were read lie in the drafter's cache, behind the text's `held` entries.
    """

    row: int
    root: int
    """The text's last token."""
    held: int
    most: int
    width: int
    threshold: float | None = None
    front: list[int] = field(default_factory=lambda: [0])
    """The nodes whose children come next. All but the root have to be read before."""
    _tokens: list[int] = field(init=False)
    _parents: list[int] = field(default_factory=lambda: [-1])
    _chances: list[float] = field(default_factory=lambda: [1.0])
    _paths: dict[int, tuple[int, ...]] = field(default_factory=lambda: {0: ()})
    """The slots of each guess that was read: its ancestors' and its own."""

    def __post_init__(self) -> None:
        self._tokens = [self.root]

    @property
    def room(self) -> int:
        """How many guesses may be added if none is dropped again: drawn ones have to stay."""
        return self.most + 1 - len(self._tokens)

    @property
    def front_tokens(self) -> list[int]:
        return [self._tokens[node] for node in self.front]

    def extend(
        self, tokens: Sequence[Sequence[int]], chances: Sequence[Sequence[float]]
    ) -> list[int]:
        """Add what may follow each guess of the front, likeliest first, and choose the next front.

        Returns for each guess of the new front which one of the old front is its parent.
        """
        before, first = self.front, len(self._tokens)
        for parent, following, shares in zip(before, tokens, chances, strict=True):
            self._tokens += following
            self._parents += [parent] * len(following)
            self._chances += [self._chances[parent] * share for share in shares]
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
        """The likeliest `most` guesses. Of equal ones the earlier: parents come before children."""
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
    """Where the fronts go, and what they see: the text's entries and their own ancestors."""
    spans = tuple(beam.read() for beam in beams)
    fronts = [(beam, path) for beam in beams for path in beam.front_paths]
    rows = torch.tensor([beam.row for beam, _ in fronts])
    slots = torch.tensor([path[-1] for _, path in fronts])
    positions = torch.tensor([beam.held + len(path) - 1 for beam, path in fronts])
    held = torch.tensor([beam.held for beam, _ in fronts])
    return TokenLayout(spans, rows, slots, positions, held, tuple(path for _, path in fronts))
