"""Tokens as hidden states. Does not know layers."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from .compute.linear import Linear


@dataclass(frozen=True, eq=False)
class Embedding:
    """Rows of a table times a scale."""

    source: Tensor | Linear
    """A table, or the head whose weights serve as one."""
    scale: float

    def __call__(self, tokens: Tensor) -> Tensor:
        """(tokens,) -> (tokens, width)."""
        table = self.source
        x = table.rows(tokens) if isinstance(table, Linear) else table[tokens]
        return x if self.scale == 1 else x * self.scale
