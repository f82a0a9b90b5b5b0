"""Speculative sampling: the exact law of what is written, enumerated on three tokens, and measured
on a tiny model."""

from __future__ import annotations

import math
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise, product
from typing import Any

import pytest
import torch
from torch import Tensor

from chances import Law, chi_square, law_of_texts
from selfspec import LLM, SamplingParams
from selfspec.core.contract import Budget
from selfspec.core.guessing import drawn
from selfspec.core.randomness import invert
from selfspec.core.sampling import row_samplers
from selfspec.core.tree import Tree
from selfspec.draft import chain
from selfspec.draft.from_layers.early_exit import EarlyExit
from selfspec.testing import tiny_model
from selfspec.verify import rejection
from sessions import begin

# The next token depends on the last one only. Chosen so that every acceptance and every cumulated
# probability is a multiple of a sixth: then the middles of six equal parts stand for all random
# numbers, and sums over them are exact.
P = torch.tensor([[2, 2, 2], [3, 2, 1], [2, 2, 2]]).double() / 6
Q = torch.tensor([[8, 2, 2], [2, 8, 2], [3, 6, 3]]).double() / 12
TOKENS = range(3)
MIDDLES = [(part + 0.5) / 6 for part in range(6)]


def every_outcome(
    verify: Callable[[rejection.Dice], list[int]],
) -> Iterator[tuple[float, list[int]]]:
    """(probability, result) of a function of dice, over all values of the numbers that it really
    asks for."""
    open_ends: list[dict[tuple[int, int], float]] = [{}]
    while open_ends:
        known = open_ends.pop()

        def dice(depth: int, stream: int, known: dict[tuple[int, int], float] = known) -> float:
            if (depth, stream) not in known:
                raise KeyError(depth, stream)
            return known[depth, stream]

        try:
            result = verify(dice)
        except KeyError as missing:
            open_ends += [{**known, missing.args: number} for number in MIDDLES]  # type: ignore[dict-item]
        else:
            yield 6.0 ** -len(known), result


def written(tree: Tree, q: Sequence[Tensor]) -> Iterator[tuple[float, list[int]]]:
    """(probability, tokens written) of one round after the tree's root. `q`: of each guess."""
    p = P[list(tree.tokens)]

    def verify(dice: rejection.Dice) -> list[int]:
        path, choices = rejection.verified(tree, p, [None, *q], dice)
        assert path[0] == 0 and all(tree.parents[b] == a for a, b in pairwise(path))
        assert all(choices[a] == tree.tokens[b] for a, b in pairwise(path))
        return [*(tree.tokens[node] for node in path[1:]), choices[path[-1]]]

    return every_outcome(verify)


def continued(prefix: list[int], length: int) -> Iterator[tuple[float, tuple[int, ...]]]:
    """All continuations by plain sampling."""
    for rest in product(TOKENS, repeat=length - len(prefix)):
        text = [*prefix, *rest]
        yield (
            math.prod(float(P[a, b]) for a, b in zip(text[len(prefix) - 1 :], rest, strict=False)),
            tuple(text),
        )


def law_of(parents: list[int], first: int, length: int) -> Law:
    """The law of the first `length` tokens when the drafts of this shape are drawn from Q, each
    after its parent."""
    law: Law = Counter()
    for tokens in product(TOKENS, repeat=len(parents)):
        tree = Tree([first, *tokens], [-1, *parents])
        before = [tree.tokens[parent] for parent in parents]
        drawn = math.prod(float(Q[a, b]) for a, b in zip(before, tokens, strict=True))
        for chance, text in written(tree, list(Q[before])):
            for more, whole in continued(text, max(length, len(text))):
                law[whole[:length]] += drawn * chance * more
    return law


def difference(law: Law, first: int, length: int) -> float:
    """The largest difference from plain sampling."""
    plain = {text[1:]: chance for chance, text in continued([first], length + 1)}
    assert sum(law.values()) == pytest.approx(1)
    return max(abs(law.get(text, 0.0) - plain.get(text, 0.0)) for text in {*law, *plain})


# of each guess: its parent, a node, where 0 is the text's last token
SHAPES = {
    "none": [],
    "one": [0],
    "chain": [0, 1],
    "siblings": [0, 0],
    "three": [0, 0, 0],
    "tree": [0, 0, 1, 2],
}


@pytest.mark.parametrize("first", TOKENS)
@pytest.mark.parametrize("shape", SHAPES)
def test_the_law_is_that_of_plain_sampling(shape: str, first: int) -> None:
    """The one property that matters. A wrong ratio, residual, order of siblings or bonus shows as a
    wrong probability."""
    assert difference(law_of(SHAPES[shape], first, 3), first, 3) < 1e-12, (
        f"{shape} after token {first}"
    )


