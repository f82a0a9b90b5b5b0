"""The likeliest tokens by our kernel, beside torch's."""

from __future__ import annotations

import pytest
import torch

from selfspec.model.compute.cpu.choosing import _by_blocks, likeliest


def expected(row, count):
    """Largest first, of equal ones the lowest index; NaN before all."""
    key = [(-float("inf") if value != value else -value, index) for index, value in enumerate(row)]
    return [index for _, index in sorted(key)[:count]]


@pytest.mark.parametrize("size", [1, 7, 255, 256, 257, 1000, 5000])
@pytest.mark.parametrize("count", [1, 7])
def test_the_likeliest_are_those_of_a_sort(size, count):
    """A block's end that is left out, equal numbers in another order, a largest found twice."""
    generator = torch.Generator().manual_seed(size)
    logits = torch.randint(-40, 40, (6, size), generator=generator).float() / 8
    logits[1] = -torch.inf
    logits[2, : size // 2] = -torch.inf
    logits[3, size // 2] = torch.nan
    logits[4] = 3.0
    found = likeliest(logits, count)
    assert found.shape == (6, min(count, size))
    for row, ids in zip(logits.tolist(), found.tolist(), strict=True):
        assert ids == expected(row, count)
    assert torch.equal(likeliest(logits)[:, 0], logits.argmax(-1))


def test_other_tensors_are_left_to_torch():
    """Memory read by another stride, or as other numbers, than it has."""
    logits = torch.randn(5, 3000, generator=torch.Generator().manual_seed(0))
    for other in (logits.double(), logits.T.contiguous().T, logits.bfloat16()):
        assert torch.equal(likeliest(other)[:, 0], other.argmax(-1))
    assert torch.equal(_by_blocks(logits, 7), likeliest(logits, 7))
    assert torch.equal(likeliest(logits.T.contiguous().T, 7), likeliest(logits, 7))
