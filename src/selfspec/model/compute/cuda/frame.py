"""A call's tokens as a grid of a fixed shape: what a step needs that is recorded once and replayed.

A `Place` is ragged and made on the host; a recorded step can only read tensors that lie where they
lay. So the tokens of a call are padded to rows x width, with every row of the cache in it, and all
that changes between calls is one integer tensor. What a token sees is worked out from it on the
device: the slots below `stops`, and of the row's own new tokens those whose bit is set, itself and
its ancestors. A padding token sees slot 0 and writes to the spare slot at the end, which nobody
sees. Does not know how a step is recorded, nor models.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ..cache import TokenLayout
from ..rope import RopeTable

# tokens a row; a token's ancestors are bits of one int64, so below 64
WIDTHS = (
    1,
    2,
    3,
    4,
    6,
    8,
    12,
    16,
    24,
    32,
    48,
)
MOST_TOKENS = (
    512  # of a whole grid: beyond it arithmetic is what takes the time, and padding would cost
)
FIELDS = 5  # stops, positions, slots, bits, and where each token of the call stands in the grid


@dataclass(frozen=True)
class Grid:
    """The shape of a step: rows x width tokens, each looking at no slot from `context` on."""

    rows: int
    width: int
    context: int

    @property
    def tokens(self) -> int:
        return self.rows * self.width


def grid_for(layout: TokenLayout, rows: int, slots: int) -> Grid | None:
    """The grid of a call on a cache of that many rows and slots; None if the call is no such step:
    too wide, or its tokens see other slots than everything before them and their ancestors."""
    widest = max(span.count for span in layout.spans)
    if (
        widest > WIDTHS[-1]
        or len({span.row for span in layout.spans}) < len(layout.spans)
        or not _is_tree(layout)
    ):
        return None
    grid = Grid(
        rows,
        bucket(widest, WIDTHS),
        min(context_for(max(s.first + s.count for s in layout.spans)), slots),
    )
    return grid if grid.tokens <= MOST_TOKENS else None


def bucket(count: int, sizes: Sequence[int]) -> int:
    """The smallest of the sizes that holds so many."""
    return next(size for size in sizes if size >= count)


def context_for(slots: int) -> int:
    """So many slots, rounded up by at most an eighth (or to 256): what is read in vain, against how
    often a step is recorded."""
    octave = 1 << (max(slots, 2) - 1).bit_length() - 1
    step = max(256, octave // 8)
    return -(-slots // step) * step


def _is_tree(layout: TokenLayout) -> bool:
    """Whether every token sees all slots before its call, and of the call nothing but its
    ancestors."""
    if layout.ancestors is None:
        return True
    firsts = [span.first for span in layout.spans for _ in range(span.count)]
    seen = zip(layout.ancestors, firsts, layout.stops.tolist(), strict=True)
    return all(path[0] >= first == stop for path, first, stop in seen)


def packed(layout: TokenLayout, grid: Grid, spare: int) -> Tensor:
    """(FIELDS, rows, width) int64 on the host."""
    rows, firsts, counts = np.array([(span.row, span.first, span.count) for span in layout.spans]).T
    column = np.arange(grid.width)
    # (spans, width): the rest is padding, which sees slot 0 and writes the spare slot
    real = column < counts[:, None]
    table = np.zeros((FIELDS, grid.rows, grid.width), dtype=np.int64)
    stops, positions, slots, bits, where = table
    stops[:], slots[:] = 1, spare
    stops[rows] = np.where(real, firsts[:, None], 1)
    slots[rows] = np.where(real, firsts[:, None] + column, spare)
    index = (rows[:, None] * grid.width + column)[real]  # of each token in the grid
    where.reshape(-1)[: len(index)] = index
    positions.reshape(-1)[index] = layout.positions.numpy()
    if layout.ancestors is None:
        bits[rows] = np.where(real, _CHAIN[: grid.width], 0)
    else:
        bits.reshape(-1)[index] = [
            _bits(path, first)
            for path, first in zip(layout.ancestors, firsts.repeat(counts), strict=True)
        ]
    return torch.from_numpy(table)


_CHAIN = np.array([(1 << count) - 1 for count in range(1, WIDTHS[-1] + 1)])


def _bits(path: Sequence[int], first: int) -> int:
    return sum(1 << int(slot - first) for slot in path)


@dataclass(frozen=True, kw_only=True)
class Frame(TokenLayout):
    """The grid as a place on the device; `keys` and `values`, (layers, rows, heads, slots, size),
    are the cache's storage.

    Made anew in each run of a step, so that what `once` keeps belongs to that run: a mask that was
    made before recording began would be read, and never written again, by every replay.
    """

    grid: Grid
    bits: Tensor  # (rows, width)
    keys: Tensor
    values: Tensor

    @classmethod
    def of(cls, table: Tensor, grid: Grid, keys: Tensor, values: Tensor) -> Frame:
        """`table` is what `packed` gave, on the device."""
        stops, positions, slots, bits, _ = table
        rows = torch.arange(grid.rows, device=table.device)[:, None].expand(grid.rows, grid.width)
        rows, slots, positions, stops = (
            tensor.reshape(-1) for tensor in (rows, slots, positions, stops)
        )
        return cls(
            (), rows, slots, positions, stops, grid=grid, bits=bits, keys=keys, values=values
        )

    def mask(self, window: int | None, repeat: int, dtype: torch.dtype) -> Tensor:
        """(rows, 1, repeat x width, context): 0 where a token looks, -inf elsewhere; the tokens
        come `repeat` times, in turn."""

        def make() -> Tensor:
            seen = self._seen(window)
            bias = torch.zeros(seen.shape, dtype=dtype, device=seen.device).masked_fill_(
                ~seen, -torch.inf
            )
            return bias.repeat(1, repeat, 1)[:, None]

        return self.once(("mask", window, repeat), make)

    def _seen(self, window: int | None) -> Tensor:
        """(rows, width, context) boolean."""
        rows, width = self.grid.rows, self.grid.width
        column = torch.arange(self.grid.context, device=self.bits.device)
        # (rows, context): which of the row's new tokens a slot holds
        away = column - self.slots.view(rows, width)[:, :1]
        new, index = (away >= 0) & (away < width), away.clamp(0, width - 1)
        ancestor = ((self.bits[:, :, None] >> index[:, None]) & 1).bool()
        seen = (column < self.stops.view(rows, width, 1)) | (ancestor & new[:, None])
        if window is None:
            return seen
        positions = self.positions.view(rows, width)
        # a slot's position; only a tree's new ones differ from it
        depth = torch.where(new, positions.gather(1, index), column)
        return seen & (depth[:, None] > positions[:, :, None] - window)

    def turn(self, rope: RopeTable, size: int) -> tuple[Tensor, Tensor, Tensor]:
        """Cosines and signed sines, (tokens, 1, size) float32, and for each number of a head its
        partner; numbers that are not rotated have cosine 1 and sine 0."""
        half, name = rope.rotary // 2, ("turn", id(rope))

        def cosine() -> Tensor:
            part = rope.cosines[self.positions][:, None]
            return torch.cat([part, part, part.new_ones((len(part), 1, size - 2 * half))], dim=-1)

        def sine() -> Tensor:
            part = rope.sines[self.positions][:, None]
            return torch.cat([-part, part, part.new_zeros((len(part), 1, size - 2 * half))], dim=-1)

        def partner() -> Tensor:
            order = torch.arange(size, device=self.bits.device)
            return torch.cat([order[half : 2 * half], order[:half], order[2 * half :]])

        return (
            self.once((name, "cosine"), cosine),
            self.once((name, "sine"), sine),
            self.once((name, "partner"), partner),
        )
