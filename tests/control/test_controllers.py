"""The controllers: what they allow, what they learn, and how near the best length they come in
worlds where it is known.

No clock: times are made up, so nothing here depends on the machine.
"""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest

from selfspec import OptionError
from selfspec.control.adaptive import Adaptive
from selfspec.control.confidence import Confidence
from selfspec.control.cost_aware import CostAware
from selfspec.control.costs import CostModel
from selfspec.control.fixed import FixedLength
from selfspec.control.registry import BUILT_IN, controller_class, controller_names, make_controller
from selfspec.core.contract import Budget, RoundTime
from selfspec.draft import chain
from selfspec.testing import tiny_llm
from worlds import LINEAR, MEMORY_BOUND, World, outcome_of, play

ANY = RoundTime(0.1, 1.0, 0.0)


# -------------------------------------------------------------------------------- names and options


def test_every_controller_has_a_name() -> None:
    """A controller that was added without its name, or under another one than it calls itself."""
    assert (
        controller_names() == sorted(BUILT_IN) == ["adaptive", "confidence", "cost-aware", "fixed"]
    )
    assert all(controller_class(name).name == name for name in BUILT_IN)
    with pytest.raises(OptionError, match="did you mean 'adaptive'"):
        make_controller("adaptiv", {})
    with pytest.raises(OptionError, match="set them on it"):
        make_controller(FixedLength(3), {"tokens": 4})


BAD: list[tuple[str, dict[str, Any], str]] = [
    ("fixed", {"tokens": -1}, "cannot draft -1 tokens; use 0"),
    ("confidence", {"tokens": 0}, "tokens=0 leaves nothing to stop; use 1 or more"),
    ("confidence", {"threshold": 1.5}, r"threshold=1.5 is no probability; use 0 .* to 1"),
    ("confidence", {"threshold": float("nan")}, "threshold=nan is not a finite number"),
    ("adaptive", {"tokens": 0}, "tokens=0 leaves nothing to stop; use 1 or more"),
    ("adaptive", {"target": 90}, "target=90 is outside 0 to 1"),
    ("adaptive", {"rate_memory": -0.5}, "rate_memory=-0.5 is outside 0 to 1"),
    ("cost-aware", {"most": 0}, "most=0 leaves nothing to choose; use 1 or more"),
    ("cost-aware", {"tokens": 4}, "has no option 'tokens'"),
]


@pytest.mark.parametrize(
    ("name", "options", "message"), BAD, ids=[f"{name}-{options}" for name, options, _ in BAD]
)
def test_bad_options_are_refused(name: str, options: dict[str, Any], message: str) -> None:
    """A value that means nothing taken silently; the message names it, the limit and what to do."""
    with pytest.raises(OptionError, match=message):
        make_controller(name, options)


@pytest.mark.parametrize("name", BUILT_IN)
def test_rooms_are_respected(name: str) -> None:
    """A draft past a row's limit would be verified for nothing; the row with the least room must
    not hold back the others."""
    controlling = make_controller(name, {}).start()
    for turn in range(40):
        rooms = [turn % 3, 0, 50]
        budget = controlling.budget(rooms).tokens
        assert all(0 <= tokens <= room for tokens, room in zip(budget, rooms, strict=True))
        controlling.learn(outcome_of(budget, budget), ANY)
    assert budget[2] > 1 and controlling.budget([0, 0]).tokens == [0, 0]


# -------------------------------------------------------------------------------- fixed, confidence


def test_fixed_allows_the_same_always() -> None:
    """The papers' K."""
    assert FixedLength(5).start().budget([9, 5, 2, 0]) == Budget([5, 5, 2, 0])
    assert FixedLength(0).start().budget([9]) == Budget([0])


