"""Norms as values: RMSNorm, x / rms(x) * w, and what families do differently from it. Does not know
how one is computed."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from torch import Tensor

from .cpu.native import NormStruct


@dataclass(frozen=True)
class NormKind:
    """How a family's norms differ from Llama's."""

    centred: bool = False
    """LayerNorm: the mean is taken out first."""
    offset: float = 0.0
    """Added to the stored weight: Gemma's is the w of 1 + w."""
    wide: bool = False
    """The weight multiplies in float32, before the result is rounded to the model's dtype; Llama
    rounds first."""


@dataclass(frozen=True, eq=False)
class Norm:
    """One norm, ready to use."""

    weight: Tensor
    """(size,), or (heads, size): a weight of its own for each head."""
    eps: float
    bias: Tensor | None = None
    centred: bool = False

    @property
    def size(self) -> int:
        """How many numbers are normalised together."""
        return self.weight.shape[-1]

    @cached_property
    def native(self) -> NormStruct:
        """The same for our kernels, which read float32."""
        bias = None if self.bias is None else self.bias.data_ptr()
        stride = self.size if self.weight.dim() > 1 else 0
        return NormStruct(self.weight.data_ptr(), bias, self.size, stride, self.eps, self.centred)
