"""A tree of guesses as a value.

Node 0, the root, is the last token of a row's text. Every other node is a guess that follows its
parent. A chain is a tree without branches. Parents come before their children, so one walk in order
is enough for everything here. Knows no model and no probabilities.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import overload


@dataclass(frozen=True)
class Tree:
    """`tokens[node]`, and `parents[node]` (-1 for the root)."""

    tokens: Sequence[int]
    parents: Sequence[int]

    @classmethod
    def chain(cls, root: int, guesses: Sequence[int] = ()) -> Tree:
        """The root and guesses that follow one another."""
        return cls([root, *guesses], range(-1, len(guesses)))

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def guesses(self) -> Sequence[int]:
        """The tokens of all nodes but the root."""
        return self.tokens[1:]

    @cached_property
    def is_chain(self) -> bool:
        return isinstance(self.parents, range) or all(
            parent == node - 1 for node, parent in enumerate(self.parents)
        )

    @cached_property
    def paths(self) -> list[tuple[int, ...]]:
        """The nodes from the root to each node, both included."""
        paths: list[tuple[int, ...]] = []
        for node, parent in enumerate(self.parents):
            paths.append((*paths[parent], node) if parent >= 0 else (node,))
        return paths

    @cached_property
    def depths(self) -> Sequence[int]:
        """How many steps each node is from the root."""
        return range(len(self)) if self.is_chain else [len(path) - 1 for path in self.paths]

    def first_branch(self, node: int = 0) -> list[int]:
        """The nodes below a node: its first child, that one's first child, and so on."""
        branch: list[int] = []
        for child in range(node + 1, len(self)):
            if self.parents[child] == node:
                branch.append(child)
                node = child
        return branch

    def contexts(self, text: Sequence[int]) -> Contexts:
        """The text up to each node, for a text that ends with the root."""
        return Contexts(self, text)


class Contexts(Sequence[Sequence[int]]):
    """The text up to each node of a tree, made on demand: most choices need its length only."""

    def __init__(self, tree: Tree, text: Sequence[int]) -> None:
        self._tree, self._text = tree, text

    @property
    def lengths(self) -> list[int]:
        return [len(self._text) + depth for depth in self._tree.depths]

    def __len__(self) -> int:
        return len(self._tree)

    @overload
    def __getitem__(self, node: int) -> Sequence[int]: ...
    @overload
    def __getitem__(self, node: slice) -> Sequence[Sequence[int]]: ...
    def __getitem__(self, node: int | slice) -> Sequence[int] | Sequence[Sequence[int]]:
        if isinstance(node, slice):
            return [self[index] for index in range(*node.indices(len(self)))]
        if not -len(self) <= node < len(self):
            raise IndexError(node)
        path = self._tree.paths[node]
        return [*self._text, *(self._tree.tokens[guess] for guess in path[1:])]


class TreeBuilder:
    """A tree under construction. Equal guesses after the same text are one node."""

    def __init__(self, root: int, most: int) -> None:
        self.most = most  # guesses, the root not counted
        self._tokens, self._parents = [root], [-1]
        self._nodes: dict[tuple[int, int], int] = {}  # (parent, token) -> node

    @property
    def room(self) -> int:
        """How many guesses may still be added."""
        return self.most + 1 - len(self._tokens)

    def add(self, parent: int, token: int) -> int | None:
        """The node of this guess, made if it is new. None if there is no room for another one."""
        node = self._nodes.get((parent, token))
        if node is None and self.room > 0:
            node = self._nodes[parent, token] = len(self._tokens)
            self._tokens.append(token)
            self._parents.append(parent)
        return node

    def merge(self, tree: Tree) -> None:
        """Add another tree's guesses as far as there is room. What both guess takes none."""
        nodes: list[int | None] = [0]
        for token, parent in zip(tree.guesses, tree.parents[1:], strict=True):
            under = nodes[parent]
            nodes.append(None if under is None else self.add(under, token))

    def tree(self, most: int | None = None) -> Tree:
        """What was built, or the first so many guesses of it."""
        end = None if most is None else most + 1
        return Tree(self._tokens[:end], self._parents[:end])
