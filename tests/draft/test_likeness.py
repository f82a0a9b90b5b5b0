"""How likely a token of a copy is the model's own, and how much the copy drafts by that."""

from __future__ import annotations

import math
import random

import pytest
import torch

from selfspec import LLM
from selfspec.core.contract import Budget, Draft, Outcome, RowOutcome
from selfspec.core.price import Price
from selfspec.core.sampling import Sampler, SamplingParams
from selfspec.core.tree import Tree
from selfspec.draft.base import Target
from selfspec.draft.from_layers.quantised import Quantised, _Session
from selfspec.draft.likeness import LIKELY, Likeness
from selfspec.model.copies import copy_in
from selfspec.testing import tiny_llm

TEXT = [*b"once upon a time, once upon a time, once"]


def normal(lead: float, off: float) -> float:
    return 0.5 * (1 + math.erf(lead / off / math.sqrt(2)))


@pytest.mark.parametrize("off", [0.05, 3.0])
def test_it_says_as_often_as_it_is_right(off: float) -> None:
    """A chance by leads as such, of whatever model; or of how much they are off twice, or not its
    root: all of which says too much or too little."""
    rng, likeness = random.Random(3), Likeness()
    likeness.learn([], [rng.gauss(0, off) for _ in range(2000)])
    for lead in (0.0, 0.5 * off, off, 2 * off):
        assert likeness.chance(lead) == pytest.approx(normal(lead, off), abs=0.03)
        hits = sum(rng.gauss(lead, off) > 0 for _ in range(4000)) / 4000
        assert likeness.chance(lead) == pytest.approx(hits, abs=0.04)


def test_without_a_lead_or_anything_known_it_says_what_was_seen() -> None:
    """Certainty from a few lucky leads; a sampled token thought as likely as a lead says, which
    is another token's."""
    likeness = Likeness()
    assert likeness.chance(None) == likeness.chance(9.0) == LIKELY
    likeness.learn([False] * 200, [0.1, float("nan"), float("inf")])
    assert likeness.chance(None) == likeness.chance(9.0) < 0.1
    likeness.learn([], [0.1] * 20)
    assert likeness.chance(9.0) == 1.0 and likeness.chance(None) < 0.1


def test_leads_that_are_never_off_are_certain() -> None:
    """A division by nothing, where a copy is the model itself."""
    likeness = Likeness()
    likeness.learn([True] * 20, [0.0] * 20)
    assert likeness.chance(0.1) == 1.0 and likeness.chance(0.0) == 0.5


def test_a_chance_that_is_known_needs_no_margin() -> None:
    """Guesses that are sure to be right left out, since a price has more in it for those that may
    seem likely by luck only."""
    costs = [0.0, 0.5, 1.0, 1.5]
    plain, dear = Price(costs), Price([1.3 * cost for cost in costs], 1.3)
    for price in (plain, dear):
        assert price.goes_on(0.51, 0) and not price.goes_on(0.49, 2)
        assert not price.goes_on(1.0, 3), "so many may be drafted and no more"
    assert plain.best([0.6, 0.6, 0.6]) == 3 and dear.best([0.6, 0.6, 0.6]) == 0


@pytest.fixture(scope="module")
def llm() -> LLM:
    found = tiny_llm(seed=4)
    if found.model.ops.kernel != "native":
        pytest.skip("no C++ compiler found (g++ or clang++)")
    return found


def session(llm: LLM, **sampling: float) -> _Session:
    cache = llm.model.new_cache(1, 128)
    target = Target(llm.model, cache)
    llm.model.prefill([TEXT[:-1]], cache)
    at_work = Quantised(weights="int8").start(target)
    assert isinstance(at_work, _Session)
    at_work.admit(0, TEXT, Sampler(SamplingParams(**sampling), prompt_length=len(TEXT)))
    at_work._likeness = Likeness()
    return at_work


def lengths(at_work: _Session, cost: float, most: int = 12) -> int:
    price = Price([cost * count for count in range(most + 1)])
    (draft,) = at_work.propose([0], [TEXT], Budget([most], price=price))
    return len(draft.guesses)


def test_a_draft_ends_where_more_would_not_pay(llm: LLM) -> None:
    """Drafts as long as asked for, however doubtful; or ones that stop although the copy is sure,
    or at a price that every token is worth."""
    for off, cost, expected in ((1e-9, 0.9, 12), (1e9, 0.9, 1), (1e9, 0.3, 2), (1e9, 0.0, 12)):
        at_work = session(llm)
        at_work._likeness.learn([], [off] * 50)
        assert lengths(at_work, cost) == expected, (off, cost)


def test_sampled_tokens_are_as_likely_as_they_were(llm: LLM) -> None:
    """The lead of the likeliest token taken for that of one that was drawn."""
    at_work = session(llm, temperature=1.0, seed=5)
    at_work._likeness.learn([True, False] * 200, [1e-9] * 50)
    assert lengths(at_work, 0.9) == 1 and lengths(at_work, 0.2) == 3


def test_it_learns_from_what_was_verified_and_from_nothing_else(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tokens behind one that was not kept, which the model never judged; the logits of another
    row or node; what another drafter guessed."""
    at_work, heard = session(llm), list[tuple[list[bool], list[float]]]()
    monkeypatch.setattr(at_work._likeness, "learn", lambda *both: heard.append(both))
    (draft,) = at_work.propose([0], [TEXT], Budget([5]))
    leads = [lead for _, lead in at_work._rows[0].chain]
    logits = torch.zeros(2 + 6, 256)  # behind the nodes of another row
    for node, lead in enumerate(leads):
        assert lead is not None
        logits[2 + node, lead.token] = lead.logits + 0.25
    other = RowOutcome(1, [1, 2], Draft(Tree.chain(1, [2])), [0], [3], [3, 3])
    at_work._rows[1] = at_work._rows[0].__class__(at_work._rows[0].sampler, frozenset(), False)
    for kept in (5, 2):
        path = range(kept + 1)
        text = [*TEXT, *draft.guesses[:kept], 9]
        own = RowOutcome(0, text, draft, path, text[len(TEXT) :], [9] * 6)
        at_work._learn(Outcome([other, own], logits, logits))
    assert [list(agreed) for agreed, _ in heard] == [[True] * 5, [True, True, False]]
    assert heard[0][1] == pytest.approx([0.25] * 5) and heard[1][1] == pytest.approx([0.25] * 3)
    strange = RowOutcome(0, TEXT, Draft(Tree.chain(TEXT[-1], draft.guesses)), [0], [9], [9] * 6)
    at_work._learn(Outcome([strange], torch.empty(0), torch.empty(0)))
    assert heard[2] == ([], [])


def test_the_next_request_begins_with_what_was_found(llm: LLM) -> None:
    """Drafts that are cut short at first in each request."""
    llm.generate(TEXT, draft="quantised", max_new_tokens=40, eos=[])
    copy = copy_in(llm.model, "auto")
    known = copy.once(Likeness, Likeness)
    assert known._count > 8 and known is copy.once(Likeness, Likeness)
