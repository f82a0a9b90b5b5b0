"""What rounds cost and drafts bring, as numbers: estimates from few measurements, spikes, old news,
earlier requests."""

from __future__ import annotations

import math
import sys
from dataclasses import replace
from types import FrameType
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from selfspec.control.cost_aware import CostAware
from selfspec.control.costs import FIRST_CHANCE, GROWTH, MOST, PAYING, CostModel, Pass, best, shared
from selfspec.control.curves import ANEW, ENOUGH, STALE, Curve, Curves, rising, straight
from selfspec.control.looks import (
    AT_ONCE,
    FIRST_LOOK,
    HIGHEST_LOSS,
    LAST_LOOK,
    LOSS,
    SELDOM,
    SOON,
    Checks,
    Looks,
)
from selfspec.control.shares import LASTING, Share
from selfspec.core.contract import RoundTime
from worlds import outcome_of


def curve(
    times: dict[int, float],
    growth: float | None = GROWTH,
    prior: Curve | None = None,
    often: int = 3,
) -> Curve:
    made = Curve(growth, prior)
    for size, seconds in times.items():
        for _ in range(often):
            made.observe(size, seconds)
    return made


# ------------------------------------------------------------------------------------------- curves


def test_a_curve_knows_what_was_measured_and_continues_it() -> None:
    """A draft's time that is taken for a constant, or a pass that is taken to cost in proportion to
    its tokens."""
    assert not Curve(GROWTH).known and Curve(GROWTH)(3) == 0.0
    passes = curve({2: 1.0, 6: 2.0}, growth=0.1)
    assert passes.known and [passes(2), passes(6)] == [1.0, 2.0]
    assert passes(1) == 1.0, "a smaller pass costs no less: it reads the same weights"
    assert passes(8) == pytest.approx(2.5), "it goes on as it went, since the smallest size"
    assert curve({2: 1.0, 6: 1.1}, growth=0.1)(8) == pytest.approx(1.32), "or as the least growth"
    assert passes(5) == pytest.approx(1.3), (
        "between two sizes growth from below is the lower bid: there may be a step"
    )
    assert curve({2: 1.0, 6: 1.2}, growth=0.1)(4) == pytest.approx(1.1), (
        "and a line, where that is lower"
    )
    drafting = curve({2: 1.0}, growth=None)
    assert [drafting(1), drafting(6)] == [0.5, 3.0]


def test_one_spike_among_many_is_nothing() -> None:
    """A mean instead of a median: other work on the machine would rule out what is best here."""
    passes = curve({1: 1.0, 4: 1.2}, often=5)
    for spike in (50.0, 80.0):
        passes.observe(4, spike)
    assert passes(4) == 1.2


def test_a_spike_at_the_only_time_is_not_believed() -> None:
    """The first plain round was slow, so drafting seems to pay for ever, at a fifth of the
    speed."""
    passes = Curve(GROWTH)
    passes.observe(1, 30.0)
    assert passes(1) == 30.0, "nothing else is known"
    passes.observe(3, 1.1)
    assert passes(1) == 1.1
    passes.observe(1, 30.0), passes.observe(1, 30.0)
    assert passes(1) == 30.0, "three times is what it costs"


def test_more_tokens_are_never_cheaper() -> None:
    """Of sizes that are measured with noise, whichever was luckiest looks best; a spike at two
    tokens rules out what three are known to cost."""
    passes = curve({1: 2.0, 2: 3.2, 3: 2.2, 6: 3.0}, often=3)
    assert [passes(size) for size in (1, 2, 3, 6)] == pytest.approx([2.0, 2.7, 2.7, 3.0])
    passes = curve({1: 2.0, 3: 2.2}, often=3)
    passes.observe(2, 3.2), passes.observe(6, 1.0)  # once: neither is to be trusted
    assert passes(2) <= passes(3) == 2.2 <= passes(6)


@pytest.mark.parametrize(
    ("values", "weights", "expected"),
    [
        ([], [], []),
        ([1.0, 2.0, 3.0], [1, 1, 1], [1.0, 2.0, 3.0]),
        ([3.0, 1.0, 5.0], [1, 3, 1], [1.5, 1.5, 5.0]),
        ([4.0, 3.0, 2.0], [1, 1, 1], [3.0, 3.0, 3.0]),
        ([1.0, 4.0, 3.0, 2.0], [2, 1, 1, 2], [1.0, 2.75, 2.75, 2.75]),
    ],
)
def test_rising_values_are_the_nearest_that_do_not_fall(
    values: list[float], weights: list[int], expected: list[float]
) -> None:
    """Means without weights, a value that is joined with one neighbour only, blocks that fall."""
    assert rising(values, weights) == pytest.approx(expected)