@pytest.mark.parametrize("sampling", [False, True])
def test_the_token_that_stops_a_draft_is_kept(
    monkeypatch: pytest.MonkeyPatch, sampling: bool
) -> None:
    """Dropping the unsure token because of its own probability would bias sampling, and waste a
    draft that was paid for."""
    from selfspec import SamplingParams

    threshold, tops, drafts = 0.5, [], []
    original = chain.ChainSession._choose
    propose = chain.ChainSession.propose

    def choose(self: Any, logits: Any, *rest: Any) -> Any:
        tops.append(logits.softmax(-1).max().item())
        return original(self, logits, *rest)

    def watched(self: Any, *arguments: Any) -> Any:
        tops.clear()
        [draft] = propose(self, *arguments)
        drafts.append((len(draft.guesses), arguments[2].tokens[0], list(tops)))
        return [draft]

    monkeypatch.setattr(chain.ChainSession, "_choose", choose)
    monkeypatch.setattr(chain.ChainSession, "propose", watched)
    llm = tiny_llm(seed=4, initializer_range=0.3)
    params = SamplingParams(temperature=0.9, seed=2) if sampling else None
    control = Confidence(tokens=6, threshold=threshold)
    llm.generate(
        [5, 6, 7], max_new_tokens=60, eos=[], draft="early-exit", control=control, sampling=params
    )
    for length, most, seen in drafts:
        assert len(seen) == length, "as many drafts as were computed"
        assert all(top >= threshold for top in seen[:-1]), "it goes on while it is sure"
        assert seen[-1] < threshold or length == most, (
            "and stops at the first at which it is not, which is kept"
        )
    assert len({length for length, _, _ in drafts}) > 2, "nothing was stopped, or everything"


def test_confidence_0_never_stops_and_1_stops_at_once() -> None:
    """A comparison the wrong way round."""
    llm = tiny_llm(seed=4)
    plain = llm.generate([5, 6], max_new_tokens=20, eos=[], draft=None)
    rounds = {}
    for threshold in (0.0, 1.0):
        result = llm.generate(
            [5, 6], max_new_tokens=20, eos=[], draft="early-exit", control=Confidence(4, threshold)
        )
        assert result.tokens == plain.tokens
        rounds[threshold] = result.stats.drafted / result.stats.rounds
    assert rounds[0.0] > 3 and rounds[1.0] <= 1


# ----------------------------------------------------------------------------------------- adaptive


def test_the_threshold_follows_the_papers_equations() -> None:
    """Hand-computed, Draft & Verify's equations 5 and 6 with its defaults. The first rate counts in
    full; a wrong sign would drive the threshold away, memories swapped would make it ten times as
    fast."""
    at_work = Adaptive().start()
    # drafted, accepted -> running acceptance, threshold
    trace = [
        #             0.9 * 0.6 + 0.1 * 0.61: too little was accepted, so be surer
        ((4, 2), 0.5, 0.601),
        ((5, 5), 0.75, 0.602),  #            0.5 * 0.5 + 0.5 * 1
        ((1, 1), 0.875, 0.603),
        ((12, 12), 0.9375, 0.602),  #        above 0.9: 0.9 * 0.603 + 0.1 * 0.593
        ((10, 9), 0.91875, 0.601),
        ((3, 0), 0.459375, 0.602),
    ]
    assert at_work.budget([99]) == Budget([12], 0.6)
    for (drafted, accepted), rate, threshold in trace:
        at_work.learn(outcome_of([drafted], [accepted]), ANY)
        assert at_work.rate == pytest.approx(rate) and at_work.threshold == pytest.approx(threshold)
    assert at_work.budget([99, 3]) == Budget([12, 3], at_work.threshold)


def test_acceptance_exactly_at_the_target_is_too_little() -> None:
    """The paper raises at rate <= alpha."""
    at_work = Adaptive(target=0.5, rate_memory=0.0).start()
    at_work.learn(outcome_of([4], [2]), ANY)
    assert at_work.threshold > 0.6


def test_rows_share_a_threshold() -> None:
    """The mean of rates instead of the rate of sums: a row that drafts one token would weigh as
    much as one that drafts nine."""
    at_work = Adaptive().start()
    at_work.learn(outcome_of([9, 1], [9, 0]), ANY)
    assert at_work.rate == pytest.approx(0.9)


def test_a_round_without_drafts_teaches_nothing() -> None:
    """0 of 0 counted as 0 accepted, or a division by it."""
    at_work = Adaptive().start()
    at_work.learn(outcome_of([0, 0], [0, 0]), ANY)
    assert at_work.rate is None and at_work.threshold == 0.6


