"""Weights of 8 bits, 4 bits, and bfloat16, as few_bits.cpp reads them.

A matrix is packed in pieces, so that no second float32 copy of it is ever held. What fills no panel
or group is filled up with zeros, so every width fits. Does not know models or files.
"""

from __future__ import annotations

from abc import abstractmethod
from pathlib import Path
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from .interface import function
from .linear import PackedLinear
from .native import compiled

SOURCE = Path(__file__).with_name("few_bits.cpp")
GROUP = 32  # inputs that share a scale
_PIECE = 1 << 22  # about how many numbers are packed at a time
_LEAST = 1e-30  # a scale that is not zero


class PanelBytes(PackedLinear):
    """A matrix in panels of columns, each some bytes: (panels, bytes)."""

    kernel: ClassVar[str]
    """The name of its function in few_bits.cpp."""
    group: ClassVar[int] = GROUP
    """Inputs are filled up to a multiple of this; 1 if rows of x are read as they are."""

    def measure(self) -> None:
        self._width = int(compiled(SOURCE).panel_width())
        self._groups = -(-self.inputs // self.group)
        if self.group > 1:  # bytes, and three numbers a group (`Row` of few_bits.cpp)
            self.prepared = 64 * -(-self._groups * (self.group + 12) // 64)

    def pack(self, weight: Tensor) -> Tensor:
        step = self._width * max(1, _PIECE // (self._width * self.inputs))
        pieces = [self._panels(weight[at : at + step]) for at in range(0, self.outputs, step)]
        return torch.cat([self.packed(piece) for piece in pieces])

    @classmethod
    def functions(cls) -> tuple[int, int | None]:
        kernels = compiled(SOURCE)
        rounding = function(kernels, "round_row") if cls.group > 1 else None
        return function(kernels, cls.kernel), rounding

    def rows(self, index: Tensor) -> Tensor:
        panel, column = index // self._width, index % self._width
        return self.unpacked(panel, column)[:, : self.inputs]

    @property
    def bytes(self) -> int:
        return self._packed.nbytes

    def _panels(self, weight: Tensor) -> Tensor:
        """(rows, inputs) -> (panels, width, filled inputs) float32."""
        columns = -len(weight) % self._width
        filled = F.pad(weight.float(), (0, self._groups * self.group - self.inputs, 0, columns))
        return filled.view(-1, self._width, self._groups * self.group)

    @abstractmethod
    def packed(self, panels: Tensor) -> Tensor:
        """(panels, width, inputs) -> (panels, bytes)."""

    @abstractmethod
    def unpacked(self, panel: Tensor, column: Tensor) -> Tensor:
        """Some columns of the matrix as float32, (n, filled inputs)."""


class Int8(PanelBytes):
    """8 bits and a scale for each output: weight = scale * number."""

    kernel = "multiply_int8"
    bits = 8
    rounding = 0.1

    def packed(self, panels: Tensor) -> Tensor:
        scale = (panels.abs().amax(-1, keepdim=True) / 127).clamp_min_(_LEAST)
        numbers = (panels / scale).round_().add_(128).to(torch.uint8)
        fours = numbers.unflatten(2, (-1, 4)).transpose(1, 2).flatten(1)
        return torch.cat([fours, scale.flatten(1).contiguous().view(torch.uint8)], dim=1)

    def unpacked(self, panel: Tensor, column: Tensor) -> Tensor:
        end = self._groups * GROUP * self._width
        numbers = self._packed[:, :end].unflatten(1, (-1, self._width, 4))[panel, :, column]
        scale = self._packed[:, end:].view(torch.float32)[panel, column]
        rows: Tensor = (numbers.flatten(1).float() - 128) * scale[:, None]
        return rows


class Int4(PanelBytes):
    """4 bits in groups of 32 inputs with a scale and a minimum: weight = minimum + scale * number.

    The first of eight numbers shares its byte with the fifth, and so on. The model's head, which
    suffers most from rounding, is kept in 8 bits.
    """

    kernel = "multiply_int4"
    bits = 5
    rounding = 0.5
    head = "int8"

    def packed(self, panels: Tensor) -> Tensor:
        groups = panels.unflatten(2, (-1, GROUP))  # (panels, width, groups, 32)
        least, most = groups.aminmax(dim=-1, keepdim=True)
        scale = ((most - least) / 15).half().float().clamp_min_(_LEAST)
        least = least.half().float()
        numbers = ((groups - least) / scale).round_().clamp_(0, 15).to(torch.uint8)
        low, high = numbers.unflatten(3, (4, 2, 4)).unbind(4)  # (panels, width, groups, 4, 4)
        fours = (low | high << 4).permute(0, 2, 3, 1, 4).flatten(2)
        halves = [each.squeeze(3).transpose(1, 2).half() for each in (scale, least)]
        raw = [each.contiguous().view(torch.uint8) for each in halves]
        return torch.cat([fours, *raw], dim=2).flatten(1)

    def unpacked(self, panel: Tensor, column: Tensor) -> Tensor:
        width, groups = self._width, self._packed.view(len(self._packed), self._groups, -1)
        both = groups[:, :, : 16 * width].unflatten(2, (4, width, 4))[panel, :, :, column]
        numbers = torch.stack([both & 15, both >> 4], dim=3).flatten(2).float()
        halves = groups[:, :, 16 * width :].view(torch.float16).unflatten(2, (2, width))
        scale, least = halves[panel, :, :, column].float().unbind(-1)
        rows: Tensor = (least[..., None] + scale[..., None] * numbers).flatten(1)
        return rows


class BFloat16(PanelBytes):
    """bfloat16: the outputs are those of float32 with the same weights, from half the bytes."""

    kernel = "multiply_bfloat16"
    bits = 16
    rounding = 0.06
    group = 1

    def packed(self, panels: Tensor) -> Tensor:
        pairs: Tensor = panels.bfloat16().unflatten(1, (2, -1)).permute(0, 3, 2, 1)
        return pairs.flatten(1).contiguous().view(torch.uint8)

    def unpacked(self, panel: Tensor, column: Tensor) -> Tensor:
        lanes = self._width // 2
        numbers = self._packed.view(torch.bfloat16).unflatten(1, (-1, lanes, 2))
        rows: Tensor = numbers[panel, :, column % lanes, column // lanes].float()
        return rows
