"""How the kernels read weights is chosen once a machine, costs little and changes no bit."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import pairwise, product
from pathlib import Path

import pytest
import torch

from selfspec.model.compute.cpu import few_bits, native, tuning
from selfspec.model.compute.cpu.kinds import KINDS
from selfspec.model.compute.cpu.linear import Float32
from selfspec.model.compute.cpu.tuning import FewBits, Tuning


@pytest.fixture
def kernels():
    try:
        loaded = native.library()
    except native.NoNative as reason:
        pytest.skip(str(reason))
    yield loaded
    tuning.use(loaded, tuning.tuning(loaded))


def test_no_choice_changes_a_bit(kernels):
    """A tile that sums in another order, loses rows when fewer share a read, or forgets what its
    earlier inputs gave; sums of several panels that are written in another's place."""
    made = torch.Generator().manual_seed(0)
    weight = torch.randn(330, 33, generator=made)
    linear, x = Float32([weight], [None]), torch.randn(29, 33, generator=made)
    found = []
    for chosen in (
        Tuning(),
        Tuning(0, 32),
        Tuning(0, 0, 1),
        Tuning(8, 64, 5),
        Tuning(500, 9000, 99),
        Tuning(inputs=8, shared=24),
        Tuning(0, 32, 5, 3, 9),
        Tuning(8, 32, 2, 32, 999),
    ):
        for quiet in (False, True):
            tuning.use(kernels, replace(chosen, quiet=quiet))
            few = [linear(x[:rows]) for rows in (*range(1, 7), 9, 13, 24)]
            found.append(linear(x))
            assert all(torch.equal(some, found[-1][: len(some)]) for some in few)
    assert all(torch.equal(found[0], other) for other in found)
    assert torch.allclose(found[0], x @ weight.T, atol=1e-4)


@pytest.mark.parametrize("kind", ["int8", "int4", "bfloat16"])
def test_few_bits_that_ask_for_nothing_give_the_same_bits(kernels, kind: str):
    """A tile for few rows that loses one of them, or has a layout of its own."""
    made = torch.Generator().manual_seed(0)
    weight = torch.randn(70, 96, generator=made)
    linear, x = KINDS[kind]([weight], [None]), torch.randn(9, 96, generator=made)
    usual, few_bits_kernels = linear(x), few_bits._kernels()
    try:
        for near, quiet in product((False, True), repeat=2):
            tuning.use_for_few_bits(few_bits_kernels, FewBits(near, quiet))
            few = [linear(x[:rows]) for rows in range(1, 10)]
            assert all(torch.equal(some, usual[: len(some)]) for some in few)
    finally:
        chosen = tuning.for_few_bits(few_bits_kernels, kernels)
        tuning.use_for_few_bits(few_bits_kernels, chosen)


def test_it_is_measured_once_and_again_without_its_file(kernels, tmp_path: Path, monkeypatch):
    """A measurement at every start; a file cut short that stops selfspec from starting."""
    measured = []
    monkeypatch.setattr(tuning, "measured", lambda kernels: measured.append(1) or Tuning(8, 64, 6))

    class Kernels:
        _name = str(tmp_path / "kernels-0.so")

        def most_rows(self) -> int:
            return 12

    file, ask = tmp_path / "kernels-0.json", tuning.tuning.__wrapped__
    for times, text in enumerate((None, "", "{", "[]", '{"soon": 1, "rows": 13}'), 1):
        file.unlink(missing_ok=True)
        if text is not None:
            file.write_text(text)
        assert ask(Kernels()) == ask(Kernels()) == Tuning(8, 64, 6)
        assert len(measured) == times
    kept = {"soon": 8, "later": 64, "rows": 6, "inputs": 0, "shared": 0, "quiet": False}
    assert json.loads(file.read_text()) == kept
    assert list(tmp_path.iterdir()) == [file]


@pytest.mark.parametrize(("took", "wins"), [(0.99, False), (0.9, True), (1.1, False)])
def test_noise_chooses_nothing(took: float, wins: bool):
    """A choice by the smallest number, which on a busy machine is a choice by chance."""
    default, other = Tuning(), Tuning(8, 64, 6)
    best = tuning._best([default, other], lambda each: took if each == other else 1.0)
    assert best == (other if wins else default)


def test_a_lucky_round_is_asked_again():
    """The luckiest of several candidates, taken for the best."""
    default, lucky = Tuning(), Tuning(32, 256, 6)
    asked = []

    def seconds(each):
        asked.append(each)
        return 0.8 if each == lucky and len(asked) < 2 * tuning.ROUNDS else 1.0

    assert tuning._best([default, lucky], seconds) == default