def test_the_threshold_stays_a_probability() -> None:
    """A threshold above 1 stops every draft after its first token, and takes long to come back."""
    for accepted, bound in ((0, 1.0), (4, 0.0)):
        at_work = Adaptive(step=0.5, threshold_memory=0.0).start()
        for _ in range(20):
            at_work.learn(outcome_of([4], [accepted]), ANY)
        assert at_work.threshold == bound


def test_generations_do_not_share_what_they_learned() -> None:
    """State on the frozen controller: one user's text would change another's speed."""
    for control in (Adaptive(), CostAware()):
        first, second = control.start(), control.start()
        before = second.budget([9])
        for _ in range(9):
            first.learn(outcome_of(first.budget([9]).tokens, [0]), ANY)
        assert second.budget([9]) == before and first is not second


# --------------------------------------------------------------------------------------- cost-aware

# a kernel's tile is full at 4 tokens
STEP = (1.0, 1.05, 1.1, 1.15, *(2.0 + 0.1 * more for more in range(45)))
WORTH_IT = {
    "free drafts": World(draft=0.01, chance=0.8),
    "long drafts": World(chance=0.9),
    "short drafts": World(chance=0.7),
    "one draft": World(chance=0.5),
    "dear tokens": World(LINEAR, draft=0.1, chance=0.9),
    "seldom found": World(draft=0.01, chance=0.8, found=0.3),
    "a step in the costs": World(STEP, draft=0.1, chance=0.9),
    "noisy": World(jitter=0.15),
    "spikes": World(spikes=0.05),
}
NOT_WORTH_IT = {
    "never right": World(chance=0.0),
    "seldom right": World(chance=0.1),
    "dear drafts": World(draft=0.8, chance=0.3),
    "dear tokens": World(LINEAR, chance=0.2),
    "spikes": World(chance=0.1, spikes=0.05),
}
ROUNDS = 1500


@pytest.mark.parametrize("name", WORTH_IT)
def test_it_comes_near_the_best_length(name: str) -> None:
    """Stuck at a length that was lucky, or afraid of one that was unlucky once; counted by what its
    lengths are worth."""
    world = WORTH_IT[name]
    assert world.best > 1.1 * world.rate(0), (
        "a world in which 0 drafts are nearly as good would prove nothing"
    )
    for seed in range(3):
        share = world.rate(*play(CostAware().start(), world, ROUNDS, seed)) / world.best
        assert share >= 0.97, f"{share:.1%} of the best fixed length's rate"


