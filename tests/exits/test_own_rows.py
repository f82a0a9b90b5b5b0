"""The grouped product that features of all texts, and of all paths of a tree, come from: by our
kernel, by torch and in double precision."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from selfspec import LLM
from selfspec.lossy import SpecEE
from selfspec.model.compute.cpu import own_rows as module
from selfspec.model.compute.cpu.own_rows import own_rows
from selfspec.testing import near_identity_model, tiny_predictors, tiny_tokenizer

PROMPTS = [list(b"once upon a time, once upon"), [7], list(b"aXb aXb aXb a")]


@pytest.fixture
def by_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a machine without a compiler, or on a card."""
    monkeypatch.setattr(module, "_kernel", lambda: None)


def numbers(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("kernel", [True, False])
@pytest.mark.parametrize("width", [1, 15, 16, 100, 577])
@pytest.mark.parametrize("whose", [[0], [0, 1, 2, 3, 4], [4, 1], [2, 0, 2], [1, 0, 2, 4, 3]])
def test_each_state_is_multiplied_by_its_own_rows(
    kernel: bool, width: int, whose: Sequence[int], request: pytest.FixtureRequest
) -> None:
    """Rows of another state, a width's end left out, states that are not in the rows' order. To the
    rounding of float32: some parts in a million of what is summed."""
    if not kernel:
        request.getfixturevalue("by_torch")
    elif module._kernel() is None:
        pytest.skip("no compiler here")
    rows, x = numbers(5, 4, width), numbers(len(whose), width, seed=1)
    found = own_rows(rows, whose, x)
    exact = (rows[list(whose)].double() * x[:, None].double()).sum(-1)
    summed = (rows[list(whose)] * x[:, None]).abs().sum(-1)
    assert found.shape == (len(whose), 4)
    assert bool(((found - exact).abs() <= 2e-6 * summed).all())


def test_bits_depend_on_no_neighbour_and_on_no_thread() -> None:
    """Sums that are cut by threads, or that take a neighbour's numbers along. So many numbers that
    several threads share them."""
    rows, x = numbers(96, 4, 1536), numbers(96, 1536, seed=1)
    together, threads = own_rows(rows, range(96), x), torch.get_num_threads()
    for at in range(96):
        assert torch.equal(own_rows(rows, [at], x[at : at + 1]), together[at : at + 1])
    try:
        for some in (1, 2, 3):
            torch.set_num_threads(some)
            assert torch.equal(own_rows(rows, range(96), x), together)
    finally:
        torch.set_num_threads(threads)


def test_memory_in_another_order_is_read_as_it_is() -> None:
    """A transposed or cut tensor whose memory is read as if it were whole."""
    rows, x = numbers(16, 3, 4).permute(2, 1, 0), numbers(16, 4).T
    assert torch.equal(own_rows(rows, range(4), x), own_rows(rows.clone(), range(4), x.clone()))
    assert torch.allclose(own_rows(rows, range(4), x), (rows * x[:, None]).sum(-1), atol=1e-5)


@functools.cache
def llm() -> LLM:
    return LLM.from_pretrained(near_identity_model(0.6, seed=2), tokenizer=tiny_tokenizer())


def left(tree: int) -> list[tuple[list[int], list[int]]]:
    """What is said, and after how many layers each token."""
    part = tiny_predictors(llm().model, candidates=7, seed=3)
    how = SpecEE(part, schedule="all", threshold=0.4, fill="state", tree=tree)
    call: dict[str, Any] = {"max_new_tokens": 40, "eos": []}
    return [(list(each.tokens), list(each.exits)) for each in how.generate(llm(), PROMPTS, **call)]


@pytest.mark.parametrize("tree", [0, 6])
def test_tokens_leave_where_torchs_features_let_them(
    tree: int, request: pytest.FixtureRequest
) -> None:
    """A kernel whose rounding, or whose rows, make another text: token by token, and with trees."""
    ours = left(tree)
    assert len({layer for _, exits in ours for layer in exits}) > 1, "nothing leaves early"
    request.getfixturevalue("by_torch")
    assert left(tree) == ours
