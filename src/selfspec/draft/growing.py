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
from ..core.price import Price, worthy
from ..core.tree import TreeBuilder
from .base import DraftSession, Texts

Place = TypeVar("Place")


class Guesses(TreeBuilder):
    """A tree of guesses whose chances are known."""

    def __init__(self, root: int, most: int, price: Price | None = None) -> None:
        super().__init__(root, most)
        self.price, self._chances = price, list[float]()

    def guess(self, parent: int, token: int, chance: float) -> int:
        """The node of this guess, for which there is room. `chance`: that it is kept."""
        node = self.add(parent, token)
        assert node is not None, "whoever guesses looks for room before"
        if node > len(self._chances):
            self._chances.append(chance)
        return node

    def in_vain(self, chance: float) -> bool:
        """Whether neither a guess with this chance nor any that are less likely could pay."""
        return self.price is not None and chance <= self.price.floors[len(self._chances)]

    def hopeless(self, chance: float) -> bool:
        """Whether no guess with this chance, nor any that is less likely, will ever pay."""
        return self.price is not None and chance <= self.price.lowest[len(self._chances)]

    def worthy(self) -> Draft:
        """Those that bring more than they cost."""
        count, expected = worthy(self.price, self._chances)
        return Draft(self.tree(count), expected=expected)


class GrowingSession(DraftSession):
    """Drafts a tree for each row, without any model."""

    weighs = True

    def propose(self, rows: Sequence[int], texts: Texts, budget: Budget) -> Sequence[Draft]:
        drafts = []
        for row, text, most in zip(rows, texts, budget.tokens, strict=True):
            tree = Guesses(text[-1], most, budget.price)
            if most:
                self.fill(tree, row, text)
            drafts.append(tree.worthy())
        return drafts

    @abstractmethod
    def fill(self, tree: Guesses, row: int, text: Sequence[int]) -> None:
        """Add guesses at what follows the row's text, at least one of which has room."""


def grow(
    tree: Guesses,
    start: Place,
    following: Callable[[Place], Iterable[tuple[float, int, Place]]],
    least: float = 0.0,
) -> None:
    """Fill the tree with the likeliest paths whose chance is at least `least`.

    `following(place)`: the guesses at a place, each once, with its chance there and the place
    behind it. A path's chance is the product of its guesses'. Of equal ones the first that was
    found counts. It ends where further guesses would be in vain.
    """
    order = count()
    # the likeliest first, as many as there is room for: -chance, order, parent, token, place
    found: list[tuple[float, int, int, int, Place]] = []
    node, chance, place, room = 0, 1.0, start, tree.room
    while room:
        beaten = len(found) >= room and -chance >= found[room - 1][0]
        for share, token, behind in () if beaten or tree.hopeless(chance) else following(place):
            loss = -chance * share
            if -loss >= least and (len(found) < room or loss < found[-1][0]):
                insort(found, (loss, next(order), node, token, behind))
                del found[room:]
        if not found:
            return
        loss, _, parent, token, place = found.pop(0)
        if tree.in_vain(-loss):
            return
        node, chance, room = tree.guess(parent, token, -loss), -loss, tree.room
