"""A tree of guesses, as drafters grow it: parents first, and equal guesses after the same text are
one node.

Shared by the drafters that guess from text alone. Knows no model.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from ..core.contract import Draft


@dataclass
class GuessTree:
    """What is guessed to follow one row's text, at most `most` tokens; -1 stands for the text
    itself, as in `Draft.parents`."""

    most: int
    tokens: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)
    # (parent, token) -> node
    _known: dict[tuple[int, int], int] = field(default_factory=dict, repr=False)

    @property
    def full(self) -> bool:
        return len(self.tokens) >= self.most

    @property
    def is_chain(self) -> bool:
        return all(parent == index - 1 for index, parent in enumerate(self.parents))

    def add(self, parent: int, token: int) -> int | None:
        """The node of this guess, made if it is new; None if there is no room for another one."""
        node = self._known.get((parent, token))
        if node is None and not self.full:
            node = self._known[parent, token] = len(self.tokens)
            self.tokens.append(token)
            self.parents.append(parent)
        return node

    def merge(self, tokens: Sequence[int], parents: Sequence[int]) -> None:
        """Add another tree as far as there is room: what both guess takes none."""
        place: dict[int, int | None] = {-1: -1}
        for index, (token, parent) in enumerate(zip(tokens, parents, strict=True)):
            under = place[parent]
            place[index] = None if under is None else self.add(under, token)

    def trunk(self) -> list[int]:
        """The chain of first guesses: what is left of the tree where only a chain can be
        verified."""
        here, chain = -1, []
        while here in self.parents:
            here = self.parents.index(here)
            chain.append(self.tokens[here])
        return chain


def draft_of(trees: Sequence[GuessTree]) -> Draft:
    """One draft of all rows' trees; a draft of nothing but chains says so, since those are cheaper
    to verify."""
    tokens = [tree.tokens for tree in trees]
    return Draft(
        tokens,
        parents=None if all(tree.is_chain for tree in trees) else [tree.parents for tree in trees],
    )


def families(draft: Draft) -> Sequence[Sequence[int]]:
    """The parents of a draft's tokens, of chains too."""
    return (
        draft.parents
        if draft.parents is not None
        else [range(-1, len(tokens) - 1) for tokens in draft.tokens]
    )
