"""Lookups by kernels draft what the same lookups in Python draft, tree by tree."""

from __future__ import annotations

import random
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from selfspec import LLM
from selfspec.core.contract import Budget, Outcome, RowOutcome
from selfspec.core.price import Price
from selfspec.core.sampling import row_samplers
from selfspec.draft.base import DraftSession, Target
from selfspec.draft.from_text import recycle
from selfspec.draft.from_text.ngram import LookingUp, NGram
from selfspec.draft.from_text.recycle import TokenRecycling, _Recycling, _Table
from selfspec.draft.hybrid import Hybrid, _Together
from selfspec.draft.voting import NativelyTogether, natively
from selfspec.model.compute.cpu import lookups
from selfspec.testing import near_identity_model
from selfspec.trained.files import TrainedPart
from selfspec.trained.successors import SUCCESSORS, Successors

SAMPLER = row_samplers(None, [[1]], ())[0]
WORDS = 6  # of the vocabulary: so few that texts repeat themselves


@pytest.fixture(autouse=True)
def few_pairs(monkeypatch):
    """A table that forgets."""
    monkeypatch.setattr(recycle, "PAIRS_KEPT", 12)


def counted(dice: random.Random) -> Successors:
    """What a model might say after tokens, pairs and maybe triples; some say less than others."""
    tensors = {}
    for size, name in enumerate(("tokens", "pairs", "triples")[: dice.choice([2, 3])], 1):
        keys = sorted(dice.sample(range(WORDS**size), WORDS**size // 2))
        each = dice.choice([1, 3])
        chances = [sorted([dice.choice([0, 0.1, 0.4, 1]) for _ in range(each)])[::-1] for _ in keys]
        tokens = [dice.sample(range(WORDS), each) for _ in keys]
        tensors[f"{name}.keys"] = torch.tensor(keys)
        kinds = dice.choice([(torch.uint16, torch.float16), (torch.int32, torch.bfloat16)])
        tensors[f"{name}.successors"] = torch.tensor(tokens, dtype=kinds[0])
        tensors[f"{name}.chances"] = torch.tensor(chances, dtype=kinds[1])
    return Successors(TrainedPart(SUCCESSORS, {}, {"vocabulary": WORDS}, tensors))


def both(dice: random.Random) -> list[DraftSession]:
    """The same two lookups by kernels and in Python."""
    shortest = dice.choice([1, 1, 2])
    matching = NGram(
        longest=shortest + dice.choice([0, 3, 9]),
        shortest=shortest,
        branches=dice.choice([1, 3]),
        least=dice.choice([0.0, 0.15]),
    )
    recycling = TokenRecycling(successors=dice.choice([1, 4, 7]), pairs=dice.random() < 0.7)
    trained = counted(dice) if dice.random() < 0.6 else None
    made = []
    for _ in range(2):
        numbers = partial(recycling._native, trained)
        said = _Recycling(lambda: _Table(recycling, trained), recycling.successors, numbers=numbers)
        made.append((LookingUp(matching), said))
    by_kernels = natively(*made[0])
    if by_kernels is None:
        pytest.skip("no compiler here, so lookups are in Python")
    return [by_kernels, _Together(*made[1])]


def some(dice: random.Random, count: int) -> list[int]:
    return [dice.randrange(WORDS) for _ in range(count)]


def price_of(dice: random.Random, most: int) -> Price | None:
    costs = [0.0]
    for _ in range(most):
        costs.append(costs[-1] + dice.choice([0, 0.02, 0.2]))
    return Price(costs) if dice.random() < 0.6 else None


@given(seed=st.integers(0, 10**6))
@settings(max_examples=60)
def test_kernels_draft_what_python_drafts(seed: int) -> None:
    """Votes that are lost or multiplied in another order, ties, a text whose end was taken back,
    one that outgrows its buckets, rows that end and begin anew, pairs that are forgotten too soon,
    and a price that is not asked."""
    dice = random.Random(seed)
    sessions = both(dice)
    texts: dict[int, list[int]] = {}
    for _ in range(dice.choice([4, 25])):
        row = dice.randrange(2)
        if row not in texts or dice.random() < 0.1:
            for session in sessions if row in texts else ():
                session.drop(row)
            texts[row] = some(dice, dice.choice([1, 2, 20, 250]))
            for session in sessions:
                session.admit(row, texts[row], SAMPLER)
        text = texts[row]
        if dice.random() < 0.2:  # another drafter's guesses, of which some will be wrong
            guessed = [text + some(dice, dice.choice([1, 5]))]
            drafts = [each.propose([row], guessed, Budget([4])) for each in sessions]
            assert drafts[0] == drafts[1]
        most = dice.choice([0, 1, 7, 20])
        budget = Budget([most], price=price_of(dice, most))
        (first,), (second,) = (each.propose([row], [text], budget) for each in sessions)
        assert first == second
        kept = some(dice, dice.choice([1, 1, 3]))
        best = [[*dice.sample(range(WORDS), WORDS), 7] for _ in first.tree.tokens]
        texts[row] = text = text + kept
        outcome = Outcome(
            [RowOutcome(row, text, first, [0], kept, ())], torch.empty(0), torch.empty(0), best
        )
        for session in sessions:
            session.observe(outcome)


def watched(held: lookups.Lookups, name: str) -> list[tuple]:
    """The arguments of all calls of one of its kernels from now on."""
    kernels, calls = held.native, []

    class Watched:
        def __getattr__(self, asked):
            kernel = getattr(kernels, asked)
            if asked != name:
                return kernel
            return lambda *arguments: calls.append(arguments) or kernel(*arguments)

    held.native = Watched()
    return calls


def test_a_long_text_is_entered_once() -> None:
    """All of a long text handed over in every round."""
    session = both(random.Random(3))[0]
    text = some(random.Random(0), 5000)
    session.admit(0, text, SAMPLER)
    session.propose([0], [text], Budget([3]))
    entered = watched(session._rows[0], "enter")
    session.propose([0], [[*text, 1]], Budget([3]))
    assert [count for *_, count in entered] == [lookups.WITHDRAWN + 1]


def test_kernels_hear_of_trees_when_somebody_asks() -> None:
    """Each of many rows told of each round, though few are asked; what was told forgotten; or ever
    more of it held for a row that nobody asks."""
    session = both(random.Random(3))[0]
    session.admit(0, [1, 2], SAMPLER)
    held = session._rows[0]
    told = watched(held, "learn")
    for before in range(3):
        held.learn(before, [2], [-1], [[3, 4]])
    assert not told
    tokens = list(session.propose([0], [[1, 2]], Budget([3]))[0].tree.tokens)
    assert [before for _, before, *_ in told] == [0, 1, 2] and 3 in tokens
    session.propose([0], [[1, 2]], Budget([3]))
    assert [before for _, before, *_ in told] == [0, 1, 2], "nothing is told twice"
    for _ in range(lookups._UNTOLD):
        held.learn(1, [2], [-1], [[3, 4]])
    assert len(told) == 3 + lookups._UNTOLD and not held._untold


def test_states_end_with_their_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory that nobody gives back, or twice."""
    session, ended = both(random.Random(3))[0], []
    session.admit(0, [1, 2], SAMPLER)
    session.admit(1, [1, 2], SAMPLER)
    kernels = session._rules.native
    monkeypatch.setattr(kernels, "end", ended.append)
    session.drop(0)
    assert len(ended) == 1
    del session
    assert len(set(ended)) == 2


def test_hybrid_looks_up_natively_where_it_can(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels that nobody asks; tables that other rows share, candidates that are only named,
    another drafter and a machine without a compiler, for which there are none."""
    target = Target(LLM.from_pretrained(near_identity_model(0.7)).model, None)
    started = Hybrid().start(target)
    if lookups._native() is None:
        pytest.skip("no compiler here, so lookups are in Python")
    assert isinstance(started, NativelyTogether) and started.ranks == 7
    shared = Hybrid(then_options={"keep_table": True}).start(target)
    assert isinstance(shared, _Together)
    assert isinstance(Hybrid().start_naming(target), _Together)
    assert not isinstance(Hybrid(then="ngram").start(target), NativelyTogether)
    long = {"shortest": 9, "longest": 20}
    assert isinstance(Hybrid(first_options=long).start(target), _Together)
    monkeypatch.setattr(lookups, "_native", lambda: None)
    assert isinstance(Hybrid().start(target), _Together)
