"""Sources that guess together: what they say is multiplied, none of it lost or counted twice."""

from __future__ import annotations

import random

import pytest
import torch

from selfspec.core.price import Price
from selfspec.draft.from_text.ngram import LOOK_BACK, NGram, _Index
from selfspec.draft.from_text.recycle import PAIR_VOTES, TOKEN_VOTES, TokenRecycling, _Table
from selfspec.draft.growing import Guesses
from selfspec.draft.voting import DOUBT, LEAST, START, TEACHES, Voter, guess_together
from selfspec.trained.files import TrainedPart
from selfspec.trained.successors import SUCCESSORS, SUREST, VOTES, Successors


class Says(Voter):
    """The same factors after every context, and what it has heard."""

    def __init__(self, factors, heard=None):
        self.factors, self.heard, self.asked = factors, heard, []

    def votes(self, context):
        self.asked.append(context)
        return self.factors


def chances_of(*voters, text=(1, 2), most=3):
    """First guesses, each with its chance."""
    tree = Guesses(text[-1], most)
    guess_together(tree, text, voters)
    grown = tree.tree()
    first = [node for node in range(1, len(grown)) if grown.parents[node] == 0]
    return {grown.tokens[node]: tree._chances[node - 1] for node in first}


def test_what_sources_say_is_multiplied():
    """Chances of one source alone; factors that are added; tokens that nobody names left out of
    what all are divided by; a source that speaks twice of a token heard once."""
    found = chances_of(Says([(5, 8.0), (6, 2.0)]), Says([(5, 3.0), (7, 4.0), (7, 0.5)]), most=3)
    odds = {5: START * 24, 6: START * 2, 7: START * 2}
    every = 1 + DOUBT * odds[5] + sum(odds.values())
    assert found == {5: pytest.approx(odds[5] / every)}, "the likeliest is followed first"
    wider = chances_of(Says([(5, 8.0), (6, 2.0)]), Says([(5, 3.0), (7, 4.0), (7, 0.5)]), most=40)
    assert wider == {token: pytest.approx(odd / every) for token, odd in odds.items()}


def test_nothing_is_certain_and_the_unlikely_is_no_guess():
    """A source so sure of itself that a chain of fifty guesses would look free; hundreds of guesses
    that are as good as none."""
    sure = chances_of(Says([(5, 1e9)]), most=1)
    assert sure[5] == pytest.approx(1 / (1 + DOUBT), rel=1e-3)
    assert chances_of(Says([(5, 0.5 * LEAST / START)])) == {}
    assert chances_of(Says([])) == {} and chances_of() == {}


def test_a_guess_that_teaches_is_worth_more():
    """The model's word after a wrong guess is worth something where nobody has heard it, and less
    the likelier the guess is right."""
    plain = chances_of(Says([(5, 4.0), (6, 4.0)]), most=9)
    heard = chances_of(Says([(5, 4.0), (6, 4.0)], heard={(2, 5)}), most=9)
    assert heard[5] == plain[5] == plain[6]
    assert heard[6] == pytest.approx(plain[6] * (1 + TEACHES * (1 - plain[6])))


def test_sources_are_asked_behind_guesses_too():
    """A context that forgets the guesses, or grows without end."""
    voter, text = Says([(5, 1e6)]), list(range(20))
    tree = Guesses(text[-1], 3)
    guess_together(tree, text, [voter])
    assert voter.asked == [tuple(text[-8:]), (*text[-7:], 5), (*text[-6:], 5, 5)]
    assert list(tree.tree().parents) == [-1, 0, 1, 2]


def test_least_and_price_end_a_tree():
    """A least chance that is not asked for, and guesses that cost more than they bring."""
    text, voter = [1, 2], Says([(5, 20.0), (6, 5.0)])
    for least, price in ((0.3, None), (0.0, Price([0.3 * count for count in range(20)]))):
        tree = Guesses(2, 12, price)
        guess_together(tree, text, [voter], least)
        kept = len(tree.worthy().guesses)
        assert 1 <= kept < 12 and min(tree._chances[:kept]) >= 0.3


