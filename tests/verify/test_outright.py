"""Which drafts that were chosen outright are kept: those on the way that the choices go."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from selfspec.core.tree import Tree
from selfspec.verify.outright import accepted_path


@st.composite
def verified(draw: st.DrawFn) -> tuple[Tree, list[int]]:
    """Any tree over three tokens, and what is chosen after each node."""
    count = draw(st.integers(0, 9))
    parents = [draw(st.integers(0, node)) for node in range(count)]
    token = st.integers(0, 2)
    tokens, choices = (draw(st.lists(token, min_size=count + 1, max_size=count + 1)) for _ in "tc")
    return Tree(tokens, [-1, *parents]), choices


def walked(tree: Tree, choices: list[int]) -> list[int]:
    """From the root on to the child that was chosen, as long as there is one."""
    path = [0]
    while True:
        children = [node for node in range(len(tree)) if tree.parents[node] == path[-1]]
        chosen = [node for node in children if tree.tokens[node] == choices[path[-1]]]
        if not chosen:
            return path
        path.append(chosen[0])


@given(verified())
def test_the_path_is_the_one_that_the_choices_walk(given_: tuple[Tree, list[int]]) -> None:
    """A guess that is kept though it follows another one: a sibling, or a cousin, that has the
    right token by chance."""
    tree, choices = given_
    assert accepted_path(tree, choices) == walked(tree, choices)


@pytest.mark.parametrize(
    ("tokens", "parents", "choices", "path"),
    [
        ([9, 1, 2], [-1, 0, 0], [1, 2, 0], [0, 1]),  # 2 is a sibling of 1, not what follows it
        ([9, 1, 2], [-1, 0, 1], [1, 2, 0], [0, 1, 2]),
        ([9, 1, 2, 2], [-1, 0, 0, 1], [1, 2, 0, 0], [0, 1, 3]),
        ([9, 1, 3], [-1, 0, 1], [1, 2, 0], [0, 1]),  # larger than what was chosen
        ([9, 2, 1], [-1, 0, 0], [1, 0, 0], [0, 2]),
    ],
)
def test_known_paths(
    tokens: list[int], parents: list[int], choices: list[int], path: list[int]
) -> None:
    """The same by hand, for the cases that chance may not meet."""
    assert accepted_path(Tree(tokens, parents), choices) == path
