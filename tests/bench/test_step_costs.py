"""The cost model of a round, from numbers known by heart, and the isolated steps that it is fed
with."""

from __future__ import annotations

import pytest

from selfspec.bench.step_costs import CostModel, StepTimer, fitting
from selfspec.model.layered import LayeredModel
from selfspec.testing import tiny_llm

POINTS = [
    {
        "kind": "verify",
        "context": 100,
        "tokens": 1,
        "seconds": [0.010, 0.020],
    },  # the machine went half as fast the second time
    {"kind": "verify", "context": 100, "tokens": 2, "seconds": [0.010, 0.020]},
    {"kind": "verify", "context": 100, "tokens": 3, "seconds": [0.014, 0.028]},
    {"kind": "verify", "context": 300, "tokens": 1, "seconds": [0.010, 0.010]},
    {"kind": "verify", "context": 300, "tokens": 2, "seconds": [0.012, 0.012]},
    {"kind": "verify", "context": 300, "tokens": 3, "seconds": [0.018, 0.018]},
    {"kind": "exit", "context": 100, "tokens": 1, "seconds": [0.003, 0.006]},
    {"kind": "exit", "context": 300, "tokens": 1, "seconds": [0.005, 0.005]},
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


def a_turn(method: str, draft_seconds: float) -> dict[str, object]:
    """10 rounds, 6 without drafts and 4 with two, around context 100."""
    turn: dict[str, object] = {
        "method": method,
        "prompt_tokens": 95,
        "decoded": 10,
        "verified": [6, 0, 4],
        "drafted": 8,
    }
    return {**turn, "draft_seconds": draft_seconds}


def test_the_prediction_of_an_answer() -> None:
    """Catches a model that prices the mean block instead of the blocks, leaves drafts out, or
    counts some twice."""
    costs = CostModel(POINTS)
    turn = a_turn("exit", 9.0)
    assert costs.seconds(turn, 0.02) == pytest.approx(0.02 * (6 * 1.0 + 4 * 1.4 + 8 * 0.3))
    lookup = a_turn("lookup", 0.001)
    assert costs.seconds(lookup, 0.02) == pytest.approx(0.02 * (6 * 1.0 + 4 * 1.4) + 0.001)


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