def plain_followed(text, context, longest, shortest, most):
    """The same by comparing at every place."""
    found = {}
    for size in range(min(longest, len(context)), shortest - 1, -1):
        places = range(len(text) - 1, size - 1, -1)
        ends = [at for at in places if tuple(text[at - size : at]) == tuple(context[-size:])]
        for at in ends[:LOOK_BACK]:
            if text[at] in found:
                found[text[at]][1] += size == 1
            elif len(found) < most:
                matched = size
                limit = min(8, at, len(context))
                while size == longest and matched < limit:
                    if text[at - matched - 1] != context[-matched - 1]:
                        break
                    matched += 1
                found[text[at]] = [matched, int(size == 1)]
    return found


@pytest.mark.parametrize(("longest", "shortest", "most"), [(4, 1, 3), (4, 1, 1), (3, 2, 5)])
def test_what_followed_is_what_a_plain_search_finds(longest, shortest, most):
    """Matches that are too short or too long, places counted twice, guesses taken for text."""
    for seed in range(40):
        dice = random.Random(seed)
        text = [dice.randrange(4) for _ in range(dice.randrange(1, 60))]
        index = _Index(shortest, longest)
        index.enter(text)
        behind = [dice.randrange(4) for _ in range(dice.randrange(3))]
        context = tuple([*text, *behind][-8:])
        assert index.followed(text, context, most) == plain_followed(
            text, context, longest, shortest, most
        )


def table_of(vocabulary=50, **named):
    """A part with these contexts: keys to successors with chances."""
    tensors = {}
    for size, name in enumerate(("tokens", "pairs", "triples"), 1):
        rows = sorted(named.get(name, {}).items())
        keys = [sum(t * vocabulary**at for at, t in enumerate(reversed(k))) for k, _ in rows]
        tensors[f"{name}.keys"] = torch.tensor(keys, dtype=torch.int64)
        for at, what in enumerate(("successors", "chances")):
            numbers = [[pair[at] for pair in known] for _, known in rows]
            kind = torch.float32 if at else torch.int32
            tensors[f"{name}.{what}"] = torch.tensor(numbers, dtype=kind).view(len(rows), -1)
        assert all(len(key) == size for key, _ in rows)
    return Successors(TrainedPart(SUCCESSORS, {}, {"vocabulary": vocabulary}, tensors))


def test_trained_votes_are_of_the_longest_context_and_of_the_last_token():
    """A pair that is heard though three tokens are known; a last token that is not heard beside
    them; a chance of 1, whose odds have no end."""
    single, pair, triple = [(7, 0.2)], [(8, 0.5)], [(9, 1.0)]
    trained = table_of(tokens={(3,): single}, pairs={(2, 3): pair}, triples={(1, 2, 3): triple})

    def factor(chance, several):
        scale, power = VOTES[0 if several else 1]
        return pytest.approx(scale * (chance / (1 - min(chance, SUREST))) ** power, rel=1e-5)

    last = (7, factor(0.2, False))
    assert list(trained.votes((4, 1, 2, 3))) == [(9, factor(1.0, True)), last]
    assert list(trained.votes((4, 2, 3))) == [(8, factor(0.5, True)), last]
    assert list(trained.votes((2, 3))) == [(8, factor(0.5, True)), last]
    assert list(trained.votes((9, 3))) == [last] == list(trained.votes((3,)))
    assert list(trained.votes((9, 9))) == []


def test_a_row_s_own_successors_vote_by_rank():
    """Ranks that are mixed up, pairs that are asked though they are not kept, and what was heard
    after a pair taken for what was not."""
    table = _Table(TokenRecycling())
    table.learn([(1, 2), (9, 3)], [[5, 6], [7]])
    votes = table.votes((8, 1, 2))
    assert votes == [
        *zip((5, 6), PAIR_VOTES, strict=False), *zip((5, 6), TOKEN_VOTES, strict=False)
    ]  # fmt: skip
    assert table.votes((4, 3)) == [(7, TOKEN_VOTES[0])]
    assert (1, 2) in table.heard and (4, 3) not in table.heard
    alone = _Table(TokenRecycling(pairs=False))
    alone.learn([(1, 2)], [[5, 6]])
    assert alone.votes((1, 2)) == list(zip((5, 6), TOKEN_VOTES, strict=False))
    assert alone.heard is None


def test_branches_limit_what_a_lookup_names():
    """`branches=1` that drafts a tree nevertheless."""
    text = [1, 2, 1, 3, 1, 4, 1]
    session = NGram(branches=2).start(None)
    assert [token for token, _ in session.voter(0, text).votes((1,))] == [4, 3]
