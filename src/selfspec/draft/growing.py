"""What drafters share that look tokens up: for each row they fill a tree, likeliest guesses first.

Does not know where the guesses come from.
"""

from __future__ import annotations

import heapq
from abc import abstractmethod
from collections.abc import Callable, Iterable, Sequence
from itertools import count
from typing import TypeVar

from ..core.contract import Budget, Draft
from ..core.tree import TreeBuilder
from .base import DraftSession, Texts

Place = TypeVar("Place")


class GrowingSession(DraftSession):
    """Drafts a tree for each row, without any model."""

    def propose(self, rows: Sequence[int], texts: Texts, budget: Budget) -> Sequence[Draft]:
        drafts = []
        for row, text, most in zip(rows, texts, budget.tokens, strict=True):
            tree = TreeBuilder(text[-1], most)
            if most:
                self.fill(tree, row, text)
            drafts.append(Draft(tree.tree()))
        return drafts

    @abstractmethod
    def fill(self, tree: TreeBuilder, row: int, text: Sequence[int]) -> None:
        """Add guesses at what follows the row's text, at least one of which has room."""


def grow(
    tree: TreeBuilder,
    start: Place,
    following: Callable[[Place], Iterable[tuple[float, int, Place]]],
    least: float = 0.0,
) -> None:
    """Fill the tree with the likeliest paths whose chance is at least `least`.

    `following(place)`: the guesses at a place, each with its chance there and the place behind it.
    A path's chance is the product of its guesses'. Of equal ones the first that was found counts.
    """
    order = count()
    heap: list[tuple[float, int, int, int, Place]] = []  # -chance, order, parent, token, place

    def push(parent: int, chance: float, place: Place) -> None:
        for share, token, behind in following(place):
            heapq.heappush(heap, (-chance * share, next(order), parent, token, behind))

    push(0, 1.0, start)
    while heap and tree.room and -heap[0][0] >= least:
        loss, _, parent, token, place = heapq.heappop(heap)
        node = tree.add(parent, token)
        assert node is not None, "the loop ends when the tree is full"
        push(node, -loss, place)
