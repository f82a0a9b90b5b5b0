"""Norms as values: RMSNorm, x / rms(x) * w, and what families do differently from it. Does not know
how one is computed."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from .memo import Memo


@dataclass(frozen=True)
class NormKind:
    """How a family's norms differ from Llama's."""

    centred: bool = False
    """LayerNorm: the mean is taken out first."""
    offset: float = 0.0
    """Added to the stored weight: Gemma's is the w of 1 + w."""
    wide: bool = False
    """The weight multiplies in float32, before rounding to the dtype. Llama rounds first."""


@dataclass(frozen=True, eq=False)
class Norm(Memo):
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
