"""Trees that lookups fill, and drafts that are compared with the text instead of being verified."""

from __future__ import annotations

import heapq
import random
from itertools import accumulate, count

import pytest

from selfspec.core.price import Price
from selfspec.core.tree import Tree, TreeBuilder
from selfspec.draft.growing import Guesses, grow
from selfspec.draft.trial import Trial


def by_heap(most, following, least):
    """The same by taking every guess into account: slow and plain."""
    tree, order, heap = TreeBuilder(0, most), count(), []

    def push(parent, chance, place):
        for share, token, behind in following(place):
            heapq.heappush(heap, (-chance * share, next(order), parent, token, behind))

    push(0, 1.0, 0)
    while heap and tree.room and -heap[0][0] >= least:
        loss, _, parent, token, place = heapq.heappop(heap)
        push(tree.add(parent, token), -loss, place)
    return tree.tree()


def places(dice, chances):
    """Six places with up to five guesses each, of these chances."""
    return {
        place: [
            (dice.choice(chances), token, dice.randrange(6))
            for token in dice.sample(range(9), dice.randrange(6))
        ]
        for place in range(6)
    }


@pytest.mark.parametrize("least", [0.0, 0.2])
@pytest.mark.parametrize("most", [0, 1, 3, 7, 20])
def test_what_there_is_no_room_for_is_left_out_and_nothing_else(most, least):
    """A guess dropped too early: a likelier one found later may not push out what it should not.
    Equal chances, of which the first counts."""
    for seed in range(40):
        dice = random.Random(seed)
        table = places(dice, [0.1, 0.3, 0.3, 0.5, 0.9])
        tree = Guesses(0, most)
        grow(tree, 0, table.__getitem__, least)
        assert tree.tree() == by_heap(most, table.__getitem__, least)


def test_a_tree_ends_where_guesses_cost_more_than_they_bring():
    """Guesses drafted that are not worth their price, or the room taken for the price. Those that
    only cheaper ones behind would have paid for go too."""

    def grown(costs, chance=0.8):
        tree = Guesses(0, 4, None if costs is None else Price(costs))
        grow(tree, 0, lambda place: [(chance, place + 1, place + 1)])
        return list(tree.worthy().guesses)

    assert grown(None) == grown([0.0] * 5) == [1, 2, 3, 4]
    assert grown([0.0, 0.6, 1.2, 1.8, 2.4]) == [1, 2]
    assert grown([0.0, 0.9, 1.8, 2.7, 3.6]) == []
    assert grown([0.0, 0.9, 0.9, 2.0, 2.0]) == [1, 2]
    assert grown([0.0, 0.5, 1.5, 1.5, 1.5], chance=0.6) == [1], "the step was hoped for in vain"


def test_nothing_is_looked_up_behind_guesses_in_vain():
    """Work, and room that another drafter's likelier guesses would need, for what is left out."""
    asked = []

    def following(place):
        asked.append(place)
        return [(0.5, place + 1, place + 1)]

    tree = Guesses(0, 4, Price([0.0, 0.3, 0.6, 0.9, 1.2]))
    grow(tree, 0, following)
    assert asked == [0, 1] and tree.room == 3


@pytest.mark.parametrize("most", [3, 7, 20])
def test_what_is_not_followed_would_have_changed_nothing(most):
    """A place that is not looked up for its guesses could not pay, though one of them would."""
    for seed in range(60):
        dice = random.Random(seed)
        table = places(dice, [0.05, 0.2, 0.4, 0.9, 0.97])
        costs = [0.0, *accumulate(dice.choice([0.0, 0.05, 0.1, 0.5]) for _ in range(most))]
        tree, every = Guesses(0, most, Price(costs)), Guesses(0, most, Price(costs))
        every.hopeless = lambda chance: False
        grow(tree, 0, table.__getitem__)
        grow(every, 0, table.__getitem__)
        assert tree.worthy() == every.worthy()


TREE = Tree([5, 1, 2, 3, 4], [-1, 0, 0, 1, 3])  # 5 -> 1 -> 3 -> 4, and 5 -> 2


@pytest.mark.parametrize(
    ("text", "path"),
    [
        ([5], None),
        ([5, 1], None),
        ([5, 9], [0]),
        ([5, 2], [0, 2]),
        ([5, 1, 2], [0, 1]),
        ([5, 1, 3, 4], [0, 1, 3, 4]),
        ([5, 1, 3, 4, 4], [0, 1, 3, 4]),
    ],
)
def test_guesses_come_true_as_far_as_the_text_goes_along(text, path):
    """A guess taken for wrong because its token has not come yet, or a sibling's child for its
    own."""
    trial = Trial({3: (1, TREE)})
    trial.compare(8, [5, 9])
    trial.compare(3, text)
    assert trial.paths.get(3) == path and trial.over == (path is not None)


def test_what_is_known_stays_known():
    """Paths that change when the text goes on."""
    trial = Trial({3: (1, TREE), 4: (1, TREE)})
    trial.compare(3, [5, 2])
    trial.compare(3, [5, 2, 7])
    assert trial.paths == {3: [0, 2]} and not trial.over
    trial.drop(4)
    assert trial.over and trial.paths == {3: [0, 2]}