@pytest.mark.parametrize("name", NOT_WORTH_IT)
def test_it_leaves_bad_drafts_alone(name: str) -> None:
    """Never measurably slower than plain decoding: first tries and looks together cost less than
    2%."""
    world = NOT_WORTH_IT[name]
    assert world.best == world.rate(0)
    for seed in range(3):
        lengths = play(CostAware().start(), world, ROUNDS, seed)
        assert world.rate(*lengths) >= 0.98 * world.best
        assert lengths.count(0) >= 0.95 * ROUNDS
        assert any(lengths[ROUNDS // 2 :]), "and yet it looks again"


CHANGES = {
    "drafts become good": (World(chance=0.02), World(chance=0.9)),
    "drafts become bad": (World(chance=0.9), World(chance=0.02)),
    "tokens become cheap": (World(LINEAR, chance=0.7), World(chance=0.7)),
    "tokens become dear": (World(draft=0.05), World(LINEAR, draft=0.05)),
    "the machine becomes free": (
        World(tuple(10 * each for each in MEMORY_BOUND), draft=2.5, chance=0.3),
        World(chance=0.3),
    ),
}


@pytest.mark.parametrize("name", CHANGES)
def test_it_follows_a_world_that_changes(name: str) -> None:
    """Numbers that are never measured again, or a history too long to be overruled; judged over the
    second half of what comes."""
    before, after = CHANGES[name]
    shares = []
    for seed in range(5):
        at_work = CostAware().start()
        play(at_work, before, 500, seed)
        late = play(at_work, after, 1000, seed + 100)[500:]
        shares.append(after.rate(*late) / after.best)
    share = sum(shares) / len(shares)
    assert share >= 0.95 and min(shares) > 0.9, f"{share:.1%} of the best after the change"


@pytest.mark.parametrize("spiked", range(4))
def test_a_slow_start_is_not_believed_for_long(spiked: int) -> None:
    """One slow round at the beginning, when everything is measured for the first time: plain
    decoding, or a length, ruled out for good. It was: drafts that were never right were made for
    ever, at a fifth of the speed."""
    for world in (World(), World(chance=0.0, draft=0.5), World(draft=0.01, chance=0.8)):
        at_work, dice, lengths = CostAware().start(), random.Random(0), []
        for turn in range(ROUNDS):
            lengths += at_work.budget([1000]).tokens
            outcome, time = world.round(lengths[-1], dice)
            slow = RoundTime(10 * time.draft, 10 * time.verify, 0.0)
            at_work.learn(outcome, slow if turn == spiked else time)
        assert world.rate(*lengths) >= 0.97 * world.best


def test_it_never_drafts_more_than_asked_for() -> None:
    """`most` as a suggestion."""
    lengths = play(CostAware(most=2).start(), replace(WORTH_IT["free drafts"], chance=0.95), 200)
    assert max(lengths) == 2 and lengths[0] == 0, (
        "the first round is plain, to learn what that costs"
    )


FLAT = (1.0,) * 49
BUDGETS = {
    # passes, seconds of a draft, chance of a draft -> the fewest and the most drafts that pay
    "passes cost nothing more": (FLAT, 0.0, 0.98, 48, 48),
    "a small model": (MEMORY_BOUND, 0.0, 0.95, 6, 12),
    "a token costs half a pass": (LINEAR, 0.0, 0.9, 1, 5),
    "a token costs half a pass and is seldom right": (LINEAR, 0.0, 0.3, 0, 0),
    "a draft costs half a pass": (FLAT, 0.5, 0.4, 0, 0),
}


@pytest.mark.parametrize("name", BUDGETS)
def test_budgets_follow_the_costs(name: str) -> None:
    """A fixed limit of 12 or 16 where 48 pay, or drafts that do not pay for what they add to a
    pass. What is found is compared with the best length, known by arithmetic."""
    passes, draft, chance, fewest, most = BUDGETS[name]
    world = World(passes, draft=draft, chance=chance)
    best = max(range(49), key=world.rate)
    assert fewest <= best <= most
    lengths = play(CostAware().start(), world, 800)[400:]
    usual = sorted(lengths)[len(lengths) // 2]
    assert fewest <= usual <= most, f"{usual} drafts, and {best} are best"
    assert world.rate(*lengths) >= 0.95 * world.best


def test_places_never_tried_are_expected_by_those_before() -> None:
    """A draft of forty tokens tried because two were right, or never because the first was wrong
    half of the time."""
    for chance, tried in ((0.97, 6), (0.5, 6), (0.2, 3)):
        world, dice, costs = World(FLAT, chance=chance, draft=0.0), random.Random(0), CostModel()
        for _ in range(200):
            costs.observe(*world.round(tried, dice), [tried])
        beyond = costs.chances(48)[tried:]
        falling = [0.6 * beyond[0], beyond[0]]
        assert falling[0] <= beyond[1] <= falling[1], "next to what was tried"
        assert sum(beyond) <= 1.6 * sum(chance ** (tried + more) for more in range(1, 43)) + 0.6


def test_rows_are_counted_together() -> None:
    """Costs by row instead of by pass: eight rows of nine tokens are no pass of nine."""
    dear_beyond_16 = [1.0 if size <= 16 else size / 8 for size in range(200)]
    chosen = {}
    for rows in (1, 12):
        at_work, dice = CostAware().start(), random.Random(3)
        for _ in range(300):
            tokens = at_work.budget([50] * rows).tokens
            kept = [sum(dice.random() < 0.8 for _ in range(1)) * min(1, count) for count in tokens]
            seconds = dear_beyond_16[sum(tokens) + rows]
            at_work.learn(outcome_of(tokens, kept), RoundTime(0.01 * max(tokens), seconds, 0.0))
        chosen[rows] = tokens[0]
    assert chosen[1] >= 1 and chosen[12] == 0
