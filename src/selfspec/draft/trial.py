"""Drafts that nobody verifies: they are compared with what their rows write by themselves, so that
it costs no pass to learn how good a drafter's guesses are. Does not know whose guesses they are.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ..core.tree import Tree


class Trial:
    """Guesses behind the texts of some rows, as trees by row."""

    def __init__(self, trees: Mapping[int, tuple[int, Tree]]) -> None:
        """`trees`: by row how long the text was, and what was guessed to follow."""
        self.trees = {row: tree for row, (_, tree) in trees.items()}
        self.paths: dict[int, Sequence[int]] = {}
        """By row the root and the guesses that came true, for rows of which that is known."""
        self._open = dict(trees)

    @property
    def over(self) -> bool:
        """Whether there is nothing more to find out."""
        return not self._open

    def compare(self, row: int, text: Sequence[int]) -> None:
        """The row's text goes on like this."""
        if row not in self._open:
            return
        begin, tree = self._open[row]
        path = [0]
        for token in text[begin:]:
            right = _child(tree, path[-1], token)
            if right is None:
                break
            path.append(right)
        else:
            if path[-1] in tree.parents:
                return  # what follows the last one is still to come
        self.paths[row] = path
        del self._open[row]

    def drop(self, row: int) -> None:
        """The row has ended before all was known."""
        self._open.pop(row, None)


def _child(tree: Tree, parent: int, token: int) -> int | None:
    """The guess of this token after a node."""
    for node in range(parent + 1, len(tree)):
        if tree.parents[node] == parent and tree.tokens[node] == token:
            return node
    return None