def test_what_was_measured_long_ago_is_forgotten() -> None:
    """The machine had other work then; a size that seemed dear would never be tried again."""
    passes = curve({5: 9.0, 1: 1.0})
    for _ in range(STALE):
        passes.observe(1, 1.0)
    assert passes(5) < 1.2, "old news do not stand against the hope that growth from below gives"
    passes.observe(5, 1.3)
    assert passes(5) < 1.3 and curve({5: 9.0, 1: 1.0})(5) == 9.0
    passes.observe(5, 1.3), passes.observe(5, 1.3)
    assert passes(5) == 1.3, "the old times are not in the median"


def test_a_time_that_changes_nothing_leaves_the_answers() -> None:
    """All answers made anew in every round, a twentieth of a pass in 8 bits; or times that drift
    by less than that each and are never believed."""
    passes = curve({1: 1.0, 5: 1.3}, often=4)
    assert not passes.observe(1, 1.001) and passes.observe(1, 1.0) is False
    seconds = 1.0
    for _ in range(200):
        seconds *= 1.002
        passes.observe(1, seconds)
    assert passes(1) == pytest.approx(seconds, rel=0.02)


def test_old_news_are_forgotten_though_answers_stay() -> None:
    """A size that seemed dear, whose answer is kept for as long as others take what they took."""
    passes = curve({5: 9.0, 1: 1.0})
    assert passes(5) == 9.0
    for _ in range(STALE + ANEW):
        passes.observe(1, 1.0)
    assert passes(5) < 1.2


def test_a_prior_gives_the_shape_and_this_request_the_scale() -> None:
    """An earlier, faster request's seconds taken as they are: all that was not yet measured would
    look cheap."""
    prior = curve({1: 1.0, 4: 1.5, 8: 2.0})
    passes = Curve(GROWTH, prior)
    assert passes.known and passes(4) == 1.5
    for _ in range(3):
        passes.observe(1, 3.0)
    assert passes(8) == pytest.approx(3.0 * prior(8) / prior(1))


def test_passes_are_told_from_texts_of_the_same_length() -> None:
    """Many drafts timed behind long texts and few behind short ones: together they say that many
    are dear, and nobody tries them behind a short text."""
    every = CostModel()

    def request(length: int, times: dict[int, float]) -> CostModel:
        costs = CostModel(every)
        costs.begin(length)
        for size, seconds in times.items():
            for _ in range(ENOUGH):
                costs.passes.observe(1, size, seconds)
        return costs

    request(1000, {1: 5.0, 8: 10.0})
    assert request(60, {1: 3.0}).passes.of(1)(8) < 4
    assert request(900, {}).passes.of(1)(8) == pytest.approx(10)


def test_drafts_are_told_from_texts_of_the_same_length() -> None:
    """A copy of the model that reads the keys of sixteen long texts is slow, and would be left
    alone behind short ones for ever; one that is quick behind short texts would be asked for as
    much behind long ones. And a first request with long texts that changes what is known of short
    ones."""
    every = CostModel()

    def request(length: int, *seconds: float) -> CostModel:
        costs = CostModel(every)
        costs.begin(length)
        for each in seconds:
            costs.drafting.observe(16, 4, each)
        return costs

    request(1000, 8.0, 8.0, 8.0)
    assert not request(60).drafting.known, "dear ones say nothing of cheaper ones"
    request(60, 1.0, 1.0, 1.0)
    assert request(50).drafting.of(16)(4) == pytest.approx(1.0)
    assert request(900).drafting.of(16)(4) == pytest.approx(8.0)
    assert request(200).drafting.of(16)(4) == pytest.approx(1.0), "and are tried"
    request(200, 2.0, 2.0, 2.0)
    assert request(250).drafting.of(16)(4) == pytest.approx(2.0)
    assert request(60).drafting.of(16)(4) == pytest.approx(1.0)


def test_a_lucky_size_is_not_the_cheapest() -> None:
    """Each size by its own few times: of a dozen lengths of drafts the luckiest seemed to pay most,
    and was drafted for dozens of rounds."""
    times = {size: 1.0 + 2.0 * size for size in range(1, 13)}
    drafting = curve(times | {9: 11.0, 4: 15.0}, growth=None)
    assert drafting(9) == pytest.approx(19.0) and drafting(4) == pytest.approx(9.0)
    assert drafting(16) == pytest.approx(33.0), "and beyond what was measured"
    request = Curve(None, drafting)
    for _ in range(3):
        request.observe(6, 26.0)
    assert request(9) == pytest.approx(38.0), "this request's machine is half as fast"
    assert Curve(None, drafting)(9) == drafting(9)


