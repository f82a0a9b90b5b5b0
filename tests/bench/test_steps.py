"""The step benchmark: its variants on a tiny model, and its ratio from numbers known by heart."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from suite_world import PROVENANCE
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.steps import (
    StepOptions,
    StepsRun,
    against_arithmetic,
    contestants,
    head_products,
    markdown,
    variants,
)
from selfspec.testing import tiny_model


def test_the_ratio_is_to_a_plain_step_and_the_products() -> None:
    """The plain step or the products left out: a recipe that costs twice what it may would look
    cheap, or the other way round."""
    seconds: dict[str, list[float | None]] = {
        "plain": [1.0] * 4,
        "EE": [1.4] * 4,
        "LD+EE": [1.1] * 4,
        "products": [0.3] * 4,
    }
    run = StepsRun(PROVENANCE, "m", StepOptions(length=8, rounds=4), seconds)
    found = against_arithmetic(run, "EE")
    assert found is not None and found.value == pytest.approx(1.4 / 1.3)
    text = markdown(run)
    assert "1.08 (1.08-1.08)" in text and "0.85 (0.85-0.85)" in text


def test_variants_differ_in_what_they_are_named_for() -> None:
    """Dropout in the variant that shall show the exits' price, or an exit outside the model."""
    found = variants(30, 2)
    assert {
        name: (recipe.dropout > 0, len(recipe.exit_weights(30, 0, 1)))
        for name, recipe in found.items()
    } == {"plain": (False, 1), "EE": (False, 3), "LD+EE": (True, 3)}
    assert found["EE"].exits == (10, 20)
    for exits in (1, 3, 5):
        variants(6, exits)["EE"].check(6)


def test_every_variant_takes_steps() -> None:
    """A step without its backward pass or optimizer, or a model whose forward is not given back."""
    model = tiny_model(seed=3).requires_grad_(True).train()
    before = {name: value.clone() for name, value in model.named_parameters()}
    turns = contestants(model, StepOptions(rows=2, length=9))
    assert list(turns) == ["plain", "EE", "LD+EE", "products"] and all(
        turn() > 0 for turn in turns.values()
    )
    assert any(not torch.equal(value, before[name]) for name, value in model.named_parameters())
    assert "forward" not in vars(model) and all(value.grad is None for value in model.parameters())


def test_the_products_are_three_for_each_exit() -> None:
    """An arithmetic that forgets the gradients, which would call any recipe too dear."""
    products: list[int] = []

    class StopCheck(TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            if "mm" in str(func):
                left, right = args[-2:]
                products.append(left.shape[0] * left.shape[1] * right.shape[1])
            return func(*args, **(kwargs or {}))

    with StopCheck():
        head_products(torch.randn(32, 8), torch.randn(10, 8), exits=2, positions=4)
    assert sum(products) == 3 * 2 * 32 * 8 * 10
