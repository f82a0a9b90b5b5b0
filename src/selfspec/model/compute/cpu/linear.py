"""Products by our kernels. `PackedLinear` is what all kinds of weights share, `Float32` the first
kind; kinds.py lists them.

A row's bits do not depend on its neighbours, whatever the kind, and eight rows cost about what one
costs.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from ..grouped import Matrix, joined
from ..linear import Linear, joined_bias
from . import large_pages
from .interface import ProductStruct, address, function
from .native import library


class PackedLinear(Linear):
    """A product whose weights are packed for a kernel. A subclass is a kind of weights."""

    alone = ""
    bits: float = 32
    """About how many bits a weight takes."""
    head: ClassVar[str] = ""
    """The kind that a model's head is kept in, where it is another."""
    rounding: ClassVar[float] = 0.0
    """How far rounding may move a model's logits, as a share of their norm: what the check at load
    allows."""
    prepared: int = 0
    """Bytes of a row of x once the kind's kernel has prepared it."""

    def __init__(
        self,
        weights: Sequence[Matrix],
        biases: Sequence[Tensor | None],
        packed: Tensor | None = None,
    ) -> None:
        """`packed`: what `pack` gave before for the same weights, which are not read then."""
        self._native = library()
        self.outputs, self.inputs = sum(map(len, weights)), weights[0].shape[1]
        self.bias = joined_bias(weights, biases)
        self.measure()
        # held here, since the kernels know them by address only
        self._packed = self.pack(joined(weights)) if packed is None else packed
        multiply, prepare, read = self.functions()
        self._struct = ProductStruct(
            multiply,
            prepare,
            read,
            self.prepared,
            address(self._packed),
            address(self.bias),
            self.outputs,
            self.inputs,
        )

    @property
    def memory(self) -> Tensor:
        """The one piece of memory that the kernel reads."""
        return self._packed

    def measure(self) -> None:
        """Find out what follows from the sizes alone."""

    @abstractmethod
    def pack(self, weight: Matrix) -> Tensor:
        """(outputs, inputs) -> the one piece of memory that the kernel reads."""

    @abstractmethod
    def functions(self) -> tuple[int, int | None, int]:
        """Where the kind's functions lie, `Multiply`, `Prepare` and `Read` of product.h; None if
        its kernel reads x as it is."""

    def native(self) -> ProductStruct:
        return self._struct

    def __call__(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        assert x.is_contiguous() and x.dtype == torch.float32 and x.shape[1] == self.inputs
        rows = x.shape[0]
        out = torch.empty((rows, self.outputs))
        self._native.linear(
            x.data_ptr(),
            rows,
            self._struct,
            address(residual),
            out.data_ptr(),
            torch.get_num_threads(),
        )
        return out

    def rows(self, index: Tensor) -> Tensor:
        index = index.to(torch.int64).contiguous()
        out = torch.empty((*index.shape, self.inputs))
        wrong = self._native.read_rows(
            self._struct, index.data_ptr(), index.numel(), out.data_ptr(), torch.get_num_threads()
        )
        if wrong >= 0:
            number = int(index.flatten()[wrong])
            raise IndexError(f"row {number} was asked for, and there are {self.outputs}")
        return out


class Float32(PackedLinear):
    """Weights as they are, in panels of columns, [panel][input][column]: what one step of the
    kernel multiplies with lies side by side."""

    def measure(self) -> None:
        self._width = library().panel_width()

    def pack(self, weight: Matrix) -> Tensor:
        weight = weight.float()
        panels = -(-self.outputs // self._width)
        padded = (
            F.pad(weight, (0, 0, 0, panels * self._width - self.outputs))
            if self.outputs % self._width
            else weight
        )
        packed = large_pages.empty((panels, self.inputs, self._width), torch.float32)
        return packed.copy_(padded.view(panels, self._width, self.inputs).transpose(1, 2))

    def functions(self) -> tuple[int, None, int]:
        kernels = library()
        return function(kernels, "multiply_float32"), None, function(kernels, "read_float32")