def test_siblings_without_replacement() -> None:
    """A second sibling that cannot repeat the first has a q of its own, renormalised; its law must
    come out exact too."""
    law: Law = Counter()
    for first_child, second_child in product(TOKENS, repeat=2):
        rest = Q[0].clone()
        rest[first_child] = 0
        rest /= rest.sum()
        drawn = float(Q[0, first_child] * rest[second_child])
        if drawn:
            siblings = Tree([0, first_child, second_child], [-1, 0, 0])
            for chance, text in written(siblings, [Q[0], rest]):
                law[tuple(text[:1])] += drawn * chance
    assert difference(law, 0, 1) < 1e-12


def test_every_sibling_has_a_number_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """A second sibling that is tested with the number by which the first was rejected. It needs
    both tests to be open: here each is passed half of the time."""
    here = sys.modules[__name__]
    monkeypatch.setattr(here, "P", torch.tensor([[4, 13, 7], [8, 8, 8], [8, 8, 8]]).double() / 24)
    monkeypatch.setattr(here, "Q", torch.tensor([[8, 12, 4], [8, 8, 8], [8, 8, 8]]).double() / 24)
    for shape in ("siblings", "three"):
        assert difference(law_of(SHAPES[shape], 0, 1), 0, 1) < 1e-12


BROKEN: dict[str, tuple[str, Callable[..., object]]] = {
    "no residual": ("residual", lambda p, q: p),
    "residual not cut at 0": ("residual", lambda p, q: (p - q).abs() / (p - q).abs().sum()),
    "accepts the likelier token only": (
        "accepted",
        lambda p, q, token, number: bool(p[token] >= q[token]),
    ),
    "accepts always": ("accepted", lambda p, q, token, number: True),
}


