"""torch's operations over a grid of tokens (`frame.py`): attention is one product over all rows,
nothing is read back.

Written for recording: no host decision depends on a tensor, every shape is the grid's. Calls that
do not fit into a grid, such as a prefill, go row by row like `TorchOps`. Norms are torch's fused
ones, rotations three operations instead of ten: short kernels are what a small step on a GPU is
made of. A fused norm rounds once where some references round twice.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from ..cache import KVCache, TokenLayout
from ..norms import Norm
from ..ops import Heads, TorchOps
from .frame import Frame


class StaticOps(TorchOps):
    """Every device and dtype; what a CUDA device runs."""

    def __init__(self) -> None:
        super().__init__("static")

    def norm(self, x: Tensor, norm: Norm) -> Tensor:
        weight = norm.weight
        if weight.dim() > 1:  # a weight for each head
            return super().norm(x, norm)
        y = x.to(weight.dtype)
        if norm.centred:
            return F.layer_norm(y, (norm.size,), weight, norm.bias, norm.eps).to(x.dtype)
        y = F.rms_norm(y, (norm.size,), weight, norm.eps)
        return (y if norm.bias is None else y + norm.bias).to(x.dtype)

    def attention(self, qkv: Tensor, heads: Heads, cache: KVCache, layout: TokenLayout) -> Tensor:
        if not isinstance(layout, Frame):
            return super().attention(qkv, heads, cache, layout)
        turned, v = qkv.view(len(qkv), -1, heads.size).split(
            [heads.queries + heads.keys, heads.keys], dim=1
        )
        if heads.query_norm or heads.key_norm:
            q, k = turned.split([heads.queries, heads.keys], dim=1)
            turned = torch.cat(
                [self._norm_groups(q, heads.query_norm), self._norm_groups(k, heads.key_norm)],
                dim=1,
            )
        if heads.rope:  # queries and keys at once
            cosine, sine, partner = layout.turn(heads.rope, heads.size)
            turned = torch.addcmul(turned * cosine, turned.index_select(-1, partner), sine).to(
                qkv.dtype
            )
        q, k = turned.split([heads.queries, heads.keys], dim=1)  # (tokens, heads, size)
        layout.keys[heads.layer][layout.rows, :, layout.slots] = k
        layout.values[heads.layer][layout.rows, :, layout.slots] = v
        return self._attend(q, heads, layout)

    def _attend(self, q: Tensor, heads: Heads, frame: Frame) -> Tensor:
        """All rows at once; the groups of queries that share keys follow each other as if they were
        more tokens."""
        rows, width, context = frame.grid.rows, frame.grid.width, frame.grid.context
        group, size = heads.queries // heads.keys, heads.size
        # (rows, heads, context, size)
        k, v = (
            frame.keys[heads.layer, :, :, :context],
            frame.values[heads.layer, :, :, :context],
        )
        queries = (
            q.view(rows, width, heads.keys, group, size)
            .permute(0, 2, 3, 1, 4)
            .reshape(rows, heads.keys, -1, size)
        )
        if heads.cap:  # which SDPA does not know
            scores = self.soft_cap(queries @ k.transpose(-1, -2) * heads.scale, heads.cap)
            mask = frame.mask(heads.window, group, torch.float32)
            out = (scores.float() + mask).softmax(-1).to(v.dtype) @ v
        else:
            mask = frame.mask(heads.window, group, q.dtype)
            out = F.scaled_dot_product_attention(queries, k, v, mask, scale=heads.scale)
        return (
            out.reshape(rows, heads.keys, group, width, size)
            .permute(0, 3, 1, 2, 4)
            .reshape(rows * width, -1)
        )