def test_few_bits_are_measured_once_and_read_as_float32_does(kernels, tmp_path: Path, monkeypatch):
    """A measurement at every start; a first cache that is asked for where that was found slow, also
    where a file from before says so."""
    times = {FewBits(): 1.0, FewBits(quiet=True): 0.9, FewBits(False): 1.0}
    rounds = []

    def seconds(*_):
        rounds.append(now[-1])
        return times.get(now[-1], 1.1)

    class Kernels:
        _name = str(tmp_path / "few_bits-0.so")

        def __init__(self) -> None:
            self.found = few_bits._kernels()

        def __getattr__(self, name: str):
            return getattr(self.found, name)

        def __getitem__(self, name: str):
            return self.found[name]

    now: list[FewBits] = []
    monkeypatch.setattr(tuning, "OUTPUTS", 64)
    monkeypatch.setattr(tuning, "_seconds_of", seconds)
    monkeypatch.setattr(tuning, "use_for_few_bits", lambda _, each: now.append(each))
    ask = tuning.for_few_bits.__wrapped__
    for soon, best in ((16, FewBits(quiet=True)), (0, FewBits(False))):
        monkeypatch.setattr(tuning, "tuning", lambda _, soon=soon: Tuning(soon))
        file = tmp_path / "few_bits-0.json"
        assert ask(Kernels(), kernels) == best
        measured = len(rounds)
        assert ask(Kernels(), kernels) == best
        assert len(rounds) == measured
        assert json.loads(file.read_text()) == {"near": best.near, "quiet": best.quiet}


def test_the_measurement_gives_what_the_kernels_can(kernels):
    """More rows than registers hold, or kernels that ask for nothing ahead."""
    chosen = tuning.measured(kernels)
    assert 1 <= chosen.rows <= kernels.most_rows() and chosen.soon >= 0 and chosen.later > 0


def test_weights_are_read_in_turns(kernels, monkeypatch):
    """A measurement by weights that a cache holds, as it does not hold those of a model."""
    read: list[int] = []

    def seconds(kernels, chosen, weights, rows) -> float:
        read.append(weights.data_ptr())
        return 1.0

    monkeypatch.setattr(tuning, "OUTPUTS", 64)
    monkeypatch.setattr(tuning, "_seconds", seconds)
    tuning.measured(kernels)
    assert len(set(read)) == tuning.PARTS > 1
    assert all(a != b for a, b in pairwise(read))


@pytest.mark.parametrize(("some", "twice"), [(1.0, 0.9), (0.9, 1.1), (1.1, 0.9), (1.1, 1.1)])
def test_pieces_of_a_panel_are_tried_where_tiles_share_it(
    kernels, monkeypatch, some: float, twice: float
):
    """Pieces of panels that are chosen unseen, or by rows of which one tile has them all; for more
    rows than they pay for."""
    most = int(kernels.most_rows())

    def seconds(kernels, chosen, weights, rows) -> float:
        assert not chosen.inputs or rows == 1 or rows > chosen.rows
        return (twice if rows == 2 * most else some) if most < rows <= chosen.shared else 1.0

    monkeypatch.setattr(tuning, "OUTPUTS", 64)
    monkeypatch.setattr(tuning, "_seconds", seconds)
    found = tuning.measured(kernels)
    assert found.shared == (tuning.MOST_SHARED if twice < 1 else 4 * most // 3 if some <= 1 else 0)
    piece = tuning.PIECE // (4 * int(kernels.panel_width()))
    assert found.inputs == (piece if found.shared else 0)


def test_the_measurement_is_of_products_as_large_as_those_of_a_layer(kernels, monkeypatch):
    """One product of half a model, which shares out its panels in another way."""
    read = []

    def seconds(kernels, products, rows) -> float:
        read.append([(product.weights, product.outputs) for product in products])
        return 1.0

    monkeypatch.setattr(tuning, "OUTPUTS", 64)
    monkeypatch.setattr(tuning, "OF_A_LAYER", 16)
    monkeypatch.setattr(tuning, "_seconds_of", seconds)
    weights = torch.zeros(64 * tuning.INPUTS)
    assert tuning._seconds(kernels, Tuning(), weights, 3) == 1.0
    size = 4 * 16 * tuning.INPUTS
    assert read == [[(weights.data_ptr() + size * part, 16) for part in range(4)]]


@pytest.mark.parametrize(("alone", "wins"), [(1.1, False), (0.95, True)])
def test_a_smaller_tile_has_to_pay_for_rows_that_a_full_one_has_alone(
    kernels, monkeypatch, alone: float, wins: bool
):
    """Tiles chosen by twice as many rows as a full one has: they were a little quicker there by
    luck in every fourth measurement, and a pass of 12 tokens then took 8% longer on a Xeon."""
    most = int(kernels.most_rows())

    def seconds(kernels, chosen, weights, rows) -> float:
        smaller = chosen.rows < most
        return 0.9 if smaller and rows == 2 * most else alone if smaller and rows == most else 1.0

    monkeypatch.setattr(tuning, "OUTPUTS", 64)
    monkeypatch.setattr(tuning, "_seconds", seconds)
    assert (tuning.measured(kernels).rows < most) == wins