@pytest.mark.parametrize("fault", BROKEN)
def test_wrong_verifiers_are_caught(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The negative control: a test that passes them too would prove nothing."""
    monkeypatch.setattr(rejection, *BROKEN[fault])
    assert (
        max(difference(law_of(SHAPES["siblings"], first, 1), first, 1) for first in TOKENS) > 0.01
    )


def test_draft_that_cannot_have_been_drawn() -> None:
    """A drafter that pairs its tokens with another distribution would be accepted always."""
    with pytest.raises(AssertionError, match="drawn from"):
        rejection.verified(
            Tree.chain(0, [1]),
            P[:2],
            [None, torch.tensor([1.0, 0.0, 0.0])],
            lambda depth, stream: 0.5,
        )


def test_draft_that_does_not_say_what_it_was_drawn_from() -> None:
    """A tree of which only some guesses were drawn: the others would be accepted by a rule that is
    not theirs."""
    with pytest.raises(AssertionError, match="a drawn draft comes with its distribution"):
        rejection.verified(
            Tree([0, 0, 2], [-1, 0, 0]), P, [None, Q[0], None], lambda depth, stream: 0.99
        )


def test_rounding_leaves_no_room_for_a_wrong_token() -> None:
    """float32 sums that are off by 1e-7 make a residual of rounding errors; q of nearly p must be
    accepted nearly always."""
    p = torch.full((2, 50_000), 1 / 50_000)
    q = p[0] * (1 + 1e-5)
    path, _ = rejection.verified(Tree.chain(0, [7]), p, [None, q], lambda depth, stream: 1 - 2**-53)
    assert path == [0, 1]
    assert torch.equal(rejection.residual(p[0], q), p[0]), (
        "nothing is left, so p itself is the remainder"
    )


# ------------------------------------------------------------------------ on a model, by the engine

SAMPLING = SamplingParams(temperature=1.4, top_k=3, seed=11)
PROMPT = [70, 80]
ROWS = 2500
LENGTH = 4
CRITICAL = (
    140.0  # of chi-square with 80 degrees of freedom; exceeded by chance once in 25,000 times
)


@pytest.fixture(scope="module")
def llm():
    """Its last layers change little, so that an exit after two of the four is often right and often
    wrong."""
    model = tiny_model("llama", 4, tie_word_embeddings=False)
    for layer in model.model.layers[2:]:
        layer.self_attn.o_proj.weight *= 0.4
        layer.mlp.down_proj.weight *= 0.4
    return LLM.from_pretrained(model)


@pytest.fixture(scope="module")
def reference(llm) -> Law:
    return law_of_texts(llm, PROMPT, SAMPLING, LENGTH)


def distance(llm, reference: Law, **options: object) -> float:
    """Chi-square of ROWS texts, each with a seed of its own."""
    results = llm.generate(
        [PROMPT] * ROWS, sampling=SAMPLING, max_new_tokens=LENGTH, eos=[], **options
    )
    return chi_square((result.tokens for result in results), reference)


DRAWN = {"draft": EarlyExit(layer=2, sample=True), "control_options": {"tokens": 2}}


def test_drafts_that_are_drawn_leave_the_distribution_alone(llm, reference) -> None:
    """The hook in the engine: p and q of other contexts or positions, random numbers used twice."""
    assert len(reference) == 81
    plain, drawn = distance(llm, reference), distance(llm, reference, **DRAWN)
    assert plain < CRITICAL and drawn < CRITICAL, (
        f"chi-square {plain:.0f} plain, {drawn:.0f} drafted"
    )
    stats = llm.generate([PROMPT] * 20, sampling=SAMPLING, max_new_tokens=LENGTH, eos=[], **DRAWN)[
        0
    ].call
    assert 0.2 < stats.acceptance < 0.95, (
        "nothing was rejected, or nothing accepted, so nothing was tested"
    )


def likeliest(*args: Any) -> list[tuple[int, Tensor]]:
    return [(int(q.argmax()), q) for _, q in drawn(*args)]


WRONG: dict[str, tuple[object, str, object]] = {
    "argmax paired with softmax": (chain, "drawn", likeliest),
    "no residual": (rejection, "residual", lambda p, q: p),
    "bonus at another temperature": (rejection, "invert", lambda p, number: invert(p**4, number)),
}


@pytest.mark.parametrize("fault", WRONG)
def test_wrong_sampling_is_caught(
    llm, reference, fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The negative control of the chi-square test."""
    monkeypatch.setattr(*WRONG[fault])
    assert distance(llm, reference, **DRAWN) > CRITICAL


def test_greedy_rows_are_untouched(llm) -> None:
    """A greedy row beside one whose drafts are drawn: they are verified in one pass, this one by
    comparing and that one by rejection."""
    prompts, greedy = [list(b"once upon"), list(b"the")], SamplingParams()
    expected = llm.generate(prompts[0], max_new_tokens=30, eos=[])
    drafter = EarlyExit(layer=2, sample=True)
    alone = llm.generate(prompts[0], max_new_tokens=30, eos=[], draft=drafter)
    beside = llm.generate(
        prompts, sampling=[greedy, SAMPLING], max_new_tokens=30, eos=[], draft=drafter
    )
    assert alone.tokens == beside[0].tokens == expected.tokens
    assert alone.stats.accepted > 0


def test_drawn_texts_depend_on_seeds_alone(llm) -> None:
    """Numbers that depend on neighbours or are consumed: the same seed would not give the same text
    again."""
    prompts = [list(b"once upon"), list(b"the"), list(b"a longer one")]
    options = {"max_new_tokens": 25, "eos": [], "draft": EarlyExit(layer=2, sample=True)}
    together = [
        r.tokens
        for r in llm.generate(prompts, sampling=SamplingParams(temperature=1.0, seed=3), **options)
    ]
    alone = [
        llm.generate(p, sampling=SamplingParams(temperature=1.0, seed=3 + i), **options).tokens
        for i, p in enumerate(prompts)
    ]
    assert together == alone


@pytest.mark.parametrize("vocabulary", [0, 100])
def test_what_a_draft_was_drawn_from_is_reported(llm, vocabulary: int) -> None:
    """q of the full head beside drafts of a partial one; a row without drafts, or a greedy one,
    that claims to have been drawn from something."""
    prompts = [list(b"once upon"), list(b"the")]
    prompts.append(list(b"greedy"))
    samplers = row_samplers([SAMPLING, SAMPLING, SamplingParams()], prompts)
    drafter = EarlyExit(layer=2, vocabulary=vocabulary, sample=True)
    session = begin(drafter, llm.model, prompts, samplers, read=True)
    draft, none, greedy = session.propose([0, 1, 2], prompts, Budget([4, 0, 4]))
    assert draft.probs is not None and draft.probs[0] is None
    assert not none.guesses and none.probs == [None]
    assert len(greedy.guesses) == 4 and greedy.probs is None
    q = torch.stack(list(draft.probs[1:]))
    assert q.shape == (4, llm.model.shape.vocabulary)
    assert torch.allclose(q.sum(-1), torch.ones(4)) and (q > 0).sum(-1).tolist() == [3] * 4
    assert all(q[index, token] > 0 for index, token in enumerate(draft.guesses))
    assert vocabulary == 0 or q[:, vocabulary:].sum() == 0
