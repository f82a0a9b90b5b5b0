"""Trees of guesses: what a node's path, depth and text are, and how trees are grown and merged."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from selfspec.core.tree import Contexts, Tree, TreeBuilder


@st.composite
def trees(draw: st.DrawFn, most: int = 9) -> Tree:
    """Any tree: each guess follows the root or a guess before it."""
    count = draw(st.integers(0, most))
    parents = [draw(st.integers(0, node)) for node in range(count)]
    tokens = draw(st.lists(st.integers(0, 3), min_size=count + 1, max_size=count + 1))
    return Tree(tokens, [-1, *parents])


def copied_text(tree: Tree, text: list[int], node: int) -> list[int]:
    """The text up to a node, copied token by token from the node back to the root."""
    below: list[int] = []
    while tree.parents[node] >= 0:
        below.append(tree.tokens[node])
        node = tree.parents[node]
    return text + below[::-1]


# ------------------------------------------------------------------------------------------- a tree

#        0
#      1   2
#    3    4 5
#             6
BUSHY = Tree([9, 10, 20, 30, 40, 50, 60], [-1, 0, 0, 1, 2, 2, 5])


def test_a_chain_is_a_tree_whose_nodes_follow_one_another() -> None:
    """A first guess that follows nothing, a root among the guesses, a chain of none that is empty:
    the last token of a text is always verified."""
    tree = Tree.chain(9, [10, 20, 30])
    assert list(tree.tokens) == [9, 10, 20, 30] and list(tree.parents) == [-1, 0, 1, 2]
    assert len(tree) == 4 and list(tree.guesses) == [10, 20, 30]
    assert tree.paths == [(0,), (0, 1), (0, 1, 2), (0, 1, 2, 3)]
    assert list(tree.depths) == [0, 1, 2, 3]
    root = Tree.chain(9)
    assert len(root) == 1 and root.is_chain and list(root.guesses) == []
    assert root.paths == [(0,)] and list(root.depths) == [0]


def test_paths_and_depths_of_branches() -> None:
    """A path that takes the node before in the list for the parent; a depth that counts nodes."""
    assert BUSHY.paths == [(0,), (0, 1), (0, 2), (0, 1, 3), (0, 2, 4), (0, 2, 5), (0, 2, 5, 6)]
    assert list(BUSHY.depths) == [0, 1, 1, 2, 2, 2, 3]


def test_what_is_a_chain() -> None:
    """A chain that is verified as a tree, which costs more; or a tree verified as a chain, which
    would let a guess see what it does not follow. How the parents are stored must not matter."""
    assert Tree([9, 1, 2], range(-1, 2)).is_chain and Tree([9, 1, 2], [-1, 0, 1]).is_chain
    assert Tree([9, 1], (-1, 0)).is_chain
    assert not Tree([9, 1, 2], [-1, 0, 0]).is_chain and not BUSHY.is_chain
    assert not Tree([9, 1, 2, 3], [-1, 0, 1, 1]).is_chain


@given(trees(), st.lists(st.integers(0, 3), max_size=4))
def test_a_tree_is_what_its_parents_say(tree: Tree, before: list[int]) -> None:
    """Paths, depths, lengths and contexts against walking up from every node, one by one."""
    text = [*before, tree.tokens[0]]
    contexts = tree.contexts(text)
    assert len(contexts) == len(contexts.lengths) == len(tree.paths) == len(tree.depths)
    for node, path in enumerate(tree.paths):
        assert path[0] == 0 and path[-1] == node
        assert [tree.parents[each] for each in path[1:]] == list(path[:-1])
        assert tree.depths[node] == len(path) - 1
        copied = copied_text(tree, text, node)
        assert list(contexts[node]) == copied and contexts.lengths[node] == len(copied)
    assert tree.is_chain == all(path == tuple(range(len(path))) for path in tree.paths)


# ----------------------------------------------------------------------------------------- contexts


def test_contexts_read_like_a_list() -> None:
    """Processors and penalties take any sequence: an end that is never reached, negative indices,
    slices. And an error beyond the end, without which a loop over them never ends."""
    contexts = BUSHY.contexts([7, 8, 9])
    whole = [[7, 8, 9, *rest] for rest in ([], [10], [20], [10, 30], [20, 40], [20, 50])]
    whole.append([7, 8, 9, 20, 50, 60])
    assert isinstance(contexts, Contexts)
    for outside in (7, -8):
        with pytest.raises(IndexError):
            contexts[outside]
    assert [list(context) for context in contexts] == whole
    assert contexts[-1] == whole[-1] and contexts[-7] == whole[0]
    assert contexts[1:3] == whole[1:3] and contexts[::-2] == whole[::-2]


def test_a_context_is_nobody_elses() -> None:
    """A user's processor that changes the list it is given must change neither the row's text nor
    what the next one sees."""
    text = [7, 8, 9]
    contexts = BUSHY.contexts(text)
    for node in (0, 3):
        found = list(contexts[node])
        contexts[node].append(99)  # type: ignore[attr-defined]
        assert text == [7, 8, 9] and list(contexts[node]) == found


# ------------------------------------------------------------------------------------- first branch


def test_the_first_branch_goes_down_from_a_node() -> None:
    """A branch that begins at the root wherever it is asked for, that takes the latest child, or
    that goes on with the child of another node."""
    assert BUSHY.first_branch() == [1, 3]
    assert BUSHY.first_branch(2) == [4] and BUSHY.first_branch(5) == [6]
    assert BUSHY.first_branch(1) == [3] and BUSHY.first_branch(3) == BUSHY.first_branch(6) == []
    assert Tree.chain(9, [1, 2, 3]).first_branch() == [1, 2, 3]
    assert Tree.chain(9).first_branch() == []


@given(trees(), st.data())
def test_the_first_branch_is_the_first_child_again_and_again(
    tree: Tree, data: st.DataObject
) -> None:
    """A branch that takes a later child, or goes on from the wrong node."""
    node = data.draw(st.integers(0, len(tree) - 1))
    expected, here = [], node
    while here in tree.parents:
        here = list(tree.parents).index(here)
        expected.append(here)
    assert tree.first_branch(node) == expected


# ----------------------------------------------------------------------------------------- building


def test_trees_merge_prefixes_and_know_their_trunk() -> None:
    """Equal guesses counted twice, a full tree that grows, children added under a node that found
    no room."""
    tree = TreeBuilder(9, 3)
    assert [tree.add(0, 5), tree.add(1, 6), tree.add(0, 5), tree.add(0, 6)] == [1, 2, 1, 3]
    assert tree.room == 0 and tree.add(3, 5) is None and tree.add(1, 6) == 2
    grown = tree.tree()
    assert not grown.is_chain
    assert [grown.tokens[node] for node in grown.first_branch()] == [5, 6]
    tree.merge(Tree([9, 5, 8, 9, 6], [-1, 0, 1, 2, 1]))
    assert tree.tree() == Tree([9, 5, 6, 6], [-1, 0, 1, 0])
    chain = TreeBuilder(9, 2)
    chain.merge(Tree.chain(9, [1, 2]))
    assert chain.tree().is_chain and chain.tree() == Tree([9, 1, 2], [-1, 0, 1])


def test_room_is_what_may_still_be_added() -> None:
    """A root that takes room, or an equal guess that does."""
    tree = TreeBuilder(9, 2)
    assert tree.room == 2 and len(tree.tree()) == 1
    tree.add(0, 5)
    tree.add(0, 5)
    assert tree.room == 1
    tree.add(1, 5)
    assert tree.room == 0 and tree.add(0, 7) is None
    assert TreeBuilder(9, 0).add(0, 5) is None


def test_a_tree_that_was_taken_stays_as_it_is() -> None:
    """A tree is a value: one that goes on growing with its builder has paths that no longer fit."""
    builder = TreeBuilder(9, 3)
    builder.add(0, 5)
    taken = builder.tree()
    assert taken.paths == [(0,), (0, 1)]
    builder.add(1, 6)
    assert len(taken) == 2 == len(taken.paths) and len(builder.tree()) == 3


def test_what_does_not_fit_takes_nothing_below_it_along() -> None:
    """A guess whose parent found no room, hung on another node. It must not take the room of a
    guess that was there already, either."""
    tree = TreeBuilder(9, 2)
    tree.merge(Tree([9, 1, 2, 3, 4], [-1, 0, 0, 2, 1]))  # 3 follows 2, which was the last to fit
    assert tree.tree() == Tree([9, 1, 2], [-1, 0, 0])
    tree.merge(Tree([9, 8, 1, 2, 8], [-1, 0, 0, 0, 1]))
    assert tree.tree() == Tree([9, 1, 2], [-1, 0, 0])


def as_texts(tree: Tree) -> set[tuple[int, ...]]:
    """The guessed text up to each node, which is what a guess is."""
    return {tuple(context) for context in tree.contexts([tree.tokens[0]])}


@given(st.lists(trees(6), min_size=1, max_size=3), st.integers(0, 20))
def test_merging_is_the_union_as_far_as_there_is_room(parts: list[Tree], most: int) -> None:
    """Every text that a part guesses is guessed, once, and no other. With less room the earlier
    ones are there, in the order in which they came."""
    parts = [Tree([0, *part.guesses], part.parents) for part in parts]
    builder, whole = TreeBuilder(0, most), TreeBuilder(0, 100)
    for part in parts:
        builder.merge(part)
        whole.merge(part)
    tree, all_of_them = builder.tree(), whole.tree()
    assert as_texts(all_of_them) == set().union(*map(as_texts, parts))
    for each in (tree, all_of_them):
        assert each.tokens[0] == 0 and each.parents[0] == -1
        assert all(0 <= each.parents[node] < node for node in range(1, len(each)))
        assert len(as_texts(each)) == len(each), "two equal guesses after the same text"
    assert len(tree) == min(most + 1, len(all_of_them)) and builder.room == most + 1 - len(tree)
    assert tree == Tree(all_of_them.tokens[: len(tree)], all_of_them.parents[: len(tree)])
