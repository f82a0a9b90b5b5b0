"""Our own forward of one decoder block as two residual halves: `attention` and `mlp`. Either may be left out.

Written once over `Ops`; what differs between families is data in `families.py`. Does not know which layers run or why.
"""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor, nn

from .cache import KVCache, Place
from .families import Family, Shape, attention_scale, norm, part
from .linear import Linear
from .ops import Heads, Ops
from .rope import RopeTable


class Block:
    """One layer. Projections that read the same input are one product."""

    def __init__(self, layer: nn.Module, index: int, family: Family, shape: Shape, ops: Ops) -> None:
        self._ops = ops
        self._activation = shape.activation
        self._attention_norm = norm(layer, family.attention_norm)
        self._mlp_norm = norm(layer, family.mlp_norm)
        self.qkv, self.out, self.gate_up, self.down = (
            ops.linear([p.weight for p in parts], [p.bias for p in parts])
            for parts in (
                [part(layer, name) for name in family.qkv],
                [part(layer, family.out)],
                [part(layer, name) for name in family.gate_up],
                [part(layer, family.down)],
            )
        )
        self._heads = Heads(index, shape.heads, shape.kv_heads, shape.head_size, attention_scale(layer), shape.windows[index])
        if family.query_norm and family.key_norm:
            query, key = norm(layer, family.query_norm), norm(layer, family.key_norm)
            self._heads = replace(self._heads, query_norm=query.weight, key_norm=key.weight, norm_eps=query.eps)

    @property
    def linears(self) -> tuple[Linear, ...]:
        return self.qkv, self.out, self.gate_up, self.down

    def attention(self, x: Tensor, cache: KVCache, place: Place, rope: RopeTable) -> Tensor:
        before = self._attention_norm
        qkv = self.qkv(self._ops.norm(x, before.weight, before.eps))
        return self.out(self._ops.attention(qkv, self._heads, cache, place, rope), residual=x)

    def mlp(self, x: Tensor) -> Tensor:
        before = self._mlp_norm
        both = self.gate_up(self._ops.norm(x, before.weight, before.eps))
        return self.down(self._ops.gated(both, self._activation), residual=x)
