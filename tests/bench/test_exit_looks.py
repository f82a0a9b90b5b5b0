"""Which few layers to look at, and predictors of other depths, on samples made by hand."""

from __future__ import annotations

import torch

from benchmarks.exit_looks import by_depth, few_looks, looked
from selfspec.train.exit_fitting import FitOptions, Split, fit

LAYERS = 6


def made(count: int, seed: int) -> dict[str, torch.Tensor]:
    """Half of the answers are there from layer 3 on, the others from 5 on: looks begin at 2."""
    dice = torch.Generator().manual_seed(seed)
    early = torch.rand(count, generator=dice) < 0.5
    at = torch.where(early, 3, 5)
    there = torch.arange(2, LAYERS)[None] >= at[:, None]
    logits = torch.randn(count, LAYERS - 2, 2, generator=dice) * 0.1
    logits[..., 0] += torch.where(there, 4.0, -4.0)
    return {
        "logits": logits,
        "top": torch.where(there, 0, 1).to(torch.int8),
        "same": there,
        "answer": torch.zeros(count, dtype=torch.int8),
        "text": torch.arange(count) // 10,
    }


def test_few_looks_are_those_that_save() -> None:
    """A neighbour that finds the same tokens chosen before the layer where the others leave, layers
    counted from the first, or a look that is never paid for."""
    parts = Split(made(400, 0), made(200, 1))
    tensors = fit(parts.fit, FitOptions(hidden=32, epochs=150))
    every, one, two, *_ = few_looks(tensors, parts, LAYERS, 0.5)
    assert (every["at"], one["at"], two["at"]) == ("all", "3", "3,5")
    assert every["agreement"] > 0.99 and two["agreement"] > 0.99
    assert abs(two["layers"] - every["layers"]) < 0.05 and two["looks"] < every["looks"] - 0.5
    alone = looked(tensors, parts.held_out, LAYERS, [5], 0.5)
    assert alone["looks"] == 1 and 5 <= alone["layers"] < 5.1


def test_deeper_predictors_are_other_networks() -> None:
    """Maps that are left out, or a depth that learns nothing."""
    one, two = by_depth(made(400, 0), made(200, 1), 16, (1, 2), 150)
    assert (one["weights"], two["weights"]) == (6 + 1, 6 * 16 + 16 + 16 + 1)
    assert min(one["accuracy"], two["accuracy"]) > 0.95