def test_a_line_neither_falls_nor_begins_below_nothing() -> None:
    """Drafts that take less the more they are, or one that takes no time, pay without end."""
    assert straight([], [], []) == (0.0, 0.0)
    assert straight([4], [2.0], [3]) == (0.0, 0.5)
    assert straight([1, 2, 3], [5.0, 4.0, 3.0], [1, 1, 1]) == (4.0, 0.0)
    assert straight([1, 2, 3], [0.1, 2.0, 3.9], [1, 1, 1]) == (0.0, 1.0)


def test_an_interrupted_first_time_leaves_no_curve_without_one() -> None:
    """Ctrl-C within the first round of so many rows: a curve that knows nothing says a round takes
    no time, and the next request divides by it."""
    reached = 0
    for at in range(100):
        prior, seen = Curves(GROWTH), 0
        passes = Curves(GROWTH, prior)

        def interrupt(frame: FrameType, event: str, _: Any, at: int = at) -> None:
            nonlocal seen
            seen += "curves" in frame.f_code.co_filename and event in ("call", "c_call")
            if seen > at:
                sys.setprofile(None)
                raise KeyboardInterrupt

        sys.setprofile(interrupt)
        try:
            passes.observe(1, 4, 2.0)
        except KeyboardInterrupt:
            reached += 1
        finally:
            sys.setprofile(None)
        for each in (passes, prior, Curves(GROWTH, prior)):
            assert (each.of(1)(4) == 2.0) == each.known
    assert 20 < reached < 100


def test_sizes_next_to_each_other_are_measured_together() -> None:
    """Of sixteen rows hardly two passes are equally large, and each was measured once or never."""
    passes = curve({1: 1.0})
    for size in (127, 128, 131):
        passes.observe(size, 4.0)
    assert passes(125) == passes(130) == 4.0 and passes(150) > 4.0
    assert Curve(GROWTH)._times == {} and len(passes._times) == 2


def test_a_size_that_some_rows_have_tried_is_known_to_all() -> None:
    """Fifteen rows, whose plain rounds alone are known, are expected to take 64 tokens for little
    more than 15, though sixteen rows took three times as long with them."""
    costs = Curves(GROWTH)
    for _ in range(3):
        costs.observe(15, 15, 1.0), costs.observe(16, 16, 1.0), costs.observe(16, 64, 3.0)
    assert costs.of(15)(64) == pytest.approx(3.0)
    later = Curves(GROWTH, costs)
    later.observe(15, 15, 2.0)  # a slower machine by now
    assert later.of(15)(64) == pytest.approx(6.0)


@pytest.mark.parametrize(("rows", "expected"), [(1, 1.2), (4, 9.0)])
def test_several_rows_believe_a_dear_size_at_once(rows: int, expected: float) -> None:
    """A dear size tried three times, at the price of many rounds; or a spike of a single row, which
    costs little to try again, that rules a size out."""
    costs = Curves(GROWTH)
    for _ in range(3):
        costs.observe(rows, rows, 1.0)
    costs.observe(rows, rows + 10, 9.0)
    assert costs.of(rows)(rows + 10) == pytest.approx(expected)


def test_other_numbers_of_rows_believe_it_too() -> None:
    """A row ends, and fifteen try anew, at the price of many rounds, what was dear for sixteen."""
    costs = Curves(GROWTH)
    for _ in range(3):
        costs.observe(16, 16, 1.0), costs.observe(15, 15, 1.0)
    costs.observe(16, 32, 3.0)
    assert costs.of(15)(32) == pytest.approx(3.0)


def test_two_times_that_agree_are_no_spikes() -> None:
    """A third try of what took long twice; or two spikes of different length that count."""
    for seconds, expected in (([3.0, 3.2], 3.1), ([3.0, 5.0], 1.2)):
        curve = Curve(GROWTH)
        for size, each in [(1, 1.0)] * 3 + [(11, one) for one in seconds]:
            curve.observe(size, each)
        assert curve(11) == pytest.approx(expected)
        assert curve.settled(11) == (expected == 3.1)


def test_rows_have_costs_of_their_own() -> None:
    """Sixteen rows of one token read sixteen caches, one row of sixteen tokens reads one."""
    costs, later = Curves(GROWTH), Curves(GROWTH)
    for _ in range(3):
        costs.observe(1, 16, 1.0), costs.observe(16, 16, 3.0), costs.observe(16, 32, 4.5)
    assert costs.of(1)(16) == 1.0 and costs.of(16)(16) == 3.0
    assert costs.of(15)(16) == 3.0, "a row has ended: what is expected is what its neighbours cost"
    now = Curves(GROWTH, costs)
    assert now.known and now.of(16)(32) == 4.5 and not Curves(GROWTH, later).known
    for _ in range(3):
        now.observe(12, 16, 2.0)
    assert now.of(12)(32) == pytest.approx(3.0), "its own measure, in the shape of sixteen's"
    assert costs.of(12)(16) == 2.0, "and the next request hears of it"


