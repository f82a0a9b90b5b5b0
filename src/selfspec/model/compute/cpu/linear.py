"""Products by our kernels."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from ..linear import Linear, joined, joined_bias
from .interface import ProductStruct, address
from .native import library


class NativeLinear(Linear):
    """Weights in panels of columns, [panel][input][column], for the kernel in kernels.cpp; eight
    rows cost about what one costs, and a row's bits do not depend on its neighbours."""

    def __init__(self, weights: Sequence[Tensor], biases: Sequence[Tensor | None]) -> None:
        self._native = library()
        weight = joined(weights)
        self.outputs, self.inputs = weight.shape
        self._width = self._native.panel_width()
        panels = -(-self.outputs // self._width)
        padded = (
            F.pad(weight, (0, 0, 0, panels * self._width - self.outputs))
            if self.outputs % self._width
            else weight
        )
        self._pack = padded.view(panels, self._width, self.inputs).transpose(1, 2).contiguous()
        self.bias = joined_bias(weights, biases)
        self.native = ProductStruct(
            address(self._pack), address(self.bias), self.outputs, self.inputs
        )

    def __call__(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        assert x.is_contiguous() and x.dtype == torch.float32 and x.shape[1] == self.inputs
        rows = x.shape[0]
        out = torch.empty((rows, self.outputs))
        self._native.linear(
            x.data_ptr(),
            rows,
            self.native,
            address(residual),
            out.data_ptr(),
            torch.get_num_threads(),
        )
        return out

    def rows(self, index: Tensor) -> Tensor:
        return self._pack[index // self._width, :, index % self._width]
