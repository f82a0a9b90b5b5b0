"""What drafters share that look tokens up: for each row they fill a tree, likeliest guesses first.

Does not know where the guesses come from.
"""

from __future__ import annotations

from abc import abstractmethod
from bisect import insort
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

    `following(place)`: the guesses at a place, each once, with its chance there and the place
    behind it. A path's chance is the product of its guesses'. Of equal ones the first that was
    found counts.
    """
    order = count()
    # the likeliest first, as many as there is room for: -chance, order, parent, token, place
    found: list[tuple[float, int, int, int, Place]] = []
    node, chance, place, room = 0, 1.0, start, tree.room
    while room:
        for share, token, behind in following(place):
            loss = -chance * share
            if -loss >= least and (len(found) < room or loss < found[-1][0]):
                insort(found, (loss, next(order), node, token, behind))
                del found[room:]
        if not found:
            return
        loss, _, parent, token, place = found.pop(0)
        added = tree.add(parent, token)
        assert added is not None, "the loop ends when the tree is full"
        node, chance, room = added, -loss, tree.room
