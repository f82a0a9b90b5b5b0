"""The cost card and the verify curve on a tiny model: what is run, not how long it takes."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from benchmarks.plain import card as plain_card
from benchmarks.plain.report import best_bandwidth
from benchmarks.plain.results import CostCard
from selfspec.bench import meters
from selfspec.bench.costs import Passes
from selfspec.model.from_transformers import from_transformers
from selfspec.model.layered import LayeredModel
from selfspec.model.measuring import weight_bytes
from selfspec.testing import tiny_model

IDS = [(7 * index + 3) % 200 for index in range(128)]


@pytest.fixture(scope="module")
def model() -> LayeredModel:
    return from_transformers(tiny_model("llama"))


@pytest.fixture(autouse=True)
def small_buffers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(meters, "SMALLEST_BUFFER", 2**20)


def test_a_pass_leaves_the_cache_as_it_was(model: LayeredModel) -> None:
    """Catches a context that grows from turn to turn: later rounds would be slower, and the ratios
    of nothing much."""
    passes = Passes(model, IDS, context=40, longest=8)
    before = torch.as_tensor(passes.cache.lengths).clone()
    for tokens in (8, 1, 3):
        passes.run(tokens)
        assert torch.equal(torch.as_tensor(passes.cache.lengths), before)
    assert int(before.max()) == int(before.min()) == 40


def test_a_pass_runs_all_its_tokens(model: LayeredModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a verify(8) that computes one token, or those that the cache holds already: any ratio
    would look splendid."""
    seen: list[list[int]] = []
    forward = LayeredModel.forward

    def watched(model: LayeredModel, tokens: torch.Tensor, *rest: object) -> torch.Tensor:
        seen.append(tokens.tolist())
        return forward(model, tokens, *rest)

    monkeypatch.setattr(LayeredModel, "forward", watched)
    passes = Passes(model, IDS, context=40, longest=8)
    passes.run(8)
    passes.run(1)
    assert seen == [IDS[40:48], IDS[40:41]]


def test_the_curve_has_every_point(model: LayeredModel) -> None:
    """Catches contexts or counts that are mixed up or left out."""
    points = [
        point
        for some in plain_card.verify_curve(model, IDS, (16, 64), (1, 2, 5), rounds=2)
        for point in some
    ]
    assert [(point.context, point.tokens) for point in points] == [
        (context, n) for context in (16, 64) for n in (1, 2, 5)
    ]
    assert all(len(point.seconds) == 2 and all(point.seconds) for point in points)


def test_the_card_has_what_the_floor_needs(model: LayeredModel) -> None:
    """Catches weight bytes that are not those which a pass reads, and products that are not as many
    as steps."""
    found = plain_card.cost_card(model, IDS, rounds=3)
    assert found.weight_bytes == weight_bytes(model) > 0
    assert len(found.products) == len(found.step) == 3 and found.context == 64
    assert found.in_turns and [len(each) for each in found.bandwidth.values()] == [3] * 3


def test_reading_is_told_by_its_median_where_it_took_turns() -> None:
    """A second in which memory was twice as fast, taken for what it gives."""
    card = CostCard(8, {"sum": [1e9, 1e9, 2e9], "dot": [5e8] * 3}, [1.0], [1.0], 64)
    assert best_bandwidth(card) == 2e9, "of old results, which read before the rounds"
    assert best_bandwidth(replace(card, in_turns=True)) == 1e9


def test_bandwidth_counts_the_bytes_of_its_buffer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches bytes counted as values or as bits, with a clock by which every reading takes a
    second."""
    now = iter(range(10_000))
    monkeypatch.setattr(meters, "timed", lambda action: lambda: (action(), next(now), 1.0)[-1])
    found = meters.read_bandwidth(4 * 2**20, repetitions=3)
    assert found == {way: [4 * 2**20] * 3 for way in ("sum", "dot", "matrix-vector")}
    assert meters.read_bandwidth(10, repetitions=1)["sum"] == [2**20], (
        "never smaller than a cache, whatever the model"
    )