sizes_and_times = st.lists(st.tuples(st.integers(1, 40), st.floats(0, 1e6)), max_size=30)


@given(sizes_and_times, sizes_and_times, st.sampled_from([GROWTH, None]), st.integers(1, 50))
def test_a_curve_always_answers(
    before: list[tuple[int, float]], now: list[tuple[int, float]], growth: float, size: int
) -> None:
    """A division by zero, or a NaN, for some history; a clock that stands still gives times of
    0."""
    prior = Curve(growth)
    for each in before:
        prior.observe(*each)
    found = Curve(growth, prior)
    for each in now:
        found.observe(*each)
    assert math.isfinite(found(size)) and (found(size) > 0) == found.known == bool(before or now)


# ---------------------------------------------------------------------------- shares, looks, checks


def test_a_share_starts_as_expected_and_follows_what_happens() -> None:
    """One accepted draft taken for certainty, or a text that changed not being noticed."""
    share = Share()
    assert share.expected(0.4) == pytest.approx(0.4)
    share.add(True)
    assert 0.4 < share.expected(0.4) < 0.6
    for hit in [True] * 200 + [False] * 60:
        share.fade(), share.add(hit)
    assert share.expected(0.4) < 0.2
    for _ in range(300):
        share.fade()
    assert share.expected(0.4) == pytest.approx(0.4, abs=1e-3), (
        "what is not tried any more is forgotten"
    )


