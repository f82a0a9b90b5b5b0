"""Modules whose matrix is in few bits: what stands in a transformers model for a linear or an
embedding that nobody expands.

They can be called, which expands a few rows at a time: the check at load compares with that. Our
kernels multiply by the blocks themselves.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .grouped import Blocks

_PIECE = 1 << 22  # about how many numbers are expanded at a time


class StoredLinear(nn.Module):
    """A linear by the matrix that a file holds."""

    def __init__(self, blocks: Blocks, bias: Tensor | None = None) -> None:
        super().__init__()
        self.blocks = blocks
        self.out_features, self.in_features = blocks.shape
        self.bias = None if bias is None else nn.Parameter(bias, requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        step = max(1, _PIECE // self.in_features)
        rows = range(0, self.out_features, step)
        pieces = [F.linear(x, self.blocks[at : at + step].float().to(x.dtype)) for at in rows]
        out = torch.cat(pieces, dim=-1)
        return out if self.bias is None else out + self.bias


class StoredEmbedding(nn.Module):
    """An embedding by the matrix that a file holds, times a scale that some families have."""

    def __init__(self, blocks: Blocks, scale: float | Tensor = 1.0) -> None:
        super().__init__()
        self.blocks, self.scale = blocks, scale

    def forward(self, tokens: Tensor) -> Tensor:
        return self.blocks.rows(tokens) * self.scale
