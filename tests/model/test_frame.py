"""Grids: what a token sees there is what its `TokenLayout` says, worked out another way."""

from __future__ import annotations

import random

import pytest
import torch

from selfspec.model.compute.cache import RowSpan, TokenLayout
from selfspec.model.compute.cuda.frame import (
    MAX_TOKENS,
    WIDTHS,
    Frame,
    Grid,
    context_for,
    grid_for,
    packed,
)
from selfspec.model.compute.ops import visible_mask

SLOTS = 512


def framed(layout: TokenLayout, rows: int) -> tuple[Grid, Frame]:
    grid = grid_for(layout, rows, SLOTS)
    assert grid is not None
    nothing = torch.empty(0)
    return grid, Frame.of(packed(layout, grid, SLOTS - 1), grid, nothing, nothing)


def some_place(chance: random.Random, rows: int, tree: bool) -> TokenLayout:
    chosen = sorted(chance.sample(range(rows), chance.randint(1, rows)))
    spans = [RowSpan(row, chance.randint(0, 300), chance.randint(1, 14)) for row in chosen]
    if not tree:
        return TokenLayout.chains(spans)
    return TokenLayout.trees(
        spans, [[-1, *(chance.randint(-1, i - 1) for i in range(1, span.count))] for span in spans]
    )


@pytest.mark.parametrize("tree", [False, True])
def test_a_grid_sees_what_its_place_sees(tree):
    """A sibling that is seen, an ancestor that is not, a window counted by slot, a row given
    another row's mask. The reference is the mask of the eager path, made from lists."""
    chance = random.Random(3)
    for window in (None, 1, 5, 40, 400):
        for _ in range(12):
            rows = chance.randint(1, 5)
            layout = some_place(chance, rows, tree)
            grid, frame = framed(layout, rows)
            mask = frame.mask(window, 2, torch.float32)
            assert mask.shape == (rows, 1, 2 * grid.width, grid.context)
            assert torch.equal(mask[:, :, : grid.width], mask[:, :, grid.width :]), (
                "the groups of a key's queries see the same"
            )
            first = 0
            for span in layout.spans:
                piece = slice(first, first + span.count)
                expected = visible_mask(layout, piece, window, SLOTS)
                assert not expected[:, grid.context :].any(), "a context that cuts off what is seen"
                assert torch.equal(
                    mask[span.row, 0, : span.count] == 0, expected[:, : grid.context]
                )
                first += span.count


def test_padding_sees_one_slot_and_writes_to_the_spare_one():
    """A padding token that sees nothing is NaN; one that writes elsewhere overwrites what a
    neighbour knows."""
    layout = TokenLayout.chains([RowSpan(1, 7, 3), RowSpan(3, 0, 2)])
    grid, frame = framed(layout, 4)
    assert grid == Grid(4, 3, 256)
    real = {(1, 0), (1, 1), (1, 2), (3, 0), (3, 1)}
    mask, slots = frame.mask(None, 1, torch.float32)[:, 0], frame.slots.view(4, 3)
    for row in range(4):
        for column in range(3):
            if (row, column) not in real:
                assert mask[row, column].isfinite().nonzero().flatten().tolist() == [0]
                assert slots[row, column] == SLOTS - 1
    assert frame.rows.view(4, 3).tolist() == [[row] * 3 for row in range(4)]


def test_tokens_find_their_way_back():
    """Outputs given to the wrong tokens where rows come in another order than the cache's, or take
    part with gaps."""
    layout = TokenLayout.chains([RowSpan(2, 4, 2), RowSpan(0, 9, 3)])
    grid = grid_for(layout, 3, SLOTS)
    assert grid is not None
    table = packed(layout, grid, SLOTS - 1)
    where = table[-1].flatten()[: len(layout)].tolist()
    assert where == [6, 7, 0, 1, 2]
    positions = table[1].flatten()
    assert [int(positions[index]) for index in where] == layout.positions.tolist()


def test_what_is_no_grid():
    """A call squeezed into a grid that it does not fit: too wide, too many, a row twice, or slots
    listed by hand."""
    assert grid_for(TokenLayout.chains([RowSpan(0, 0, WIDTHS[-1] + 1)]), 1, SLOTS) is None
    assert grid_for(TokenLayout.chains([RowSpan(0, 0, 40)]), MAX_TOKENS // 48 + 1, SLOTS) is None
    assert grid_for(TokenLayout.chains([RowSpan(0, 0, 2), RowSpan(0, 2, 2)]), 1, SLOTS) is None
    listed = TokenLayout.trees([RowSpan(0, 9, 1)], [[-1]])
    for ancestors, stop in (((2, 9), 9), ((9,), 4)):
        layout = TokenLayout(
            listed.spans,
            listed.rows,
            listed.slots,
            listed.positions,
            torch.tensor([stop]),
            (ancestors,),
        )
        assert grid_for(layout, 1, SLOTS) is None
    assert grid_for(listed, 1, SLOTS) == Grid(1, 1, 256)


def test_contexts_are_rounded_up_a_little():
    """A context shorter than the text, which loses keys, or so coarse that most of what is read is
    read in vain."""
    for slots in range(1, 20000, 7):
        assert slots <= context_for(slots) < slots + max(256, slots // 8 + 1)
    assert len({context_for(slots) for slots in range(1, 8193)}) == 24
