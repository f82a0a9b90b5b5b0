"""torch's operations over a grid of tokens (`frame.py`), with one attention product for all rows.

Written for recording: no decision of the host depends on a tensor, and every shape is the grid's.
Calls that do not fit into a grid, such as a prefill, go row by row as in `TorchOps`. A small step
on a GPU consists of many short kernels, so norms are torch's fused ones and a rotation takes three
operations instead of ten. A fused norm rounds once where some references round twice.
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
    """What a CUDA device runs. Works on every device and with every dtype."""

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
        counts = [heads.queries, heads.keys]
        qk, v = qkv.view(len(qkv), -1, heads.size).split([sum(counts), heads.keys], dim=1)
        if heads.query_norm or heads.key_norm or heads.clamp:
            q, k = qk.split(counts, dim=1)
            q, k, v = self._normed(q, k, v, heads)
            qk = torch.cat([q, k], dim=1)
        v = self._norm_groups(v, heads.value_norm)
        if heads.rope:  # queries and keys at once
            cosine, sine, partner = layout.rotation(heads.rope, heads.size)
            qk = torch.addcmul(qk * cosine, qk.index_select(-1, partner), sine).to(qkv.dtype)
        q, k = qk.split(counts, dim=1)  # (tokens, heads, size)
        q, k = self._turned(q, k, heads, layout)
        layout.keys[heads.layer][layout.rows, :, layout.slots] = k
        layout.values[heads.layer][layout.rows, :, layout.slots] = v
        return self._attend(q, heads, layout)

    def _attend(self, q: Tensor, heads: Heads, frame: Frame) -> Tensor:
        """All rows at once. Queries that share their keys follow each other like more tokens."""
        rows, width, context = frame.grid.rows, frame.grid.width, frame.grid.context
        group, size = heads.queries // heads.keys, heads.size
        k = frame.keys[heads.layer, :, :, :context]  # (rows, heads, context, size)
        v = frame.values[heads.layer, :, :, :context]
        queries = q.view(rows, width, heads.keys, group, size).permute(0, 2, 3, 1, 4)
        queries = queries.reshape(rows, heads.keys, -1, size)
        if not heads.plain:
            scores = queries @ k.transpose(-1, -2) * heads.scale
            mask = frame.mask(heads.window, group, torch.float32)
            places, own = frame.depths[:, None], frame.positions.view(rows, width, 1)
            out = self._weights(scores, heads, mask, places, own).to(v.dtype) @ v
        else:
            mask = frame.mask(heads.window, group, q.dtype)
            out = F.scaled_dot_product_attention(queries, k, v, mask, scale=heads.scale)
        out = out.reshape(rows, heads.keys, group, width, size).permute(0, 3, 1, 2, 4)
        return out.reshape(rows * width, -1)
