"""draft="auto": who is chosen, by made-up costs where the best is known; and on tiny models, that
no choice changes a token."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

from selfspec import LLM, OptionError, SamplingParams, ScriptedDrafter
from selfspec.control.cost_aware import CostAware
from selfspec.control.fixed import FixedLength
from selfspec.core.contract import Budget, Draft, Outcome, RoundTime, RowOutcome
from selfspec.core.sampling import Sampler
from selfspec.draft.auto import CONSIDERED, IDLE, LONG_IDLE, TRIED_ROWS, Auto, AutoSession
from selfspec.draft.base import Drafter, DraftSession, Target
from selfspec.draft.from_layers.early_exit import EarlyExit
from selfspec.draft.from_text.ngram import NGram
from selfspec.draft.hybrid import Hybrid
from selfspec.draft.registry import drafter_names, make_drafter, resolve
from selfspec.testing import tiny_llm
from worlds import World, on_even_clock, outcome_of

PROMPTS = [list(b"once upon a time, once upon a"), list(b"the"), list(b"aXb aXb aXb")]
SAMPLED = SamplingParams(temperature=0.8, top_p=0.95, seed=7)
DEFAULT = make_drafter("auto", {})


@pytest.fixture(scope="module")
def llm() -> LLM:
    return tiny_llm(seed=4)


@pytest.fixture(scope="module")
def plain(llm: LLM) -> list[list[int]]:
    return [
        result.tokens for result in llm.generate(PROMPTS, max_new_tokens=40, eos=[], draft=None)
    ]


def target_of(llm: LLM, rows: int = 1) -> Target:
    return Target(llm.model, llm.model.new_cache(rows, 64))


def begin(auto: Auto, llm: LLM, rows: int = 1) -> AutoSession:
    """A generation that has these rows."""
    at_work = auto.start(target_of(llm, rows))
    for row, prompt in enumerate(PROMPTS[:rows]):
        at_work.admit(row, prompt, Sampler(SamplingParams(), prompt_length=len(prompt)))
    return at_work


class One(Drafter, DraftSession):
    """A drafter in name only: what becomes of its drafts is the world's business."""

    name = "one"

    def start(self, target: Target) -> DraftSession:
        return type(self)()

    def propose(
        self, rows: Sequence[int], texts: Sequence[Sequence[int]], budget: Budget
    ) -> Sequence[Draft]:
        guesses = ([7] * most for most in budget.tokens)
        return [Draft.chain(*each) for each in zip(texts, guesses, strict=True)]


class Two(One):
    name = "two"


def play(
    at_work: AutoSession, worlds: Mapping[str, World], rounds: int, seed: int = 0
) -> list[tuple[str, int]]:
    """Who drafted how much in each round; each drafter has a world of its own."""
    dice, lengths = random.Random(seed), []
    for _ in range(rounds):
        before = at_work.rounds
        tokens = at_work.budget([1000]).tokens[0]
        chosen = next(
            (name for name, count in at_work.rounds.items() if count > before[name]), "one"
        )
        lengths.append((chosen, tokens))
        at_work.learn(*worlds[chosen].round(tokens, dice))
    return lengths


def rate(lengths: Sequence[tuple[str, int]], worlds: Mapping[str, World]) -> float:
    tokens, seconds = zip(*(worlds[name].expected(length) for name, length in lengths), strict=True)
    return sum(tokens) / sum(seconds)


GOOD, BAD = World(draft=0.02, chance=0.7), World(chance=0.05)


# ----------------------------------------------------------------------------------------- choosing


@pytest.mark.parametrize("better", ["one", "two"])
def test_the_better_of_two_is_found(llm: LLM, better: str) -> None:
    """The first candidate kept because it came first; the better one tried and left, or never
    tried."""
    worlds = {
        "one": World(chance=0.6),
        "two": World(chance=0.6),
        better: World(draft=0.05, chance=0.8),
    }
    for seed in range(3):
        at_work = begin(Auto([One(), Two()]), llm)
        lengths = play(at_work, worlds, 1500, seed)
        assert rate(lengths, worlds) >= 0.96 * max(
            worlds[better].rate(length) for length in range(8)
        )
        assert sum(name == better for name, _ in lengths[200:]) > 0.9 * 1300