def test_looks_become_rare_until_one_pays() -> None:
    """A drafter that never pays tried every few rounds; or one that would pay by now not tried any
    more."""
    looks, plain = Looks(), RoundTime(0.0, 1.0, 0.0)
    rounds = [turn for turn in range(1, 1000) if looks.due(1.0)]
    waits = [after - before for before, after in zip([0, *rounds], rounds, strict=False)]
    assert waits[:5] == [
        FIRST_LOOK,
        2 * FIRST_LOOK,
        4 * FIRST_LOOK,
        8 * FIRST_LOOK,
        16 * FIRST_LOOK,
    ]
    assert max(waits) == LAST_LOOK
    looks.learn(outcome_of([1], [0]), plain)
    assert not any(looks.due(1.0) for _ in range(LAST_LOOK - 1 - (999 - rounds[-1]))), (
        "one token a second is plain decoding"
    )
    assert looks.due(1.0)
    looks.learn(outcome_of([1], [1]), plain)
    assert [looks.due(1.0) for _ in range(LAST_LOOK // 8)][-1], (
        "two tokens a second: the next look is soon"
    )
    looks.learn(outcome_of([1], [1]), RoundTime(1.0, 1.5, 0.0))
    assert not any(looks.due(1.0) for _ in range(2 * LAST_LOOK // 8 - 1)), (
        "two tokens, but in two and a half seconds"
    )


def test_looks_lose_little_of_all_time() -> None:
    """An exit of sixteen rows costs as much as two passes of them, and was looked at after eight
    rounds, after sixteen and so on: 4% of the first two hundred rounds."""
    looks, plain = Looks(), RoundTime(0.0, 1.0, 0.0)
    lost = rounds = 0
    while rounds < 200:
        rounds += 1
        if looks.due(1.0, 0.5 if lost else None):
            looks.learn(outcome_of([1], [0]), RoundTime(0.5, 1.5, 0.0))
            lost += 1
        else:
            looks.wait(plain)
    assert lost == 1 and 1 / LOSS >= 200
    assert looks.due(1.0, 0.9999), "what is as good by now is looked at"


def test_a_first_look_that_costs_much_waits_until_it_loses_little() -> None:
    """What is known to cost ten rounds tried at once, or after a long wait at any price."""
    looks, round_ = Looks(1), RoundTime(0.0, 1.0, 0.0)
    waited = 0
    while not looks.due(1.0, 0.5, cost=10.0):
        looks.wait(round_)
        waited += 1
    assert 5.0 / HIGHEST_LOSS - 1 <= waited <= 5.0 / HIGHEST_LOSS + 1
    assert 2 * LAST_LOOK < waited < 5.0 / LOSS
    assert Looks(1).due(1.0, 1.5, cost=10.0), "what is expected to pay is tried"


def test_rounds_that_were_passed_over_count_as_waited() -> None:
    """Looks that become rarer because nobody asked meanwhile."""
    looks = Looks()
    looks.pass_over([1.0] * (FIRST_LOOK - 2))
    assert not looks.due(1.0)
    assert looks.due(1.0)


def test_the_first_look_may_come_at_once() -> None:
    """Auto's first candidate, free of cost, waits like the others; and the second look must not
    come at once too."""
    looks = Looks(1)
    assert [looks.due(1.0) for _ in range(9)] == [True, *[False] * 7, True]


@pytest.mark.parametrize(
    ("rate", "rounds"),
    [(1.05, SOON), (1.5, SELDOM), (7.0, AT_ONCE)],
    ids=["close", "clear", "absurd"],
)
def test_plain_rounds_are_checked(rate: float, rounds: int) -> None:
    """What a plain round costs never measured again once drafting pays, however wrong it was."""
    checks = Checks()
    for _ in range(rounds):
        assert not checks.due([1.0, rate], 1)
        checks.learn(outcome_of([1], [1]))
    assert checks.due([1.0, rate], 1)
    checks.learn(outcome_of([0], [0]))
    assert not checks.due([1.0, rate], 1)


# ---------------------------------------------------------------------------------------- the model


def test_rates_are_tokens_over_seconds() -> None:
    """The formula: what is kept is summed over the places, rows multiply it, and a round in which
    nothing is found is a plain one that asked in vain."""
    model = CostModel()
    for _ in range(400):  # of two rows one keeps both of its drafts
        model.observe(outcome_of([2, 2], [2, 0]), RoundTime(0.4, 1.5, 0.1), [2, 2])
        model.observe(outcome_of([0, 0], [0, 0]), RoundTime(0.2, 0.9, 0.1), [2, 2])
    plain, _, two = model.rates(2, 2)
    assert plain == pytest.approx(2 / 1.0)
    coverage, chances = model.coverage, model.chances(2)
    assert coverage == pytest.approx(0.5, abs=0.06) and chances == pytest.approx(
        [0.5, 0.5], abs=0.06
    )
    assert two == pytest.approx(
        2 * (1 + coverage * sum(chances)) / (coverage * (1.6 + 0.4) + (1 - coverage) * (1.0 + 0.2))
    )


def test_a_draft_shorter_than_asked_counts_as_not_kept() -> None:
    """A lookup that never finds more than one token seems to promise five, because the other places
    were never seen to fail."""
    model = CostModel()
    for _ in range(200):
        model.observe(outcome_of([1], [1]), RoundTime(0.1, 1.0, 0.0), [5])
    first, *rest = model.chances(5)
    assert first > 0.9 and max(rest) < 0.15


def test_what_later_requests_begin_with_hardly_follows_the_last_text() -> None:
    """One text in which guesses were bad, taken for what texts are like."""
    lasting, own = CostModel(fading=LASTING), CostModel()
    for kept, rounds in ((2, 200), (0, 20)):
        for _ in range(rounds):
            for model in (lasting, own):
                model.observe(outcome_of([2], [kept]), RoundTime(0.1, 1.1, 0.0), [2])
    assert lasting.chances(1)[0] > own.chances(1)[0] + 0.2
    # what earlier requests found weighs more than a guess does
    begun, new = CostModel(lasting), CostModel(likely=lasting.chances(1)[0])
    for model in (begun, new):
        for _ in range(5):
            model.observe(outcome_of([1], [0]), RoundTime(0.1, 1.1, 0.0), [1])
    assert begun.chances(1)[0] > new.chances(1)[0]


def test_fewer_drafts_are_part_of_the_same_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """All worked out anew in each round, since a text that nears its end has less room; or the
    answer to another limit, or a shorter one than asked for."""
    model, asked = CostModel(likely=0.9), []
    for _ in range(30):
        model.observe(outcome_of([8], [8]), RoundTime(0.01, 1.0, 0.0), [8])
    whole = CostModel._all_rates
    monkeypatch.setattr(
        CostModel, "_all_rates", lambda *each: asked.append(each[1:]) or whole(*each)
    )
    long = model.rates(1, 60)
    assert len(long) > 12, "rates that end early by themselves would show nothing"
    for most in (12, 5, 1):
        assert model.rates(1, most) == long[: most + 1]
    assert asked == [(1, 60, 0), (1, MOST, 0)]


def test_what_another_drafters_pass_took_is_overheard() -> None:
    """A look at a drafter because passes of its size are thought to be cheap, though another one
    has just shown what they take; or its own times drowned in those of others."""
    model = CostModel(likely=0.9)
    model.observe(outcome_of([0] * 4, [0] * 4), RoundTime(0.0, 1.0, 0.0), [])
    before = model.supposed(4, 4, 0, 0.2)
    made = [1] * 4
    model.hear([Pass(4, 8, 3.0, drafted=True)])
    assert model.passes.of(4)(8) == pytest.approx(3.0) and not model.drafting.known
    assert model.supposed(4, 4, 0, 0.2) < 0.8 * before
    for _ in range(5):
        model.observe(outcome_of(made, made), RoundTime(0.1, 2.0, 0.0), made)
    for _ in range(9):
        model.hear([Pass(4, 8, 3.0, drafted=True)])
    assert model.passes.of(4)(8) == pytest.approx(2.0)
    for _ in range(9):
        model.hear([Pass(4, 8, 3.0)])
    assert model.passes.of(4)(8) == pytest.approx(3.0), "beside others' tokens, nobody drafted"


def test_drafts_are_supposed_to_grow_as_passes_do() -> None:
    """Rows that draft with a copy in a quarter of the bytes, and take as long as in a pass: many
    of them calculate, and fewer bytes save nothing there. What reads nothing stays free."""
    cheap, dear = CostModel(likely=0.9), CostModel(likely=0.9)
    for model, longer in ((cheap, 1.0), (dear, 1.9)):
        model.observe(outcome_of([0] * 4, [0] * 4), RoundTime(0.0, 1.0, 0.0), [])
        model.hear([Pass(4, 8, longer, drafted=True)])
    assert cheap.supposed(4, 1, 0, 0.25) == pytest.approx(4 * 1.9 / (1 + 0.25))
    assert dear.supposed(4, 1, 0, 0.25) == pytest.approx(4 * 1.9 / (1.9 + 0.25 + 0.75 * 0.9))
    assert dear.supposed(4, 1, 0, 0.0) == pytest.approx(4 * 1.9 / 1.9)


def test_an_unasked_drafter_learns_what_passes_cost_only() -> None:
    """Plain rounds counted against a drafter that had no say in them."""
    model = CostModel()
    for _ in range(50):
        model.observe(outcome_of([0], [0]), RoundTime(0.0, 1.0, 0.0), [])
    assert model.coverage == 1.0 and model.chances(1) == [FIRST_CHANCE]
    assert model.passes.known and not model.drafting.known


def test_an_earlier_request_is_a_prior_that_is_overruled() -> None:
    """Each request starting from nothing, or one bad text spoiling all later ones."""
    before = CostModel()
    for _ in range(100):
        before.observe(outcome_of([2], [2]), RoundTime(0.1, 1.1, 0.0), [2])
    now = CostModel(before)
    assert now.chances(2) == before.chances(2) and best(now.rates(1, 2)) == 2
    for _ in range(12):
        now.observe(outcome_of([2], [0]), RoundTime(0.1, 1.1, 0.0), [2])
    assert max(now.chances(2)) < 0.3
    assert before.chances(1)[0] < 0.9, "and the next request hears of it"


def test_guesses_cost_what_they_add_to_a_pass() -> None:
    """A price in seconds, of all rows together, or without what a second is worth: drafts of any
    length would seem to pay, or none. Or several rows charged what a lone one pays beyond it."""
    costs = CostModel()
    for _ in range(ENOUGH):
        costs.observe(outcome_of([0, 0], [0, 0]), RoundTime(0.0, 1.0, 0.0), [])
        costs.observe(outcome_of([1, 1], [1, 1]), RoundTime(0.1, 1.5, 0.0), [1, 1])
        costs.observe(outcome_of([2, 2], [2, 2]), RoundTime(0.1, 3.0, 0.0), [2, 2])
    second = max(costs.rates(2, 9))
    price = costs.price(2, 2, 9)
    worth = second / 2
    assert price and price.costs == pytest.approx([0.0, worth * 0.5, worth * 2.0])


@pytest.mark.parametrize(
    ("rows", "seconds", "needed"),
    [(4, {4: 1.0, 8: 1.5}, 0.5), (4, {4: 1.0, 8: 2.0, 6: 1.1}, 1.0), (8, {8: 1.0, 9: 2.0}, 0.0)],
)
def test_a_guess_has_to_be_kept_as_often_as_a_pass_grows(
    rows: int, seconds: dict[int, float], needed: float
) -> None:
    """Guesses of many rows thought worth asking for where their own arithmetic takes what they
    save; or thought not to be, because passes that are hardly different took different times."""
    costs = CostModel()
    for size, taken in seconds.items():
        costs.hear([Pass(rows, size, taken)] * ENOUGH)
    assert costs.needed(rows) == pytest.approx(needed)


def test_several_rows_begin_with_their_likelier_guesses() -> None:
    """A first look that guesses for every row, however unlikely: sixteen rows then read twice as
    much to learn what a few guesses tell as well."""
    assert CostModel().price(1, 2, 9) is None, "a lone row's two guesses cost little"
    price = CostModel().price(16, 2, 9)
    assert price and price.best([0.4, 0.3]) == 0 and price.best([0.6, 0.2]) == 1


def test_the_first_number_of_rows_hears_of_later_ones() -> None:
    """Rows that write before the others are read, and again once those have ended: their guesses
    taken to cost nothing, as when nothing larger was known."""
    now = Curves(GROWTH, Curves(GROWTH))
    for rows, size, seconds in [(6, 6, 1.0), (8, 8, 1.0), (8, 16, 2.0), (8, 16, 2.0)]:
        now.observe(rows, size, seconds)
    assert now.of(6)(16) == pytest.approx(2.0)


def test_more_guesses_never_cost_less(monkeypatch: pytest.MonkeyPatch) -> None:
    """Estimates of sizes that were hardly timed may fall. Guesses that seem to give time back would
    be made without end."""
    costs = CostModel()
    for _ in range(ENOUGH):
        costs.observe(outcome_of([0], [0]), RoundTime(0.0, 1.0, 0.0), [])
        costs.observe(outcome_of([1], [1]), RoundTime(0.1, 1.5, 0.0), [1])
    worth = max(costs.rates(1, 9))
    takes = {1: 1.0, 2: 1.5, 3: 3.0, 4: 1.2, 5: 3.5}  # a pass, and drafting so many
    monkeypatch.setattr(Curve, "__call__", lambda self, size: takes.get(size, 4.0))
    price = costs.price(1, 4, 9)
    dearer = (0.0, 0.5, 2.5, 2.5, 2.7)
    assert price and price.costs == pytest.approx([PAYING * worth * each for each in dearer])


def test_drafts_that_are_not_always_there_make_passes_shorter() -> None:
    """A drafter that often has little to say charged for all that was asked for."""
    short, full = CostModel(), CostModel()
    for _ in range(200):
        for drafted in (0, 2, 6):
            for costs in (short, full):
                time = RoundTime(0.01, 1 + 0.2 * drafted, 0.0)
                asked = [6] if costs is full else [drafted]
                costs.observe(outcome_of([drafted], [min(drafted, 1)]), time, asked)
    full.observe(outcome_of([6], [6]), RoundTime(0.01, 2.2, 0.0), [6])
    there = [sum(costs._there[place] for place in range(6)) for costs in (full, short)]
    assert there[0] == pytest.approx(4, abs=0.3) and there[1] == 6.0
    assert full.rates(1, 6)[6] > short.rates(1, 6)[6]


def test_what_was_timed_once_is_not_supposed_any_more() -> None:
    """Several rows looking again at a drafter that took three times as long as supposed."""
    costs = CostModel(likely=0.9)
    costs.observe(outcome_of([0, 0], [0, 0]), RoundTime(0.0, 1.0, 0.0), [])
    before = costs.supposed(2, 4, 0, 0.1)
    costs.observe(outcome_of([1, 1], [1, 1]), RoundTime(0.8, 1.0, 0.0), [1, 1])
    assert costs.supposed(2, 4, 0, 0.1) < 0.8 * before


def test_answers_are_not_stale() -> None:
    """Rates are kept until something is observed; by this request, or by another one into the
    shared prior."""
    prior = CostModel()
    prior.observe(outcome_of([1], [1]), RoundTime(0.1, 1.0, 0.0), [1])
    now = CostModel(prior)
    before, shared = now.rates(1, 3), prior.rates(1, 3)
    now.observe(outcome_of([1], [0]), RoundTime(0.1, 1.0, 0.0), [1])
    assert now.rates(1, 3) != before and prior.rates(1, 3) != shared


rounds = st.lists(
    st.tuples(
        st.lists(
            st.tuples(st.integers(0, 6), st.integers(0, 6), st.integers(0, 6)),
            min_size=1,
            max_size=3,
        ),
        st.tuples(st.floats(0, 10), st.floats(0, 10), st.floats(0, 10)),
    ),
    max_size=12,
)


@given(rounds, rounds, st.integers(1, 3), st.integers(1, 12))
def test_every_history_gives_rates(before, now, rows: int, most: int) -> None:
    """A division by zero or a place out of range after some history: an exception in the middle of
    somebody's request."""
    prior = CostModel()
    model = CostModel(prior)
    for history, into in ((before, prior), (now, model)):
        for row_numbers, seconds in history:
            asked, made, kept = zip(
                *[(max(x), sorted(x)[1], min(x)) for x in row_numbers], strict=True
            )
            into.observe(outcome_of(made, kept), RoundTime(*seconds), list(asked))
    if model.passes.known:
        rates = model.rates(rows, most)
        assert 1 <= len(rates) <= most + 1 and all(
            math.isfinite(rate) and rate > 0 for rate in rates
        )
        assert 0 <= model.coverage <= 1 and all(0 <= chance <= 1 for chance in model.chances(most))
        assert 0 <= best(rates) <= most and 1 <= best(rates, least=1) <= most


def test_no_pass_is_tried_that_is_far_larger_than_all_before() -> None:
    """Sixteen rows of 32 drafts each after one of 1, because a spike made them look cheap: it cost
    as much as ten plain rounds."""
    for rows in (1, 16):
        model = CostModel(likely=0.99)
        model.observe(outcome_of([0] * rows, [0] * rows), RoundTime(0.0, 1.0, 0.0), [])
        model.observe(outcome_of([1] * rows, [1] * rows), RoundTime(1e-6, 1.0, 0.0), [1] * rows)
        assert len(model.rates(rows, 48)) - 1 == 3
        made = [4] * rows
        model.observe(outcome_of(made, made), RoundTime(1e-6, 1.0, 0.0), made)
        assert len(model.rates(rows, 48)) - 1 == 9


# ----------------------------------------------------------------------------- rows share a budget


def test_a_shared_budget_goes_where_drafts_are_kept() -> None:
    """Rows whose drafts are never kept that cost as much as those whose drafts always are."""
    model = CostModel()
    for _ in range(60):
        model.observe(outcome_of([3, 3], [3, 0]), RoundTime(0.1, 1.2, 0.0), [3, 3])
        model.observe(outcome_of([0, 0], [0, 0]), RoundTime(0.0, 1.0, 0.0), [])
    good, bad = model.allotted([0, 1], [9, 9], 6)
    assert good >= 3 and bad == 0
    assert model.allotted([0, 1], [2, 9], 6)[0] == 2, "a row without room gets no more"
    assert model.allotted([1, 0], [9, 9], 6) == [bad, good], "it goes by row and not by place"
    model.forget(0)
    alike = CostModel()
    for _ in range(60):
        alike.observe(outcome_of([2, 2], [2, 2]), RoundTime(0.1, 1.2, 0.0), [2, 2])
        alike.observe(outcome_of([0, 0], [0, 0]), RoundTime(0.0, 1.0, 0.0), [])
    first, second = alike.allotted([0, 1], [9, 9], 2)
    assert first == second == best(alike.rates(2, 2)) == 2


def test_a_shared_budget_may_be_nothing() -> None:
    """Drafts that are made because somebody has to get the budget."""
    model = CostModel()
    for _ in range(60):
        model.observe(outcome_of([2, 2], [0, 0]), RoundTime(0.5, 2.0, 0.0), [2, 2])
        model.observe(outcome_of([0, 0], [0, 0]), RoundTime(0.0, 1.0, 0.0), [])
    assert model.allotted([0, 1], [9, 9], 6) == [0, 0]
    assert shared(model, [0, 1], [9, 9], 6, 0) is None
    assert shared(model, [0], [9], 6, 0) is None, "one row shares with nobody"


def test_a_controller_gives_each_row_its_own_length() -> None:
    """A controller that never learns which row is which, or forgets to say so to its costs."""
    control = CostAware(most=6).start()
    for _ in range(80):
        control.about([4, 9])
        budget = control.budget([50, 50])
        kept = [0, budget.tokens[1]]
        rows = [
            replace(row, row=number)
            for row, number in zip(outcome_of(budget.tokens, kept).rows, [4, 9], strict=True)
        ]
        outcome = replace(outcome_of(budget.tokens, kept), rows=rows)
        passes = 1.0 + 0.05 * sum(budget.tokens)
        control.learn(outcome, RoundTime(0.02 * max(budget.tokens), passes, 0.0))
    control.about([9, 4])
    first, second = control.budget([50, 50]).tokens
    assert first > second


def test_nobody_drafts_while_prompts_that_would_write_faster_together_are_read() -> None:
    """One row that drafts at two thirds of what sixteen write without drafts, and so makes fifteen
    wait for their prompts; and a row that stops drafting because of a single reader."""
    control = CostAware(most=8).start()

    def ask(rows: int, reading: int) -> list[int]:
        control.about([*range(rows)], reading)
        tokens = list(control.budget([50] * rows).tokens)
        control.learn(outcome_of(tokens, tokens), RoundTime(0.1 * max(tokens), 1.0, 0.0))
        return tokens

    for _ in range(200):
        ask(1, 0)
        ask(16, 0)
    alone, beside_one = [ask(1, 0)[0] for _ in range(40)], [ask(1, 1)[0] for _ in range(40)]
    beside_many = [ask(1, 15)[0] for _ in range(40)]
    assert sum(map(bool, alone)) >= 35 and sum(map(bool, beside_one)) >= 35
    assert sum(map(bool, beside_many)) <= 3, beside_many
    assert control.costs.together(1, 15) > max(control.costs.rates(1, 8)) > 2
    assert control.costs.together(1, 0) == 0


@pytest.mark.parametrize(("asked", "expected"), [([9, 9, 9], 4), ([9, 9, 2], 9)])
def test_drafts_that_end_by_themselves_count_by_their_mean(asked: list[int], expected: int) -> None:
    """What the longest draft took is expected of drafts of mean length, so that drafting for
    several rows seems half as dear as it is; or rows that were asked for less hide the longest."""
    costs = CostModel()
    costs.observe(outcome_of([9, 1, 2], [9, 1, 2]), RoundTime(0.9, 1.0, 0.0), asked)
    assert costs.drafting.of(3)(expected) == pytest.approx(0.9)
