"""Interleaving, warm-up, paired ratios: with invented clocks, so that nothing here depends on the
machine's speed."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.ratios import median, ratio
from selfspec.bench.timing import ContestantFailed, Timings, interleave, timed
from selfspec.errors import OptionError


class Machine:
    """An invented machine whose speed drifts: each turn takes its cost times the present mood, with
    a little noise."""

    def __init__(self, seed: int = 0, drift: float = 0.05) -> None:
        self.now, self.turns, self.drift, self.chance = 0.0, 0, drift, random.Random(seed)

    def clock(self) -> float:
        return self.now

    def work(self, cost: float) -> None:
        self.turns += 1
        self.now += cost * (1 + self.drift * self.turns) * self.chance.uniform(0.995, 1.005)


def race(machine: Machine, costs: dict[str, float], rounds: int = 15) -> Timings:
    contestants = {
        name: timed(lambda cost=cost: machine.work(cost), machine.clock)
        for name, cost in costs.items()
    }
    return interleave(contestants, rounds)


def test_contestants_take_turns_and_the_first_place_goes_round() -> None:
    """Catches runs in blocks (A A A B B B) and a fixed order, where one contestant always follows
    the same neighbour."""
    order: list[str] = []
    contestants = {name: (lambda name=name: order.append(name) or 1.0) for name in "ABC"}
    interleave(contestants, rounds=3, warmup=1)
    assert "".join(order) == "ABC" + "BCA" + "CAB" + "ABC", (
        "the warm-up round and three measured ones, each starting one further on"
    )


def test_the_warm_up_is_not_measured() -> None:
    """Catches a first, slow turn that ends up in the medians."""
    costs = iter([100.0, 50.0, 1.0, 2.0, 3.0])
    timings = interleave({"A": lambda: next(costs)}, rounds=3, warmup=2)
    assert timings.seconds["A"] == [1.0, 2.0, 3.0]


def test_timed_takes_the_difference_of_the_clock() -> None:
    """Catches a contestant that returns a point in time, or that times something other than the
    action."""
    ticks = iter([10.0, 12.5])
    called = []
    assert timed(lambda: called.append(1), lambda: next(ticks))() == 2.5
    assert called == [1]


def test_a_handicapped_contestant_is_flagged_slower_and_its_rival_faster() -> None:
    """Catches a comparison that drift or noise can hide: the machine here gets slower by 5% of its
    start with each turn."""
    timings = race(Machine(), {"ours": 1.0, "handicapped": 1.10})
    slower = ratio(timings.seconds["handicapped"], timings.seconds["ours"])
    faster = ratio(timings.seconds["ours"], timings.seconds["handicapped"])
    assert slower is not None and slower.low > 1.01
    assert slower.value == pytest.approx(1.10, abs=0.05)
    assert faster is not None and faster.high < 1 / 1.01


@pytest.mark.parametrize("seed", range(5))
def test_an_identical_pair_is_equal(seed: int) -> None:
    """Catches a verdict out of thin air: same cost, drifting machine, no winner. Lucky with one
    seed, so five."""
    timings = race(Machine(seed), {"one": 1.0, "other": 1.0})
    result = ratio(timings.seconds["one"], timings.seconds["other"])
    assert result is not None and result.low <= 1.01 and result.high >= 1 / 1.01, (
        f"an identical pair was not called equal: {result}"
    )


def test_ratios_are_paired_by_round() -> None:
    """Catches a ratio of medians: rounds of 1 s and of 10 s, where the first is always twice as
    slow, leave no doubt at all."""
    rival = [1.0, 10.0, 1.0, 10.0, 3.0]
    result = ratio([2 * seconds for seconds in rival], rival)
    assert result is not None and (result.value, result.low, result.high) == (2.0, 2.0, 2.0)


@given(st.lists(st.tuples(st.floats(0.1, 10), st.floats(0.1, 10)), min_size=1, max_size=12))
def test_the_interval_holds_its_value_and_repeats(pairs: list[tuple[float, float]]) -> None:
    """Catches an interval beside its own median, ends in the wrong order, and tables that change
    when they are made again."""
    first, second = [a for a, _ in pairs], [b for _, b in pairs]
    result = ratio(first, second, draws=200)
    assert result is not None and result.low <= result.value <= result.high
    assert result == ratio(first, second, draws=200)
    assert min(a / b for a, b in pairs) <= result.low and result.high <= max(
        a / b for a, b in pairs
    )


def test_a_noisy_comparison_has_a_wide_interval() -> None:
    """Catches an interval that does not look at the spread: 0.5 and 2 in turn say nothing, so the
    verdict must not either."""
    result = ratio([0.5, 2.0, 0.5, 2.0, 0.5, 2.0, 1.0], [1.0] * 7)
    assert result is not None and result.low == 0.5 and result.high == 2.0


def test_one_that_fails_retires_and_the_others_go_on() -> None:
    """Catches a benchmark that dies with its weakest peer, loses what that peer had measured, or
    shifts its later rounds."""
    turns = iter([1.0, 1.0, 1.0])
    falls = iter(["fell over"])  # asked once more, it would be a StopIteration

    def frail() -> float:
        seconds = next(turns, None)
        if seconds is None:
            raise ContestantFailed(next(falls))
        return seconds

    timings = interleave({"frail": frail, "firm": lambda: 2.0}, rounds=4, warmup=1)
    assert timings.failures == {"frail": "fell over"}
    assert timings.seconds["frail"] == [1.0, 1.0, None, None]
    assert timings.of("frail") == [1.0, 1.0]
    assert timings.seconds["firm"] == [2.0] * 4
    result = ratio(timings.seconds["frail"], timings.seconds["firm"])
    assert result is not None and result.value == 0.5, "the rounds that both finished are compared"


def test_every_round_is_handed_out_as_soon_as_it_is_measured() -> None:
    """Catches results that are only kept at the end: a kill in round 3 must leave rounds 1 and
    2."""
    seen: list[int] = []
    ticks: list[str] = []
    contestants = {"A": lambda: 1.0, "B": lambda: 1.0}
    interleave(
        contestants,
        3,
        warmup=1,
        on_turn=ticks.append,
        on_round=lambda timings: seen.append(len(timings.seconds["B"])),
    )
    assert seen == [1, 2, 3]
    assert len(ticks) == 8, "the progress bar hears of the warm-up turns too"


def test_nothing_measured_has_no_ratio_and_no_median() -> None:
    """Catches a division by nothing, or a 0 in a table, for a peer that never started."""
    assert ratio([], [1.0, 2.0]) is None
    assert ratio([None], [1.0]) is None
    assert median([None, None]) is None


def test_no_rounds_are_refused() -> None:
    """Catches an empty result that looks like a finished one."""
    with pytest.raises(OptionError, match="rounds=0"):
        interleave({"A": lambda: 1.0}, rounds=0)