def test_rows_take_turns_at_being_compared(llm: LLM) -> None:
    """All of a large batch asked at once, which takes longer than it tells; or always the same."""
    asked: list[int] = []

    class Looking(One):
        looks_up = True

        def propose(
            self, rows: Sequence[int], texts: Sequence[Sequence[int]], budget: Budget
        ) -> Sequence[Draft]:
            asked.extend(rows)
            return super().propose(rows, texts, budget)

    for count in (1, 3):
        at_work = begin(Auto([Looking()]), llm, count)
        rows = [
            RowOutcome(row, text, Draft.chain(text), [0], text[-1:], [])
            for row, text in enumerate(PROMPTS[:count])
        ]
        asked.clear()
        for _ in range(3):
            at_work._try(Outcome(rows, torch.empty(0), torch.empty(0)))
        each = [asked.count(row) for row in range(count)]
        assert each == [min(3, 3 * TRIED_ROWS // count)] * count


def test_plain_where_nothing_pays(llm: LLM) -> None:
    """Two bad candidates cost less than 2%, looks included; and are still looked at."""
    worlds = {"one": BAD, "two": World(chance=0.1, draft=0.5)}
    for seed in range(3):
        at_work = begin(Auto([One(), Two()]), llm)
        lengths = play(at_work, worlds, 1500, seed)
        assert rate(lengths, worlds) >= 0.98 and any(length for _, length in lengths[1000:])


def test_a_text_that_changes_changes_the_choice(llm: LLM) -> None:
    """A choice made once for the whole request."""
    first, then = {"one": GOOD, "two": BAD}, {"one": BAD, "two": GOOD}
    at_work = begin(Auto([One(), Two()]), llm)
    play(at_work, first, 400)
    late = play(at_work, then, 900, 1)[500:]
    assert sum(name == "two" and length > 0 for name, length in late) > 0.8 * 400


def test_a_bad_past_does_not_ban_a_drafter(llm: LLM) -> None:
    """Waits between looks that grow over requests without end: a drafter of no use to the first
    texts is never tried."""
    auto = Auto([One()])
    for seed in range(20):
        play(begin(auto, llm), {"one": World(chance=0.02)}, 200, seed)
    lengths = play(begin(auto, llm), {"one": World(draft=0.02, chance=0.9)}, 600, 99)
    assert sum(length > 0 for _, length in lengths[400:]) > 150


def test_one_slow_look_does_not_rule_a_drafter_out(llm: LLM) -> None:
    """A first draft that waited for its weights to come into memory taken for what drafts cost:
    the drafter is left alone for hundreds of rounds, over many requests."""
    auto = Auto([One(), Two()])
    worlds = {"one": World(chance=0.3), "two": GOOD}
    slow = {**worlds, "two": replace(GOOD, draft=100 * GOOD.draft)}
    at_work, seen = begin(auto, llm), 0
    while not at_work.rounds["two"]:
        seen += len(play(at_work, slow, 1, seen))
    lengths = play(at_work, worlds, 150 - seen)
    assert sum(name == "two" for name, _ in lengths[-100:]) > 80


def slower(worlds: Mapping[str, World], by: float) -> dict[str, World]:
    """The same where everything takes so many times as long."""
    return {
        name: replace(world, draft=by * world.draft, passes=[by * each for each in world.passes])
        for name, world in worlds.items()
    }


def test_a_machine_that_is_slow_for_a_while_changes_few_choices(llm: LLM) -> None:
    """Lengths that were timed in a slow minute taken for dear ones, beside those timed after it."""
    usual, shares = {"one": World(draft=0.01, chance=0.8), "two": BAD}, []
    slow = slower(usual, 2)
    for seed in range(4):
        at_work, lengths = begin(Auto([Lookup(), Two()]), llm), []
        for minute in range(20):
            lengths += play(at_work, slow if minute % 2 else usual, 60, 100 * seed + minute)
        shares.append(rate(lengths, usual) / usual["one"].best)
    assert sum(shares) / len(shares) > 0.955, shares


def test_what_rounds_take_is_told_in_seconds(llm: LLM) -> None:
    """Times divided by a pace that is told from such times: with texts of different lengths it
    wanders, request by request, and what was measured long ago looks cheap or dear."""
    auto = Auto([Lookup(), Two()])
    short = {"one": World(draft=0.01, chance=0.6), "two": World(draft=0.3, chance=0.6)}
    for request in range(80):
        worlds = short if request > 60 else slower(short, 1.6 if request % 3 else 1.0)
        at_work = begin(auto, llm)
        play(at_work, worlds, 50, request)
    told = at_work._arms[0].costs.rates(1, 8)
    assert told[0] == pytest.approx(short["one"].rate(0), rel=0.15)


def test_earlier_requests_save_the_trying(llm: LLM) -> None:
    """Every request paying again for what the last one found out; another model's costs taken for
    this one's."""
    auto, worlds = Auto([One(), Two()]), {"one": BAD, "two": GOOD}
    first = play(begin(auto, llm), worlds, 300)
    second = play(begin(auto, llm), worlds, 40, 1)
    assert first[0][1] == 0 and second[0][0] == "two" and second[0][1] > 1
    assert rate(second, worlds) > rate(first[:40], worlds)
    other = tiny_llm(seed=5)
    assert begin(auto, other).budget([9]).tokens == [0], "nothing is known of another model"


def test_candidates_may_be_named_in_one_text() -> None:
    """What a command line can say: a text of which only the whole would be a name."""
    named = Auto("hybrid+early-exit")._drafters
    assert [each.name for each in named] == ["hybrid", "early-exit"]
    with pytest.raises(OptionError, match="earl-exit"):
        Auto("hybrid+earl-exit")


def test_a_plain_round_teaches_all_and_a_draft_its_own_drafter(llm: LLM) -> None:
    """A candidate blamed for what another drafted, or plain costs known to one of them only, so
    that they are not comparable."""
    at_work = begin(Auto([One(), Two()]), llm)
    one, two = at_work._arms
    at_work.budget([9])
    at_work.learn(outcome_of([0], [0]), RoundTime(0.0, 1.0, 0.0))
    assert one.costs.passes.of(1)(1) == two.costs.passes.of(1)(1) == 1.0
    while not any(at_work.budget([9]).tokens):
        at_work.learn(outcome_of([0], [0]), RoundTime(0.0, 1.0, 0.0))
    chosen, other = (one, two) if at_work.rounds["one"] else (two, one)
    at_work.learn(outcome_of([2], [0]), RoundTime(0.5, 2.0, 0.0))
    assert 3 in chosen.costs.passes.of(1)._times and 3 not in other.costs.passes.of(1)._times
    assert chosen.costs.drafting.known and not other.costs.drafting.known
    assert chosen.costs.chances(1) < other.costs.chances(1)
    for arm in (one, two):
        arm.costs.passes.of(1)._times[1].clear()
    while not any(at_work.budget([9]).tokens):
        at_work.learn(outcome_of([0], [0]), RoundTime(0.0, 1.0, 0.0))
    before = [len(arm.costs.passes.of(1)._times[1]) for arm in (one, two)]
    at_work.learn(outcome_of([0], [0]), RoundTime(0.1, 1.0, 0.0))
    assert [len(arm.costs.passes.of(1)._times[1]) for arm in (one, two)] == [
        min(9, count + 1) for count in before
    ], "nothing was found"


class Naming(One):
    """Guesses without running the model; what it guesses is `guess`."""

    name, looks_up, guess = "naming", True, 8

    def propose(
        self, rows: Sequence[int], texts: Sequence[Sequence[int]], budget: Budget
    ) -> Sequence[Draft]:
        guesses = ([type(self).guess] * most for most in budget.tokens)
        return [Draft.chain(*each) for each in zip(texts, guesses, strict=True)]


def through_sevens(at_work: AutoSession, text: list[int], rounds: int) -> list[bool]:
    """Which of these rounds have drafts, where sevens go on with the text."""
    drafted = []
    for _ in range(rounds):
        tokens = at_work.budget([1000]).tokens[0]
        draft = Draft.chain(text)
        if tokens:
            draft = at_work.propose([0], [text], Budget([tokens]))[0]
        kept = len(draft.guesses) if draft.guesses and draft.guesses[0] == 7 else 0
        text += [7] * (kept + 1)
        row = RowOutcome(0, text, draft, range(kept + 1), text[-kept - 1 :], [])
        time = RoundTime(0.01 * tokens, 1 + 0.2 * len(draft.guesses), 0.0)
        at_work.learn(Outcome([row], torch.empty(0), torch.empty(0)), time)
        drafted.append(tokens > 0)
    return drafted


def test_guesses_are_compared_with_the_text_while_nothing_is_drafted(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A lookup that found nothing at the beginning of an answer is left alone until the answer has
    ended, though it would be right by now; what is compared costs no pass."""
    monkeypatch.setattr(Naming, "guess", 8)
    at_work, text = begin(Auto([Naming()]), llm), [7]
    while at_work._arms[0].looks._waited != 1 or len(text) < 150:  # a look was just made
        through_sevens(at_work, text, 1)
    monkeypatch.setattr(Naming, "guess", 7)
    assert sum(through_sevens(at_work, text, 60)[50:]) == 10


def test_guesses_are_compared_while_the_model_drafts(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A lookup that found nothing for a while is left alone for good where part of the model drafts
    well, though it would be right by now and costs nothing."""
    monkeypatch.setattr(Naming, "guess", 8)
    monkeypatch.setattr(Two, "likely", 0.95)
    at_work, text = begin(Auto([Naming(), Two()]), llm), [7]
    naming, two = at_work._arms

    def rounds(count: int) -> int:
        """How many of these were the lookup's; the other one keeps two drafts of three."""
        asked = naming.rounds
        for _ in range(count):
            tokens = at_work.budget([1000]).tokens[0]
            guesses = [Naming.guess if at_work._chosen is naming else 7] * tokens
            kept = (tokens if Naming.guess == 7 else 0) if at_work._chosen is naming else 2
            kept = min(kept, tokens)
            text.extend([7] * (kept + 1))
            draft = Draft.chain(text[: -kept - 1], guesses)
            row = RowOutcome(0, text, draft, range(kept + 1), text[-kept - 1 :], [])
            drafting = 0.01 if at_work._chosen is naming else 0.3 * tokens
            time = RoundTime(drafting, 1 + 0.1 * tokens, 0.0)
            at_work.learn(Outcome([row], torch.empty(0), torch.empty(0)), time)
        return naming.rounds - asked

    assert rounds(300) < 30 and two.rounds > 200, "the model's own part is better at first"
    monkeypatch.setattr(Naming, "guess", 7)
    assert rounds(60) > 30


def test_places_that_seemed_worthless_are_compared_with_the_text(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bad luck at later places lasts: nobody drafts so much any more, so nobody hears of them."""
    monkeypatch.setattr(Naming, "guess", 7)
    at_work, text = begin(Auto([Naming()]), llm), [7]
    through_sevens(at_work, text, 4)
    for _ in range(60):
        at_work._arms[0].costs._count([8], [8], [[0, 1]])
    assert at_work._arms[0].costs.chances(8)[4] < 0.1
    through_sevens(at_work, text, 40)
    assert at_work._arms[0].costs.chances(8)[4] > 0.4


class Lookup(One):
    looks_up = True


class Weighing(Lookup):
    """Knows its guesses' chances."""

    weighs = True


def test_who_knows_chances_is_told_the_price_and_asked_for_all_that_may_pay(llm: LLM) -> None:
    """Such a drafter asked for the length with the best luck, like any other. Or told a price
    before one is known, or another told one that it would pass over."""
    world = {"one": World(draft=0.01, chance=0.6)}
    for drafter in (Lookup(), Weighing()):
        at_work = begin(Auto([drafter]), llm)
        first = at_work.budget([1000])
        assert first.price is None
        assert at_work._arms[0].price(1, 3, 9) is None
        at_work.learn(outcome_of(first.tokens, [0]), RoundTime(0.0, 1.0, 0.0))
        play(at_work, world, 300)
        (asked,), price = (budget := at_work.budget([1000])).tokens, budget.price
        best_length = max(range(20), key=world["one"].rate)
        if drafter.weighs:
            assert asked > best_length and price and len(price.costs) == asked + 1
            assert price.costs == sorted(price.costs) and price.costs[-1] > 0
        else:
            assert price is None


@pytest.mark.parametrize(("rows", "passes"), [(1, False), (2, True), (3, True)])
def test_several_rows_pass_over_more_rounds(llm: LLM, rows: int, passes: bool) -> None:
    """Lookups told of each plain round, row by row, though none of them pays."""
    at_work = begin(Auto([One()]), llm, rows)
    for _ in range(6):
        while at_work.rests:
            at_work.passed_over(rows, rows, 1.0)
        at_work.learn(outcome_of([0] * rows, [0] * rows), RoundTime(0.0, 1.0, 0.0))
        if at_work._plain >= 6:
            break
    assert bool(at_work.rests) == passes


@pytest.mark.parametrize(("rows", "pays"), [(1, False), (3, False), (3, True)])
def test_several_rows_for_whom_nobody_pays_choose_later(
    llm: LLM, monkeypatch: pytest.MonkeyPatch, rows: int, pays: bool
) -> None:
    """Sixteen rows that choose nobody in every other round; or a round without drafts, which is
    only to be timed, taken for one in which nobody pays."""
    at_work = begin(Auto([Lookup()]), llm, rows)
    (arm,) = at_work._arms
    arm.costs.observe(outcome_of([1] * rows, [1] * rows), RoundTime(0.1, 1.0, 0.0), [1] * rows)
    monkeypatch.setattr(arm.costs, "rates", lambda *_: [1.0, 2.0 if pays else 0.5])
    monkeypatch.setattr(arm.looks, "due", lambda *_: False)
    monkeypatch.setattr(at_work._checks, "unknown", lambda _: False)
    monkeypatch.setattr(at_work._checks, "due", lambda *_: True)
    assert not any(at_work.budget([9] * rows).tokens)
    at_work.learn(outcome_of([0] * rows, [0] * rows), RoundTime(0.0, 1.0, 0.0))
    assert at_work._rest == (IDLE if rows > 1 and not pays else 0)


@pytest.mark.parametrize(
    ("rows", "needed", "gain", "rest"),
    [
        (3, 0.6, 1.05, 0),
        (3, 0.8, 1.05, LONG_IDLE),
        (3, 0.8, 1.15, 0),
        (1, 0.8, 1.05, 0),
        (3, 0.6, 0.9, IDLE),
        (1, 0.8, 0.9, 0),
    ],
)
def test_rows_for_whom_each_guess_must_be_kept_seldom_ask(
    llm: LLM, monkeypatch: pytest.MonkeyPatch, rows: int, needed: float, gain: float, rest: int
) -> None:
    """Sixteen rows on two cores that only multiply: their guesses, even if all are kept, gain less
    than asking for them takes. Or guesses that gain much left out with them."""
    at_work = begin(Auto([Lookup()]), llm, rows)
    (arm,) = at_work._arms
    arm.costs.observe(outcome_of([1] * rows, [1] * rows), RoundTime(0.1, 1.0, 0.0), [1] * rows)
    monkeypatch.setattr(arm.costs, "rates", lambda *_: [1.0, gain])
    monkeypatch.setattr(arm.costs, "needed", lambda *_: needed)
    monkeypatch.setattr(arm.looks, "due", lambda *_: False)
    monkeypatch.setattr(at_work._checks, "unknown", lambda _: False)
    monkeypatch.setattr(at_work._checks, "due", lambda *_: False)
    assert any(at_work.budget([9] * rows).tokens) == (gain > 1 and not rest)
    at_work.learn(outcome_of([0] * rows, [0] * rows), RoundTime(0.0, 1.0, 0.0))
    assert at_work._rest == rest


def test_rounds_that_were_passed_over_tell_what_doing_without_takes(llm: LLM) -> None:
    """Drafts compared with rounds without drafts in which somebody is asked, which take longer than
    those that would be run in their place."""
    at_work = begin(Auto([One(), Two()]), llm, 4)
    for _ in range(3):
        at_work.learn(outcome_of([0] * 4, [0] * 4), RoundTime(0.0, 1.0, 0.1))
    while at_work.rests:
        at_work.passed_over(4, 4, 1.0)
    for _ in range(9):
        at_work.passed_over(4, 4, 1.0)
    for _ in range(1 + CONSIDERED):
        at_work._rest = 0
        at_work.budget([9] * 4)
    for arm in at_work._arms:
        assert arm.costs.passes.of(4)(4) == pytest.approx(1.0)
        assert arm.costs.rates(4, 9)[0] == pytest.approx(4.0)


@pytest.mark.parametrize(("rows", "rests"), [(8, False), (9, True)])
def test_one_of_many_rows_may_end_while_rounds_are_passed_over(
    llm: LLM, rows: int, rests: bool
) -> None:
    """All drafters asked anew whenever one of sixteen rows ends; or a few rows that wait for
    drafts."""
    at_work = begin(Auto([One()]), llm, rows)
    at_work.about(range(rows))
    while not at_work.rests:
        at_work.learn(outcome_of([0] * rows, [0] * rows), RoundTime(0.0, 1.0, 0.0))
    at_work.drop(0)
    assert bool(at_work.rests) == rests


@pytest.mark.parametrize("rows", [1, 3])
def test_several_rows_tell_each_drafter_what_passes_took(llm: LLM, rows: int) -> None:
    """A drafter that is looked at because its passes are thought to be cheaper than another's of
    the same size. A single row's rounds are too short for all to listen."""
    at_work = begin(Auto([One(), Two()]), llm, rows)
    first, second = at_work._arms
    at_work.learn(outcome_of([0] * rows, [0] * rows), RoundTime(0.0, 1.0, 0.0))
    at_work._rest, at_work._chosen = 0, first
    at_work.learn(outcome_of([2] * rows, [2] * rows), RoundTime(0.1, 5.0, 0.0))
    seconds = second.costs.passes.of(rows)(3 * rows)
    assert seconds == pytest.approx(5.0) if rows > 1 else seconds < 2


def test_choices_stand_for_lookups_only(llm: LLM) -> None:
    """Forty drafts of a part of the model in each of eight rounds, though the first showed that
    they are too many; or a lookup's short rounds in which choosing takes longer than guessing."""
    worlds, standing = {"one": GOOD, "two": GOOD}, []
    for drafter in (Lookup(), Two()):
        at_work = begin(Auto([drafter]), llm)
        standing.append(max(at_work.stands for seed in range(60) if play(at_work, worlds, 1, seed)))
    assert standing[0] > 0 and standing[1] == 0


def test_of_two_that_are_close_the_lookup_drafts(llm: LLM) -> None:
    """The next rounds' luck decides between a lookup and a part of the model that is worth as much,
    and each change pays for rounds of the model. How often it does depends on the dice."""
    worlds = {"one": World(draft=0.01, chance=0.6), "two": World(draft=0.07, chance=0.7)}
    played = [play(begin(Auto([Lookup(), Two()]), llm), worlds, 1000, seed) for seed in range(12)]
    drafted = [name == "two" for lengths in played for name, _ in lengths[300:]]
    assert sum(drafted) < 0.15 * len(drafted)


def test_each_number_of_rows_has_rounds_without_drafts_at_first(llm: LLM) -> None:
    """What many rows take without drafts guessed from rounds of fewer rows with drafts, or believed
    of a single round that was a spike, or of earlier texts that were longer: drafts seem to pay in
    batches where they cost half of the speed. Or such rounds for one row, which is known from the
    beginning."""
    auto = Auto([Lookup()])
    play(begin(auto, llm), {"one": GOOD}, 60)
    for rows in (3, 2, 1):
        drafted = []
        for at_work in (begin(auto, llm, 3), begin(auto, llm, 3)):
            for _ in range(10):
                tokens = at_work.budget([9] * rows).tokens
                drafted.append("no" if sum(tokens) == 0 else "-")
                time = RoundTime(0.01, 1 + 0.01 * sum(tokens), 0.0)
                at_work.learn(outcome_of(tokens, tokens), time)
        first = ["no", "-", "-", "no", "-", "-", "-", "-", "no", "-"] if rows > 1 else ["-"] * 10
        then = ["no", *["-"] * 9] if rows > 1 else ["-"] * 10
        assert drafted == first + then


def test_who_looks_up() -> None:
    """A drafter that runs the model taken for one that costs nothing, which is tried at once and
    asked beside others."""
    made = [make_drafter(name, {}) for name in drafter_names() if name not in ("scripted", "none")]
    assert {each.name for each in made if each and each.looks_up} == {"ngram", "recycle", "hybrid"}
    assert not Hybrid(then="quantised").looks_up


def test_a_row_that_leaves_is_not_waited_for(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guesses for a row that ended are compared with whoever has its number next."""
    monkeypatch.setattr(Naming, "guess", 8)
    at_work = begin(Auto([Naming()]), llm)
    (arm,) = at_work._arms
    while not arm.trials:
        through_sevens(at_work, [7], 1)
    at_work.drop(0)
    assert arm.trials[0][0].over and not arm.trials[0][0].paths
    at_work.admit(0, [7], Sampler(SamplingParams(), prompt_length=1))
    through_sevens(at_work, [7], 1)
    assert not arm.trials


def test_a_look_must_beat_the_best_not_plain_decoding(llm: LLM) -> None:
    """A candidate that is better than nothing and worse than the best would be looked at every few
    rounds, at a loss."""
    worlds = {"one": World(draft=0.01, chance=0.9), "two": World(draft=0.3, chance=0.8)}
    lengths = play(begin(Auto([One(), Two()]), llm), worlds, 1500)
    assert sum(name == "two" for name, _ in lengths[300:]) < 0.03 * 1200


def test_prompts_that_are_read_come_before_drafts(llm: LLM) -> None:
    """A drafter that pays for its row, while rows that would bring more wait for their prompts."""
    at_work, drafted = begin(Auto([One(), Two()]), llm), {}
    for reading in (0, 40, 0):
        at_work.about([0], reading)
        lengths = play(at_work, {"one": GOOD, "two": GOOD}, 200)
        drafted[reading] = sum(length > 0 for _, length in lengths[100:])
    assert drafted[0] > 90 and drafted[40] < 10


@pytest.mark.parametrize("rooms", [[0], [1], [1, 5], [0, 1], [3, 0, 2]])
def test_rooms_are_respected(llm: LLM, rooms: list[int]) -> None:
    """A look of two drafts where there is room for one; the row with no room at all."""
    auto = Auto([One(), Two()])
    play(begin(auto, llm), {"one": GOOD, "two": GOOD}, 60)
    for fresh in (auto, Auto([One(), Two()])):
        at_work = begin(fresh, llm, len(rooms))
        for _ in range(80):
            budget = at_work.budget(rooms)
            assert all(
                0 <= tokens <= room for tokens, room in zip(budget.tokens, rooms, strict=True)
            )
            at_work.learn(outcome_of(budget.tokens, [0] * len(rooms)), RoundTime(0.1, 1.0, 0.0))


# ---------------------------------------------------------------------------------- on a tiny model


@pytest.mark.parametrize("sampling", [None, SAMPLED], ids=["greedy", "sampled"])
def test_what_it_learned_changes_no_token(llm: LLM, sampling: SamplingParams | None) -> None:
    """Requests share numbers: what one taught decides who drafts in the next, and must not decide
    what is written."""
    call: dict[str, Any] = {"sampling": sampling, "max_new_tokens": 30, "eos": []}
    expected = [result.tokens for result in llm.generate(PROMPTS, draft=None, **call)]
    auto = Auto(["hybrid", EarlyExit(2), "cosine"])
    for _ in range(5):
        results = llm.generate(PROMPTS, draft=auto, **call)
        assert [result.tokens for result in results] == expected
        alone = llm.generate(PROMPTS[0], draft=auto, **call)
        assert alone.tokens == expected[0]


def test_the_right_candidate_is_used_and_counted(
    llm: LLM, plain: list[list[int]], monkeypatch: Any
) -> None:
    """Statistics of rounds in which somebody else drafted; more drafts a round than `most`. A slow
    pass of the wrong candidate's would keep the right one from being tried."""
    on_even_clock(monkeypatch.setattr)
    auto = Auto([ScriptedDrafter(plain, wrong_every=1), ScriptedDrafter(plain)], most=3)
    accepted = 0
    for _ in range(3):
        results = llm.generate(PROMPTS, max_new_tokens=40, eos=[], draft=auto)
        assert [result.tokens for result in results] == plain
        stats = results[0].call
        assert stats.accepted <= stats.drafted <= 3 * stats.verifications
        assert stats.decoded == stats.verifications + stats.accepted == 3 * 39
        assert len(stats.drafted_at) <= 3 and stats.draft_seconds < stats.decode_seconds
        accepted += stats.accepted
    assert accepted > 0, "the right one is tried in the first call"


def test_it_is_the_default(llm: LLM) -> None:
    """Plain decoding for everybody who does not read the manual."""
    fresh = tiny_llm(seed=4)  # of which nothing is known, so a first look is certain
    result = fresh.generate(PROMPTS[2], max_new_tokens=60, eos=[])
    assert result.stats.drafted > 0
    assert result.tokens == fresh.generate(PROMPTS[2], max_new_tokens=60, eos=[], draft=None).tokens


@pytest.mark.parametrize("limit", [1, 2, 3])
def test_room_for_one_or_two(llm: LLM, plain: list[list[int]], limit: int) -> None:
    """A request that ends in its first rounds."""
    auto = Auto(["hybrid", EarlyExit(2)])
    for _ in range(4):
        results = llm.generate(PROMPTS, max_new_tokens=limit, eos=[], draft=auto)
        assert [result.tokens for result in results] == [tokens[:limit] for tokens in plain]


def test_streams_and_chats(llm: LLM) -> None:
    """A stream that was interrupted by another one, with the same shared numbers; a conversation's
    kept cache."""
    call: dict[str, Any] = {"max_new_tokens": 24, "eos": []}
    expected = [llm.generate(prompt, draft=None, **call).text for prompt in PROMPTS[:2]]
    streams = [llm.stream(prompt, draft="auto", **call) for prompt in PROMPTS[:2]]
    texts = ["", ""]
    while any(pieces := [next(stream, None) for stream in streams]):
        texts = [
            text + (piece.text if piece else "") for text, piece in zip(texts, pieces, strict=True)
        ]
    assert texts == expected
    messages = [{"role": "user", "content": "once upon"}]
    for _ in range(2):
        wanted = llm.generate(llm.encode_chat(messages), draft=None, **call)
        answer = llm.chat(messages, draft="auto", **call)
        assert answer.tokens == wanted.tokens
        assert (
            "".join(piece.text for piece in llm.stream_chat(messages, draft="auto", **call))
            == wanted.text
        )
        messages += [
            {"role": "assistant", "content": "aXb"},
            {"role": "user", "content": "aXb aXb"},
        ]


def test_candidates_that_do_not_fit_are_left_out() -> None:
    """An exit inside a model of one layer: the default must work on every model."""
    llm = tiny_llm(seed=4, num_hidden_layers=1)
    assert list(begin(Auto(), llm).rounds) == ["hybrid", "quantised"]
    assert (
        llm.generate(PROMPTS[0], max_new_tokens=20).tokens
        == llm.generate(PROMPTS[0], max_new_tokens=20, draft=None).tokens
    )
    nobody = Auto([EarlyExit(3)])
    assert begin(nobody, llm).rounds == {}
    result = llm.generate(PROMPTS, max_new_tokens=9, eos=[], draft=nobody)[0]
    assert result.call.drafted == 0 and len(result.tokens) == 9


def test_every_candidate_sees_every_round(llm: LLM) -> None:
    """A table of successors that stops learning while another candidate drafts, or of rounds that
    were passed over; watches of the prefill that are not passed on."""
    seen: dict[str, int] = {"observe": 0, "observer": 0}

    @dataclass(frozen=True)
    class Curious(Drafter):
        name = "curious"

        def start(self, target: Target) -> DraftSession:
            class At(One):
                def observer(
                    self, layer: int, attention: bool, before: torch.Tensor, after: torch.Tensor
                ) -> None:
                    seen["observer"] += 1

                def observe(self, outcome: Outcome) -> None:
                    seen["observe"] += len(outcome.rows[0].kept)

            return At()

    for candidates in ([Curious(), "cosine"], ["cosine", Curious()]):
        seen.update(observe=0, observer=0)
        stats = llm.generate(PROMPTS[0], max_new_tokens=30, eos=[], draft=Auto(candidates)).stats
        assert seen == {"observe": stats.decoded, "observer": 2 * llm.model.layers}


def test_a_candidate_that_fails_leaves_the_others_usable(llm: LLM, plain: list[list[int]]) -> None:
    """Half-made choices kept in what requests share."""

    class Failing(One):
        name = "failing"
        looks_up = True  # so that it is asked at once

        def propose(self, *_: Any) -> Sequence[Draft]:
            raise RuntimeError("the drafter failed")

    auto = Auto([Failing(), "ngram"])
    for _ in range(2):
        with pytest.raises(RuntimeError, match="the drafter failed"):
            llm.generate(PROMPTS, max_new_tokens=40, eos=[], draft=auto)
    results = llm.generate(PROMPTS, max_new_tokens=40, eos=[], draft=Auto([NGram()]))
    assert [result.tokens for result in results] == plain


# ----------------------------------------------------------------------------------- names, options


def test_resolve() -> None:
    """The user's words: every path that generate, stream, chat and the command line go through."""
    assert resolve("auto", None, None, None)[0] is DEFAULT, "one for all"
    assert resolve("auto", None, None, None) == (DEFAULT, None)
    drafter, control = resolve("auto", {"most": 3, "candidates": ["ngram"]}, None, None)
    assert isinstance(drafter, Auto) and drafter.most == 3 and control is None
    own = Auto(most=2)
    assert resolve(own, None, None, None) == (own, None)
    assert resolve("none", None, None, None) == resolve(None, {}, None, None) == (None, None)
    assert resolve("ngram", {"longest": 2}, None, None) == (NGram(longest=2), FixedLength())
    assert resolve(NGram(), None, "cost-aware", {"most": 5}) == (NGram(), CostAware(5))


def test_one_candidate_may_stand_alone() -> None:
    """A string taken for a list of letters; an object where a list of them was meant."""
    assert [drafter.name for drafter in Auto("ngram")._drafters] == ["ngram"]
    assert Auto(EarlyExit(2))._drafters == [EarlyExit(2)]  # type: ignore[arg-type]


def test_what_it_learns_is_no_text(llm: LLM) -> None:
    """A benchmark has to say when earlier requests' text helps; numbers are not text, a kept table
    is."""
    assert not Auto().learns_across_requests
    assert Auto([Hybrid(then_options={"keep_table": True})]).learns_across_requests


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"control": "fixed"}, "control='fixed' would be ignored; leave it out"),
    ({"control": FixedLength(3)}, "would be ignored; leave it out"),
    ({"control_options": {"tokens": 3}}, "would be ignored; leave it out"),
    ({"draft_options": {"most": 0}}, "most=0 leaves nothing to choose; use 1 or more"),
    ({"draft_options": {"candidates": []}}, "candidates is empty"),
    ({"draft_options": {"candidates": ["none"]}}, "candidates is empty"),
    ({"draft_options": {"candidates": ["ngrm"]}}, "no drafter 'ngrm'; did you mean 'ngram'"),
    ({"draft_options": {"candidates": ["ngram", "auto"]}}, "candidates names auto itself"),
    ({"draft_options": {"candidates": [DEFAULT]}}, "candidates names auto itself"),
    ({"draft_options": {"must": 3}}, "drafter 'auto' has no option 'must'; did you mean 'most'"),
    ({"draft": Hybrid(first=DEFAULT)}, "brings a controller of its own"),
]


@pytest.mark.parametrize(
    ("options", "message"), WRONG, ids=[str(index) for index in range(len(WRONG))]
)
def test_what_cannot_be_meant_is_refused(llm: LLM, options: dict[str, Any], message: str) -> None:
    """A wish that is ignored in silence, or an assertion in the middle of a request."""
    with pytest.raises(OptionError, match=message):
        llm.generate(PROMPTS[0], **{"draft": "auto", "max_new_tokens": 20, **options})


@pytest.mark.parametrize(("rows", "longest"), [(1, 7), (4, 2)])
def test_looks_at_a_part_of_the_model_are_short_for_several_rows(
    llm: LLM, monkeypatch: pytest.MonkeyPatch, rows: int, longest: int
) -> None:
    """A look that takes as long as many rounds: drafts as long as a lone row's for each of many
    rows, though a few tokens tell what they take."""
    at_work = begin(Auto([Lookup(), Two()]), llm, rows)
    for arm in at_work._arms:
        for count in (1, 2, 4, 8) * 4:
            made = outcome_of([count] * rows, [count] * rows)
            arm.costs.observe(made, RoundTime(0.01, 1 + 0.01 * count, 0.0), [count] * rows)
    lookup, part = at_work._arms
    monkeypatch.setattr(lookup.looks, "due", lambda *_: False)
    monkeypatch.setattr(part.looks, "due", lambda *_: True)
    monkeypatch.setattr(part.costs, "rates", lambda *_: [1.0, *(1 + n / 99 for n in range(1, 8))])
    monkeypatch.setattr(at_work._checks, "unknown", lambda _: False)
    assert at_work.budget([9] * rows).tokens == [longest] * rows
    assert at_work._chosen is part


@pytest.mark.parametrize(("rows", "expected"), [(1, 0.99), (4, 1 / 1.1)])
def test_a_look_of_several_rows_that_will_not_pay_is_supposed_to_gain_nothing(
    llm: LLM, monkeypatch: pytest.MonkeyPatch, rows: int, expected: float
) -> None:
    """Looks that nearly pay by the tokens of all rows, in every batch of few rounds: a round is
    saved only if each of the rows keeps a guess."""
    told: list[float] = []
    at_work = begin(Auto([Lookup(), Two()]), llm, rows)
    for arm in at_work._arms:
        for count in (0, 1) * 9:
            made = outcome_of([count] * rows, [0] * rows)
            arm.costs.observe(made, RoundTime(0.01, 1 + 0.1 * count, 0.0), [count] * rows)
    lookup, part = at_work._arms
    plain = lookup.costs.rates(rows, 9)[0]
    monkeypatch.setattr(lookup.looks, "due", lambda *_: False)
    monkeypatch.setattr(part.looks, "due", lambda _, rate, __: told.append(rate))
    monkeypatch.setattr(part.costs, "rates", lambda *_: [plain, 0.99 * part.bar(rows) * plain])
    monkeypatch.setattr(at_work._checks, "unknown", lambda _: False)
    at_work.budget([9] * rows)
    assert told == [pytest.approx(expected * plain)]


@pytest.mark.parametrize(
    ("rows", "gain", "chosen"), [(1, 1.2, True), (8, 1.2, True), (9, 1.2, False), (9, 1.3, True)]
)
def test_what_runs_the_model_for_many_rows_has_to_gain_more(
    llm: LLM, monkeypatch: pytest.MonkeyPatch, rows: int, gain: float, chosen: bool
) -> None:
    """A batch of which some rows are drafted to their ends, at a pass of the copy for each token,
    and which ends no sooner."""
    at_work = begin(Auto([Lookup(), Two()]), llm, rows)
    lookup, part = at_work._arms
    for arm in at_work._arms:
        for count in (0, 1) * 9:
            made = outcome_of([count] * rows, [0] * rows)
            arm.costs.observe(made, RoundTime(0.01, 1 + 0.1 * count, 0.0), [count] * rows)
        monkeypatch.setattr(arm.looks, "due", lambda *_: False)
    plain = lookup.costs.rates(rows, 9)[0]
    monkeypatch.setattr(part.costs, "rates", lambda *_: [plain, gain * plain])
    monkeypatch.setattr(at_work._checks, "unknown", lambda _: False)
    at_work.about([*range(rows)])
    assert any(at_work.budget([1] * rows).tokens) == chosen
    assert (at_work._chosen is part) == chosen


@pytest.mark.parametrize(
    ("who", "later"), [("lookup", False), ("lookup", True), ("two", False)], ids=str
)
def test_of_rows_that_began_together_those_ahead_wait(
    llm: LLM, monkeypatch: pytest.MonkeyPatch, who: str, later: bool
) -> None:
    """Guesses for a row that the others of its batch keep waiting; or none for rows of a server,
    which come one after the other. Or what runs the model, chosen by what it brings to all rows,
    and asked for the last one alone."""
    kept = [9, 0] if later else [9, 0, 0]
    at_work = begin(Auto([Lookup() if who == "lookup" else Two()]), llm, len(kept))
    (arm,) = at_work._arms
    at_work.learn(outcome_of(kept, kept), RoundTime(0.1, 1.0, 0.0))
    if later:
        at_work.admit(2, PROMPTS[2], Sampler(SamplingParams(), prompt_length=len(PROMPTS[2])))
    for count in (0, 1) * 9:
        made = outcome_of([count] * 3, [count] * 3)
        arm.costs.observe(made, RoundTime(0.0, 1 + 0.5 * count, 0.0), [count] * 3)
    monkeypatch.setattr(at_work, "_choose", lambda *_: (arm, 2))
    at_work.about([0, 1, 2])
    first = later or who == "two"
    assert [most > 0 for most in at_work.budget([5, 5, 5]).tokens] == [first, True, True]


@pytest.mark.parametrize("rows", [1, 3])
def test_of_several_rows_what_runs_the_model_is_considered_now_and_then(
    llm: LLM, monkeypatch: pytest.MonkeyPatch, rows: int
) -> None:
    """Offers of all candidates worked out in each round of sixteen rows; or a candidate that never
    hears of the rounds in which it was left out, or waits for its look forever."""
    at_work = begin(Auto([Lookup(), Two()]), llm, rows)
    _, part = at_work._arms
    asked, rates = Counter[Any](), part.costs.rates
    monkeypatch.setattr(part.costs, "rates", lambda *a: asked.update([a]) or rates(*a))
    monkeypatch.setattr(part.looks, "due", lambda *_: False)
    choices = 1 + 2 * (1 + CONSIDERED)
    for _ in range(choices):
        at_work._rest = 0
        at_work.budget([9] * rows)
        at_work.learn(outcome_of([0] * rows, [0] * rows), RoundTime(0.0, 1.0, 0.0))
    assert asked.total() == (2 if rows > 1 else choices - 1), "the first round times passes"
    assert part.looks._seconds == part.costs.passes._count == choices
    if rows > 1:
        monkeypatch.setattr(at_work, "_chosen", part)
        at_work.budget([9] * rows)
        assert part in at_work._considered, "who drafted last may again"


@pytest.mark.parametrize("rows", [1, 4])
def test_of_several_rows_lookups_tell_first_what_larger_passes_take(
    llm: LLM, monkeypatch: pytest.MonkeyPatch, rows: int
) -> None:
    """A look that runs part of the model for each row, though a lookup's would have told for
    little that larger passes are too dear. A lone row's passes are seldom so."""
    at_work = begin(Auto([Lookup(), Two()]), llm, rows)
    lookup, part = at_work._arms
    for arm in at_work._arms:
        arm.costs.observe(outcome_of([0] * rows, [0] * rows), RoundTime(0.0, 1.0, 0.0), [])
    monkeypatch.setattr(lookup.looks, "due", lambda *_: False)
    monkeypatch.setattr(part.looks, "due", lambda *_: True)
    monkeypatch.setattr(at_work._checks, "unknown", lambda _: False)
    at_work.budget([9] * rows)
    assert at_work._chosen is (part if rows == 1 else None)
    made = outcome_of([1] * rows, [1] * rows)
    lookup.costs.observe(made, RoundTime(0.0, 1.0, 0.0), [1] * rows)
    monkeypatch.setattr(lookup.costs, "rates", lambda *_: [1.0, 0.9])
    for _ in range(1 + (CONSIDERED if rows > 1 else 0)):
        at_work.budget([9] * rows)
    assert at_work._chosen is part
