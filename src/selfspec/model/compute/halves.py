"""What half of a layer is made of, for whoever runs many halves at once. Computes nothing."""

from __future__ import annotations

from dataclasses import dataclass

from .linear import Linear
from .norms import Norm
from .ops import Heads


@dataclass(frozen=True)
class HalfParts:
    """An attention if it has heads, else an MLP: norm, product, what stands between, product,
    norm, scale, and added to the stream."""

    before: Norm | None
    after: Norm | None
    into: Linear
    out: Linear
    heads: Heads | None
    activation: str
    gated: bool
    parallel: bool
    scale: float
