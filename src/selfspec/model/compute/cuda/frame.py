"""A call's tokens as a grid of a fixed shape: what a recorded step needs to be replayed.

A `TokenLayout` is ragged and made on the host, while a recorded step reads the same tensors at the
same addresses each time. So a call's tokens are padded to rows x width, with every row of the
cache, and all that changes between calls is one integer tensor. From it the device works out what a
token sees: the slots below `stops`, and of its row's new tokens itself and its ancestors, whose
bits are set. A padding token sees slot 0 and writes to the spare slot at the end, which no token
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
from ..windows import Window, reach

# tokens a row: below 64, since the ancestors of a token are bits of one int64
WIDTHS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48)
MAX_TOKENS = 512  # of a grid: beyond it the arithmetic takes the time, and padding would cost
FIELDS = 5  # stops, positions, slots, bits, and where each token of the call stands in the grid
_CHAIN = np.array([(1 << count) - 1 for count in range(1, WIDTHS[-1] + 1)])  # bits of a chain


@dataclass(frozen=True)
class Grid:
    """The shape of a step: rows x width tokens, each seeing only slots below `context`."""

    rows: int
    width: int
    context: int

    @property
    def tokens(self) -> int:
        return self.rows * self.width


def grid_for(layout: TokenLayout, rows: int, slots: int) -> Grid | None:
    """The grid of a call on a cache of that many rows and slots.

    None if a row has too many tokens or comes twice, or if a token sees anything but the slots
    before the call and its ancestors.
    """
    spans = layout.spans
    widest = max(span.count for span in spans)
    repeated = len({span.row for span in spans}) < len(spans)
    if widest > WIDTHS[-1] or repeated or not _is_tree(layout):
        return None
    context = context_for(max(span.first + span.count for span in spans))
    grid = Grid(rows, bucket(widest, WIDTHS), min(context, slots))
    return grid if grid.tokens <= MAX_TOKENS else None


def bucket(count: int, sizes: Sequence[int]) -> int:
    """The smallest of the sizes that is at least `count`."""
    return next(size for size in sizes if size >= count)


def context_for(slots: int) -> int:
    """`slots`, rounded up by at most an eighth, or to 256.

    A coarser step reads more slots for nothing, a finer one is recorded more often.
    """
    octave = 1 << (max(slots, 2) - 1).bit_length() - 1
    step = max(256, octave // 8)
    return -(-slots // step) * step


def _is_tree(layout: TokenLayout) -> bool:
    """Whether every token sees all slots before its call, and of the call only its ancestors."""
    if layout.ancestors is None:
        return True
    firsts = [span.first for span in layout.spans for _ in range(span.count)]
    seen = zip(layout.ancestors, firsts, layout.stops.tolist(), strict=True)
    return all(path[0] >= first == stop for path, first, stop in seen)


def packed(layout: TokenLayout, grid: Grid, spare: int) -> Tensor:
    """(FIELDS, rows, width) int64 on the host."""
    rows, firsts, counts = np.array([(span.row, span.first, span.count) for span in layout.spans]).T
    column = np.arange(grid.width)
    real = column < counts[:, None]  # (spans, width): the rest is padding
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
        paths = zip(layout.ancestors, firsts.repeat(counts), strict=True)
        bits.reshape(-1)[index] = [
            sum(1 << int(slot - first) for slot in path) for path, first in paths
        ]
    return torch.from_numpy(table)


@dataclass(frozen=True, kw_only=True)
class Frame(TokenLayout):
    """The grid as a layout on the device. `keys` and `values` are the cache's storage.

    Made anew in each run of a step, so that what `once` keeps belongs to that run. A mask made
    before the recording would be read by every replay and never written again.
    """

    grid: Grid
    bits: Tensor  # (rows, width)
    keys: Tensor  # (layers, rows, heads, slots, size)
    values: Tensor

    @classmethod
    def of(cls, table: Tensor, grid: Grid, keys: Tensor, values: Tensor) -> Frame:
        """`table` is the result of `packed`, on the device."""
        stops, positions, slots, bits, _ = table
        rows = torch.arange(grid.rows, device=table.device)[:, None].expand(grid.rows, grid.width)
        flat = (tensor.reshape(-1) for tensor in (rows, slots, positions, stops))
        rows, slots, positions, stops = flat
        return cls(
            (), rows, slots, positions, stops, grid=grid, bits=bits, keys=keys, values=values
        )

    def mask(self, window: Window | None, repeat: int, dtype: torch.dtype) -> Tensor:
        """(rows, 1, repeat x width, context): 0 where a token looks, -inf elsewhere.

        The grid's tokens come `repeat` times, one after the other.
        """

        def make() -> Tensor:
            seen = self._seen(window)
            bias = torch.zeros(seen.shape, dtype=dtype, device=seen.device)
            return bias.masked_fill_(~seen, -torch.inf).repeat(1, repeat, 1)[:, None]

        return self.once(("mask", window, repeat), make)

    def _seen(self, window: Window | None) -> Tensor:
        """(rows, width, context) boolean."""
        rows, width = self.grid.rows, self.grid.width
        column = torch.arange(self.grid.context, device=self.bits.device)
        # (rows, context): which of the row's new tokens a slot holds
        new, index = self._new()
        ancestor = ((self.bits[:, :, None] >> index[:, None]) & 1).bool()
        seen = (column < self.stops.view(rows, width, 1)) | (ancestor & new[:, None])
        if window is None:
            return seen
        positions = self.positions.view(rows, width, 1)
        return seen & (self.depths[:, None] > positions - reach(window, positions))

    def _new(self) -> tuple[Tensor, Tensor]:
        """Which slots hold new tokens, and which of the row's, (rows, context)."""
        rows, width = self.grid.rows, self.grid.width
        column = torch.arange(self.grid.context, device=self.bits.device)
        away = column - self.slots.view(rows, width)[:, :1]
        return (away >= 0) & (away < width), away.clamp(0, width - 1)

    @property
    def depths(self) -> Tensor:
        """A slot's position, which is not its number for the new tokens of a tree, (rows,
        context)."""

        def make() -> Tensor:
            new, index = self._new()
            column = torch.arange(self.grid.context, device=self.bits.device)
            positions = self.positions.view(self.grid.rows, self.grid.width)
            return torch.where(new, positions.gather(1, index), column)

        return self.once("depths", make)

    def rotation(self, rope: RopeTable, size: int) -> tuple[Tensor, Tensor, Tensor]:
        """Cosines and signed sines, (tokens, 1, size) float32, and each number's partner.

        Numbers of a head that are not rotated have cosine 1 and sine 0.
        """

        def make() -> tuple[Tensor, Tensor, Tensor]:
            half = rope.rotary // 2
            cosine, sine = (t[self.positions][:, None] for t in (rope.cosines, rope.sines))
            rest = (len(cosine), 1, size - 2 * half)
            order = torch.arange(size, device=self.bits.device)
            return (
                torch.cat([cosine, cosine, cosine.new_ones(rest)], dim=-1),
                torch.cat([-sine, sine, sine.new_zeros(rest)], dim=-1),
                torch.cat([order[half : 2 * half], order[:half], order[2 * half :]]),
            )

        return self.once(("rotation", id(rope)), make)
