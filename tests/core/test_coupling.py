"""Waiting times: what they are, that none is left out which could be first, and how often draws
from two distributions agree."""

from __future__ import annotations

import math
from collections import Counter
from itertools import permutations

import numpy as np
import pytest
import torch
from torch import Tensor

from benchmarks.agreement import by_coupling, overlap
from selfspec.core.coupling import UNSURE, earliest, times
from selfspec.core.randomness import invert, key
from selfspec.model.compute.cpu import choosing
from selfspec.model.compute.cpu.choosing import drawn


def some_logits(size: int, width: float, seed: int = 0) -> Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(seed)) * width


def test_times_are_independent_exponentials() -> None:
    """A first of 64 that comes too often or too seldom, or leaves a mark on its neighbours."""
    count = 1 << 18
    found = times(key(3, 1), np.arange(count))
    for power in (1, 2, 3):
        moment, spread = math.factorial(power), math.sqrt(math.factorial(2 * power))
        assert abs((found**power).mean() - moment) < 4 * spread / math.sqrt(count)
    blocks = found.reshape(-1, 64)
    holders = np.bincount(blocks.argmin(1), minlength=64)
    assert ((holders - 64) ** 2 / 64).sum() < 125, "63 degrees of freedom"
    low, high = np.sort(blocks, axis=1)[:, :2].T
    for gap, rate in ((low, 64), (high - low, 63)):
        assert abs(gap.mean() * rate - 1) < 4 / math.sqrt(len(blocks))
    for step in (1, 2, 63, 64):
        assert abs(np.corrcoef(found[:-step], found[step:])[0, 1]) < 4 / math.sqrt(count)
    other = times(key(3, 2), np.arange(count))
    assert abs(np.corrcoef(found, other)[0, 1]) < 4 / math.sqrt(count), "keys that are alike"


@pytest.mark.parametrize("width", [0.0, 1.0, 4.0, 60.0])
@pytest.mark.parametrize("size", [2049, 5000, 8192])
def test_nothing_is_left_out_that_could_be_first(size: int, width: float) -> None:
    """A bound that is too tight, a last block that is cut, a block of filtered tokens."""
    logits = some_logits(size, width)
    logits[: size // 4] = -math.inf
    for number in range(25):
        scores = logits.double().numpy() - np.log(times(number, np.arange(size)))
        order = np.argsort(-scores)
        assert earliest(logits, None, number) == [order[0]]
        assert earliest(logits, None, number, 4) == list(order[:4])


@pytest.mark.parametrize("size", [1, 5, 63, 64, 65, 130, 2048, 5000])
def test_the_kernel_draws_the_same_token(size: int) -> None:
    """A seed that draws otherwise where a compiler is found; a block that is cut or left out."""
    if not kernel_is_here():
        pytest.skip("no compiler here")
    unsure = 0
    for number in range(60):
        logits = some_logits(size, (0.0, 0.1, 3.0, 40.0)[number % 4], number)
        if number % 5 == 0:
            logits[1 + number % 2 :: 2] = -math.inf
        token = drawn(logits, key(number, 7))
        unsure += token == UNSURE
        assert token in (UNSURE, earliest(logits, None, key(number, 7))[0]), number
    assert unsure == 0, "rounding decides once in a billion"


@pytest.mark.parametrize("broken", [math.nan, math.inf])
def test_the_kernel_leaves_broken_logits_to_others(broken: float) -> None:
    """A token drawn of what is no distribution, and no error."""
    logits = some_logits(300, 1.0)
    assert drawn(torch.full((300,), -math.inf), 5) == UNSURE
    for place in (0, 63, 64, 299):
        spoilt = logits.clone()
        spoilt[place] = broken
        assert drawn(spoilt, 5) == UNSURE, place
    assert drawn(logits.bfloat16(), 5) == UNSURE
    assert drawn(logits[::2], 5) == UNSURE, "not in one piece"


def kernel_is_here() -> bool:
    return choosing._drawing() is not None


def test_times_are_stable_across_versions() -> None:
    """A silent change of the numbers, which would change what every published seed gives."""
    assert times(key(1, 5, 0), np.array([0, 1, 77, 50_000])) == pytest.approx(STABLE, rel=1e-14)


STABLE = [1.1190640391686872, 0.07040391670437351, 2.3555454939143328, 0.08068827006640658]


def test_draws_without_replacement() -> None:
    """A second draw that is not of the distribution without the first."""
    p = torch.tensor([0.5, 0.3, 0.15, 0.05]).double()
    draws = 4000
    found = Counter(tuple(earliest(p.log(), None, key(1, n), 2)) for n in range(draws))
    chi = 0.0
    for pair in permutations(range(4), 2):
        expected = draws * float(p[pair[0]] * p[pair[1]] / (1 - p[pair[0]]))
        chi += (found[pair] - expected) ** 2 / expected
    assert chi < 36, "11 degrees of freedom"


def test_fewer_are_drawn_where_fewer_are_left() -> None:
    """A filtered token that is drawn because nothing else is left."""
    logits = torch.tensor([-math.inf, 0.0, -math.inf, 1.0])
    assert sorted(earliest(logits, None, 9, 3)) == [1, 3]


@pytest.mark.parametrize("width", [0.5, 1.5])
def test_alike_distributions_draw_alike(width: float) -> None:
    """A draft and a target that use other numbers for the same token; a wrong formula."""
    logits = some_logits(30, 1.5)
    other = logits + some_logits(30, width, seed=1)
    p, q = logits.double().softmax(-1), other.double().softmax(-1)
    keys = [key(n) for n in range(4000)]
    agreed = np.mean([earliest(logits, None, k) == earliest(other, None, k) for k in keys])
    slow = sum(1 / float(torch.maximum(p / p[i], q / q[i]).sum()) for i in range(30))
    assert by_coupling(p, q) == pytest.approx(slow)
    assert abs(agreed - slow) < 4 * math.sqrt(0.25 / 4000)
    assert overlap(p, q) / (2 - overlap(p, q)) <= slow <= overlap(p, q), "its bounds"


def test_agreement_of_distributions_with_nothing_in_common() -> None:
    """0 / 0 in the formula."""
    p, q = torch.tensor([0.5, 0.5, 0.0, 0.0]), torch.tensor([0.0, 0.0, 1.0, 0.0])
    assert by_coupling(p, q) == 0 and by_coupling(p, p) == pytest.approx(1)


@pytest.mark.parametrize(
    ("chances", "number", "token"),
    [
        ([0.0, 0.5, 0.5], 0.0, 1),
        ([0.25, 0.0, 0.75], 0.25, 2),
        ([0.5, 0.5], 0.5, 1),
        ([0.5, 0.5, 0.0], 1 - 2.0**-53, 1),
    ],
)
def test_a_number_at_an_edge_chooses_no_token_of_chance_0(
    chances: list[float], number: float, token: int
) -> None:
    """A token that a filter took out, drawn all the same, once in 2**53 times: no test by chance
    would meet it."""
    assert invert(torch.tensor(chances), number) == token
