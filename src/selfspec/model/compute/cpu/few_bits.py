"""Weights of few bits as few_bits.cpp reads them: 8 bits, 4 bits, bfloat16, and stored ones.

A matrix is packed in pieces, so that no second float32 copy of it is ever held. What fills no panel
or group is filled up with zeros, so every width fits. Does not know models or files.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from ..grouped import Grouped, Matrix
from . import large_pages
from .interface import function
from .linear import PackedLinear
from .native import compiled, library
from .tuning import FewBits, for_few_bits, use_for_few_bits

SOURCE = Path(__file__).with_name("few_bits.cpp")
GROUP = 32  # inputs that share a scale
_PIECE = 1 << 18  # about how many numbers are packed at a time; more leave holes in memory
_LEAST = 1e-30  # a scale that is not zero
# How 4 bits are fitted: shares of a group's range to begin with, and how often from each. On normal
# weights the squared error is 0.84 of that of the whole range; more of either brings little.
_NARROWER, _FITTED = (1.0, 0.9), 3
_ON_GRID = 0.01  # of a step: weights that are off by less were born on these steps


@functools.cache
def _kernels() -> ctypes.CDLL:
    """The kernels of few bits, tuned if this machine has not done so yet."""
    kernels = compiled(SOURCE)
    kernels.tune.argtypes, kernels.tune.restype = [ctypes.c_int64] * 2, None
    use_for_few_bits(kernels, for_few_bits(kernels, library()))
    return kernels


def reading() -> FewBits:
    """How the kernels read here."""
    return for_few_bits(_kernels(), library())


class PanelBytes(PackedLinear):
    """A matrix in panels of columns, each some bytes: (panels, bytes)."""

    kernel: ClassVar[str]
    """What its functions in few_bits.cpp are named after."""
    group: ClassVar[int] = GROUP
    """Inputs are filled up to a multiple of this."""
    rounds: str | None = "round_for_bytes_32"
    """What rounds rows of x there; None: they are read as they are."""

    def measure(self) -> None:
        self._width = int(_kernels().panel_width())
        self._groups = -(-self.inputs // self.group)
        if self.rounds:
            of_a_group = int(_kernels()[f"{self.rounds}_bytes"]())
            self.prepared = 64 * -(-self._groups * of_a_group // 64)

    def pack(self, weight: Matrix) -> Tensor:
        step = self._width * max(1, _PIECE // (self._width * self.inputs))
        packed, filled = torch.empty(0), 0
        for at in range(0, self.outputs, step):
            piece = self.piece(weight[at : at + step])
            if not filled:  # at once, so that there is one copy
                panels = -(-self.outputs // self._width)
                packed = large_pages.empty((panels, piece.shape[1]), piece.dtype)
            packed[filled : filled + len(piece)] = piece
            filled += len(piece)
        return packed

    def functions(self) -> tuple[int, int | None, int]:
        return self._functions(self.kernel)

    def _functions(self, kernel: str) -> tuple[int, int | None, int]:
        kernels = _kernels()
        multiply, read = (function(kernels, f"{what}_{kernel}") for what in ("multiply", "read"))
        return multiply, function(kernels, self.rounds) if self.rounds else None, read

    @property
    def bytes(self) -> int:
        return self._packed.nbytes

    def piece(self, rows: Tensor | Grouped) -> Tensor:
        """(rows, inputs) -> (panels, bytes)."""
        columns = -len(rows) % self._width
        filled = F.pad(rows.float(), (0, self._groups * self.group - self.inputs, 0, columns))
        return self.packed(filled.view(-1, self._width, self._groups * self.group))

    def packed(self, panels: Tensor) -> Tensor:
        """(panels, width, filled inputs) float32 -> (panels, bytes)."""
        raise NotImplementedError


class Int8(PanelBytes):
    """8 bits and a scale for each output: weight = scale * number."""

    kernel = "int8"
    bits = 8
    rounding = 0.1

    def packed(self, panels: Tensor) -> Tensor:
        scale = (panels.abs().amax(-1, keepdim=True) / 127).clamp_min_(_LEAST)
        numbers = (panels / scale).round_().add_(128).to(torch.uint8)
        fours = numbers.unflatten(2, (-1, 4)).transpose(1, 2).flatten(1)
        return torch.cat([fours, scale.flatten(1).contiguous().view(torch.uint8)], dim=1)


@dataclass(frozen=True)
class Layout:
    """How numbers of few bits lie in a panel, part after part; behind those of a part its scales
    and minima in 16 bits each, a column beside the other."""

    kernel: str
    rounds: str
    part: int
    """Inputs that share a scale."""
    halves: bool = False
    """Two numbers a byte: the first of eight with the fifth, and so on. Otherwise number + 128."""

    @property
    def size(self) -> int:
        """Bytes of a column's part without scale and minimum."""
        return self.part // 2 if self.halves else self.part

    def laid_out(self, numbers: Tensor, scale: Tensor, minimum: Tensor) -> Tensor:
        """(panels, width, parts, part) uint8 and (panels, width, parts) twice -> (panels, bytes)"""
        if self.halves:
            low, high = numbers.unflatten(3, (-1, 2, 4)).unbind(4)
            numbers = (low | high << 4).flatten(3)
        fours = numbers.unflatten(3, (-1, 4)).permute(0, 2, 3, 1, 4).flatten(2)
        halves = [each.transpose(1, 2).half() for each in (scale, minimum)]
        raw = [each.contiguous().view(torch.uint8) for each in halves]
        return torch.cat([fours, *raw], dim=2).flatten(1)

    def read(self, packed: Tensor, width: int, panel: Tensor, column: Tensor) -> Grouped:
        """Some columns of what was laid out, filled inputs included."""
        parts = packed.unflatten(1, (-1, width * (self.size + 4)))
        fours = parts[:, :, : self.size * width].unflatten(2, (-1, width, 4))
        numbers = fours[panel, :, :, column]  # (n, parts, fours, 4)
        if self.halves:
            numbers = torch.stack([numbers & 15, numbers >> 4], dim=3).to(torch.int8)
        else:
            numbers = (numbers ^ 128).view(torch.int8)  # byte - 128
        halves = parts[:, :, self.size * width :].view(torch.float16).unflatten(2, (2, width))
        scale, minimum = halves[panel, :, :, column].float().unbind(-1)
        bits = 4 if self.halves else 8
        return Grouped(numbers.flatten(1), scale, minimum, self.part, bits)


