"""The cost model of a round, from numbers known by heart, and the isolated steps that it is fed
with."""

from __future__ import annotations

import pytest

from selfspec.bench.costs import CostModel, StepTimer, fitting
from selfspec.bench.schema import Counts, StepPoint, Turn
from selfspec.model.layered import LayeredModel
from selfspec.testing import tiny_llm

POINTS = [
    StepPoint("verify", 100, 1, [0.010, 0.020]),  # the machine went half as fast the second time
    StepPoint("verify", 100, 2, [0.010, 0.020]),
    StepPoint("verify", 100, 3, [0.014, 0.028]),
    StepPoint("verify", 300, 1, [0.010, 0.010]),
    StepPoint("verify", 300, 2, [0.012, 0.012]),
    StepPoint("verify", 300, 3, [0.018, 0.018]),
    StepPoint("exit", 100, 1, [0.003, 0.006]),
    StepPoint("exit", 300, 1, [0.005, 0.005]),
]


def test_steps_are_interpolated_in_units_of_plain_passes() -> None:
    """Catches seconds of one moment mixed with those of another (drift), and a context or length
    taken for its neighbour."""
    costs = CostModel(POINTS)
    assert [costs.verify(count, 100) for count in (1, 2, 3)] == pytest.approx([1.0, 1.0, 1.4])
    assert costs.verify(3, 200) == pytest.approx(1.6), "between 1.4 and 1.8"
    assert costs.verify(3, 50) == pytest.approx(1.4) and costs.verify(3, 5000) == pytest.approx(1.8)
    assert costs.verify(5, 100) == pytest.approx(1.8), (
        "beyond what was measured: on along the line from 1 to the longest"
    )
    assert costs.draft("exit", 200) == pytest.approx(0.4)
    assert costs.draft("lookup", 200) is None


def a_turn(method: str, draft_seconds: float) -> Turn:
    """10 tokens in 10 rounds, 6 without drafts and 4 with two; behind 95 tokens it is around
    100."""
    counts = Counts(drafted=8, draft_seconds=draft_seconds, verified=[6, 0, 4])
    return Turn(f"selfspec/{method}", "qa", ["qa/1"], 1, 0, 1.0, 0.5, 1, [11], counts=counts)


def test_the_prediction_of_an_answer() -> None:
    """Catches a model that prices the mean block instead of the blocks, leaves drafts out, or
    counts some twice."""
    costs = CostModel(POINTS)
    turn = a_turn("exit", 9.0)
    assert costs.seconds(turn, 95, 0.02) == pytest.approx(0.02 * (6 * 1.0 + 4 * 1.4 + 8 * 0.3))
    lookup = a_turn("lookup", 0.001)
    assert costs.seconds(lookup, 95, 0.02) == pytest.approx(0.02 * (6 * 1.0 + 4 * 1.4) + 0.001)


def test_timing_steps_changes_no_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches isolated drafts and passes that pile up in their cache, each reading a longer text
    than the one before."""
    llm, made = tiny_llm(), []
    real = LayeredModel.new_cache
    monkeypatch.setattr(
        LayeredModel, "new_cache", lambda *a, **k: made.append(real(*a, **k)) or made[-1]
    )
    timer = StepTimer(
        llm.model,
        list(range(3, 140)) * 2,
        {"exit": {"draft": "early-exit"}, "plain": {"draft": None}},
        3,
    )
    timer.measure()
    assert {(point.kind, point.context) for point in timer.points} == {
        ("verify", 128),
        ("exit", 128),
    }
    assert [cache.lengths.tolist() for cache in made] == [[[128] * 4]], (
        "one cache, as it was after the prefill"
    )
    assert fitting((128, 512), 300) == [128] and fitting((128, 512), 60) == [60]
