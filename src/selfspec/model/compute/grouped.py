"""A matrix in few bits as somebody else stored it: whole numbers, and a scale for each group.

`Grouped` holds such numbers. `Blocks` reads them a few rows at a time, so that no matrix need be
held as float32. Does not know files, formats or kernels.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

STORED = "stored"
"""What `weights=` calls matrices as somebody else stored them."""
SIZES = (32, 16)  # inputs that may share a scale; larger groups are repeated


@dataclass(frozen=True, eq=False)
class Grouped:
    """Rows of a matrix: weight = minimum + scale * number."""

    numbers: Tensor
    """(outputs, inputs) int8. In 4 bits from 0 to 15 if there is a minimum, else from -8 to 7."""
    scale: Tensor
    """(outputs, groups) float32."""
    minimum: Tensor | None
    """(outputs, groups) float32, or None for zeros."""
    group: int
    """Inputs that share a scale, 32 or 16. The last group may be shorter."""
    bits: int
    """Of a number, at most 8."""

    def __len__(self) -> int:
        return len(self.numbers)

    @property
    def shape(self) -> tuple[int, int]:
        outputs, inputs = self.numbers.shape
        return outputs, inputs

    def __getitem__(self, rows: slice | Tensor) -> Grouped:
        minimum = None if self.minimum is None else self.minimum[rows]
        return replace(self, numbers=self.numbers[rows], scale=self.scale[rows], minimum=minimum)

    def float(self) -> Tensor:
        """(outputs, inputs) float32."""
        outputs, inputs = self.shape
        padded = self.padded(self.group * self.scale.shape[1]).view(outputs, -1, self.group)
        weight = padded.float() * self.scale[..., None]
        if self.minimum is not None:
            weight += self.minimum[..., None]
        return weight.flatten(1)[:, :inputs]

    def padded(self, inputs: int) -> Tensor:
        """The numbers with zeros up to so many inputs."""
        return torch.nn.functional.pad(self.numbers, (0, inputs - self.shape[1]))

    def with_minimum(self) -> Grouped:
        """The same weights, with a minimum."""
        if self.minimum is not None:
            return self
        if self.bits > 4:
            return replace(self, minimum=torch.zeros_like(self.scale))
        return replace(self, numbers=self.numbers + 8, minimum=self.scale * -8)

    def in_groups_of(self, size: int) -> Grouped:
        """The same weights, in smaller groups."""
        if size == self.group:
            return self
        groups = -(-self.shape[1] // size)
        scale, minimum = (
            None if each is None else each.repeat_interleave(self.group // size, 1)[:, :groups]
            for each in (self.scale, self.minimum)
        )
        assert scale is not None
        return replace(self, scale=scale, minimum=minimum, group=size)


def fits(group: int, inputs: int) -> bool:
    """Whether groups of a size can be made of ours."""
    return group % SIZES[-1] == 0 or group >= inputs


def grouped(
    numbers: Tensor, scale: Tensor, minimum: Tensor | None, *, group: int, bits: int
) -> Grouped:
    """Rows whose groups may be larger than ours; a group of the whole row is as large as it."""
    inputs = numbers.shape[1]
    assert fits(group, inputs)
    size = next(size for size in SIZES if group % size == 0 or group >= inputs)
    times, groups = -(-group // size), -(-inputs // size)
    if times > 1:
        scale = scale.repeat_interleave(times, 1)[:, :groups]
        minimum = None if minimum is None else minimum.repeat_interleave(times, 1)[:, :groups]
    return Grouped(numbers, scale, minimum, size, bits)


@dataclass(frozen=True, eq=False)
class Blocks:
    """A stored matrix that is read a few rows at a time."""

    outputs: int
    inputs: int
    read: Callable[[int, int], Grouped | Tensor]
    """Rows from one up to another: in few bits, or as float32 where no kernel takes their bits."""
    stored_as: str
    """The format's name."""
    floats: str = ""
    """Why it is read as float32; "" if it is not."""

    def __len__(self) -> int:
        return self.outputs

    @property
    def shape(self) -> tuple[int, int]:
        return self.outputs, self.inputs

    def __getitem__(self, rows: slice) -> Grouped | Tensor:
        begin, end, _ = rows.indices(self.outputs)
        return self.read(begin, end)

    def float(self) -> Tensor:
        return self[:].float()

    def rows(self, index: Tensor) -> Tensor:
        """Single rows as float32, (n, inputs)."""
        found, places = index.flatten().unique(return_inverse=True)
        rows = [self[row : row + 1].float() for row in found.tolist()]
        return torch.cat(rows)[places].view(*index.shape, self.inputs)


Matrix = Tensor | Grouped | Blocks


def why_floats(matrix: Matrix) -> str:
    """Why a matrix is read as float32; "" if it is not, or was never in few bits."""
    return matrix.floats if isinstance(matrix, Blocks) else ""


def joined(parts: Sequence[Matrix], order: Tensor | None = None) -> Matrix:
    """Matrices of one input as one. In few bits if all are, and in the bits of the widest; else as
    numbers of floating point. `order`: which output stands at each place."""
    held = [each.detach() if isinstance(each, Tensor) else each for each in parts]
    if len(held) == 1 and order is None:
        return held[0]
    held = [each[:] if isinstance(each, Blocks) else each for each in held]
    some = [each for each in held if isinstance(each, Grouped)]
    whole: Grouped | Tensor
    if len(some) == len(held):
        whole = some[0] if len(some) == 1 else _joined(some)
    else:
        whole = torch.cat([each if isinstance(each, Tensor) else each.float() for each in held])
    return whole if order is None else whole[order]


def _joined(parts: Sequence[Grouped]) -> Grouped:
    size, bits = min(each.group for each in parts), max(each.bits for each in parts)
    same = [each.in_groups_of(size) for each in parts]
    if any(each.minimum is not None for each in same):
        same = [each.with_minimum() for each in same]
    minima = [each.minimum for each in same if each.minimum is not None]
    return Grouped(
        torch.cat([each.numbers for each in same]),
        torch.cat([each.scale for each in same]),
        torch.cat(minima) if minima else None,
        size,
        bits,
    )