HALF_BYTES = Layout("int4", "round_for_half_bytes", 32, halves=True)
BYTES = {each: Layout(f"bytes_{each}", f"round_for_bytes_{each}", each) for each in (32, 16)}


class Int4(PanelBytes):
    """4 bits in groups of 32 inputs with a scale and a minimum: weight = minimum + scale * number.

    The model's head, which suffers most from rounding, is kept in 8 bits.
    """

    kernel, rounds = HALF_BYTES.kernel, HALF_BYTES.rounds
    bits = 5
    rounding = 0.5
    head = "int8"

    def packed(self, panels: Tensor) -> Tensor:
        groups = panels.unflatten(2, (-1, GROUP))  # (panels, width, groups, 32)
        numbers, scale, minimum = in_sixteen_steps(groups.flatten(0, 2))
        numbers = numbers.to(torch.uint8).view(groups.shape)
        by_group = groups.shape[:3]
        return HALF_BYTES.laid_out(numbers, scale.view(by_group), minimum.view(by_group))


def in_sixteen_steps(groups: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Groups (n, 32) as numbers from 0 to 15, with a scale and a minimum each (n, 1).

    Steps over a group's whole range hit weights that were born on such a grid. For all others the
    squared error falls by a sixth where steps are fitted to the numbers by least squares and
    numbers to the steps, in turns, from the whole range and from a narrower one.
    """
    least, most = groups.aminmax(dim=1, keepdim=True)
    best = _rounded(groups, (most - least) / 15, least)
    off_grid = (best[3] > (_ON_GRID * best[1]).square() * GROUP).squeeze(1)
    some, middle = groups[off_grid], (most + least)[off_grid] / 2
    found: Sequence[Tensor] = [each[off_grid] for each in best]
    for narrower in _NARROWER:
        scale = (most - least)[off_grid] * (narrower / 15)
        tried = _rounded(some, scale, middle - 7.5 * scale)
        for _ in range(_FITTED):
            found = _better(found, tried)
            tried = _rounded(some, *_line(tried[0], some))
        found = _better(found, tried)
    for each, better in zip(best, found, strict=True):
        each[off_grid] = better
    return best[:3]


def _rounded(
    groups: Tensor, scale: Tensor, minimum: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The nearest numbers, scale and minimum as they are stored, and the squared error."""
    scale, minimum = scale.half().float().clamp_min_(_LEAST), minimum.half().float()
    numbers = ((groups - minimum) / scale).round_().clamp_(0, 15)
    error = (numbers * scale).add_(minimum).sub_(groups).square_()
    return numbers, scale, minimum, _sums(error)


def _line(numbers: Tensor, groups: Tensor) -> tuple[Tensor, Tensor]:
    """The scale and minimum that fit given numbers best."""
    mean = _sums(numbers) / GROUP
    off = numbers - mean
    scale = _sums(off * groups) / _sums(off.square()).clamp_min_(1)
    return scale, _sums(groups) / GROUP - scale * mean


def _sums(groups: Tensor) -> Tensor:
    """(n, 32) -> (n, 1), in an order that no processor changes: nor are any weights to differ."""
    while groups.shape[1] > 1:
        half = groups.shape[1] // 2
        groups = groups[:, :half] + groups[:, half:]
    return groups


def _better(one: Sequence[Tensor], other: Sequence[Tensor]) -> list[Tensor]:
    """Of each group what has the smaller error, the last of each."""
    wins = other[3] < one[3]
    return [torch.where(wins, b, a) for a, b in zip(one, other, strict=True)]


class Stored(PanelBytes):
    """As somebody else stored it: numbers of at most 8 bits in groups, which are not rounded again.

    Those of at most 4 bits in groups of 32 take half a byte, all others a byte. Scales and minima
    are rounded to 16 bits, which most formats have themselves.
    """

    bits = 8
    rounding = 0.1

    def pack(self, weight: Matrix) -> Tensor:
        some = weight[:1]
        assert isinstance(some, Grouped)
        small = some.bits <= 4 and some.group == GROUP
        self._layout = HALF_BYTES if small else BYTES[some.group]
        self.rounds = self._layout.rounds
        self.measure()
        self.bits = 5 if small else 8
        return super().pack(weight)

    def functions(self) -> tuple[int, int | None, int]:
        return self._functions(self._layout.kernel)

    def piece(self, rows: Tensor | Grouped) -> Tensor:
        assert isinstance(rows, Grouped)
        some = rows.with_minimum()
        assert some.minimum is not None
        part = self._layout.part
        groups, columns = self._groups * GROUP // part, -len(some) % self._width
        numbers = F.pad(some.padded(self._groups * GROUP), (0, 0, 0, columns)).view(torch.uint8)
        if not self._layout.halves:
            numbers ^= 128  # number + 128
        numbers = numbers.view(-1, self._width, groups, part)
        fill = (0, groups - some.scale.shape[1], 0, columns)
        scale, minimum = (
            F.pad(each, fill).view(-1, self._width, groups) for each in (some.scale, some.minimum)
        )
        return self._layout.laid_out(numbers, scale, minimum)

    def cut(self, index: Tensor) -> Grouped:
        panel, column = index // self._width, index % self._width
        some = self._layout.read(self._packed, self._width, panel, column)
        groups = -(-self.inputs // self._layout.part)
        assert some.minimum is not None
        return replace(
            some,
            numbers=some.numbers[:, : self.inputs],
            scale=some.scale[:, :groups],
            minimum=some.minimum[:, :groups],
        )


class BFloat16(PanelBytes):
    """bfloat16: the outputs are those of float32 with the same weights, from half the bytes."""

    kernel = "bfloat16"
    bits = 16
    rounding = 0.06
    group, rounds = 1, None

    def packed(self, panels: Tensor) -> Tensor:
        pairs: Tensor = panels.bfloat16().unflatten(1, (2, -1)).permute(0, 3, 2, 1)
        return pairs.flatten(1).contiguous().view(torch.uint8)
