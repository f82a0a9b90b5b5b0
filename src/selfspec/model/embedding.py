"""What a model makes of its tokens before the first layer: their embeddings, and where layers read
the tokens themselves once more, numbers for each token and layer. These travel behind the token's
state, so that a pass may stop at any layer and go on. Does not know what layers make of them.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .block import Change
from .compute.linear import Linear
from .compute.norms import Norm
from .compute.ops import Ops


@dataclass(frozen=True, eq=False)
class Embedding:
    """Rows of a table times a scale, normed or spread over streams where a family does so."""

    source: Tensor | Linear
    """A table, or the head whose weights serve as one."""
    scale: float
    norm: Change | None = None

    def __call__(self, tokens: Tensor) -> Tensor:
        """(tokens,) -> (tokens, width)."""
        x = _rows(self.source, tokens)
        x = x if self.scale == 1 else x * self.scale
        return x if self.norm is None else self.norm(x)


@dataclass(frozen=True, eq=False)
class OfTokens:
    """(norm(projection(embedding) * before) + table[token] * scale) * both, of all layers."""

    ops: Ops
    source: Tensor | Linear
    """A table of all layers' numbers, or a product whose rows they are."""
    known: int
    """Its tokens. The others have those of token 0."""
    scale: float
    projection: Linear
    before: float
    norm: Norm
    both: float = 2**-0.5

    @property
    def columns(self) -> int:
        """Numbers of a token."""
        return self.projection.outputs

    def __call__(self, tokens: Tensor, embedded: Tensor) -> Tensor:
        """(tokens,), (tokens, width) -> (tokens, columns)."""
        projected = self.projection(embedded) * self.before
        normed = self.ops.norm(projected.view(-1, self.norm.size), self.norm)
        known = tokens.where(tokens < self.known, 0)
        own = _rows(self.source, known) * self.scale
        return (normed.view(projected.shape) + own) * self.both


def _rows(source: Tensor | Linear, tokens: Tensor) -> Tensor:
    return source.rows(tokens) if isinstance(source, Linear) else source[tokens]


def beside(x: Tensor, of_tokens: Tensor | None) -> Tensor:
    """States and what goes with them, as one."""
    return x if of_tokens is None else torch.cat([x, of_tokens], 1)
