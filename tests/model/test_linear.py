"""Products: equal to F.linear, and in the native kernel a row's bits do not depend on the number of
rows."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from selfspec.model.compute.cpu.linear import Float32
from selfspec.model.compute.linear import MklLinear, PlainLinear, mkl_is_row_stable

SHAPES = [(960, 576), (576, 1536), (259, 52), (33, 7), (1, 16)]


def example(shape, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator), torch.randn((64, shape[1]), generator=generator)


@pytest.mark.parametrize("kind", [Float32, MklLinear, PlainLinear])
@pytest.mark.parametrize("shape", SHAPES)
def test_product_is_right_for_every_number_of_rows(kind, shape):
    """A tile, a last partial panel or MKL's silent fallback (a third argument of rubbish) that
    gives other numbers."""
    weight, x = example(shape)
    linear = kind([weight], [None])
    for rows in range(1, 65):
        assert torch.allclose(linear(x[:rows]), F.linear(x[:rows], weight), atol=2e-4, rtol=1e-4), (
            f"{rows} rows"
        )


@pytest.mark.parametrize("shape", SHAPES)
def test_native_rows_have_the_same_bits_for_every_number_of_rows(shape):
    """Tiles that add in another order. The same inputs in other company, at every offset."""
    weight, x = example(shape)
    linear = Float32([weight], [None])
    alone = torch.cat([linear(x[i : i + 1]) for i in range(64)])
    for rows in range(1, 65):
        assert torch.equal(linear(x[:rows]), alone[:rows]), f"{rows} rows"
        assert torch.equal(linear(x[64 - rows :].contiguous()), alone[64 - rows :]), (
            f"last {rows} rows"
        )


@pytest.mark.parametrize("shape", [(960, 576), (288, 33), (259, 52), (200, 1), (95, 16)])
@pytest.mark.parametrize("rows", [63, 64, 69, 80, 191, 192, 197, 208])
def test_many_rows_have_the_bits_of_one(rows, shape):
    """Wider tiles for many rows: columns that change places, those behind the last whole pair of
    panels left out or written twice, a bias or a residual of other columns, a sliver of rows."""
    generator = torch.Generator().manual_seed(rows)
    weight, _ = example(shape)
    x, residual = (torch.randn((rows, size), generator=generator) for size in reversed(shape))
    linear = Float32([weight], [torch.randn(shape[0], generator=generator)])
    alone = [linear(x[i : i + 1], residual=residual[i : i + 1]) for i in range(rows)]
    assert torch.equal(linear(x, residual=residual), torch.cat(alone))


def test_threads_do_not_change_bits():
    """A sum split over threads."""
    weight, x = example((960, 576))
    linear, threads = Float32([weight], [None]), torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        one = linear(x)
        torch.set_num_threads(2)
        assert torch.equal(one, linear(x))
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("kind", [Float32, MklLinear, PlainLinear])
def test_fused_weights_biases_and_residual(kind):
    """Parts joined in the wrong order, a missing bias taken from a neighbour, a residual added
    twice."""
    (first, x), (second, _) = example((24, 40)), example((40, 40), 1)
    bias, residual = torch.randn(40), torch.randn(64, 64)
    out = kind([first, second], [None, bias])(x, residual=residual)
    assert torch.allclose(
        out, residual + torch.cat([F.linear(x, first), F.linear(x, second, bias)], 1), atol=1e-4
    )


@pytest.mark.parametrize("kind", [Float32, PlainLinear])
def test_rows_of_the_weight_can_be_read_back(kind):
    """A tied embedding that looks up the wrong row of the panels."""
    weight, _ = example((259, 52))
    index = torch.tensor([0, 31, 32, 258, 7, 7])
    assert torch.equal(kind([weight], [None]).rows(index), weight[index])


def test_mkl_is_only_trusted_after_a_probe():
    """MKL's pack taken as row-stable where it is not: the probe must agree with a direct comparison
    here."""
    weight, x = example((960, 576))
    packed = MklLinear([weight], [None])
    stable = torch.equal(packed(x)[:1], packed(x[:1])) and torch.equal(
        packed(x[:5])[:1], packed(x[:1])
    )
    if mkl_is_row_stable():
        assert stable
    else:
        from selfspec.model.operations import operations_for

        assert operations_for("auto", torch.float32, torch.device("cpu")).kernel != "mkl"
