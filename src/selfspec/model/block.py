"""Our own forward of one decoder block as two residual halves: `attention` and `mlp`. Either may be left out.

Written once over `Ops`; what differs between families is data in `families.py`. Does not know which layers run or why.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from torch import Tensor, nn

from .cache import KVCache, Place
from .experts import Experts
from .families import Family, Shape
from .linear import Linear
from .ops import Heads, Ops
from .parts import attention_scale, expert_parts, head_norm, norm, part, qkv_parts
from .rope import RopeTable

Change = Callable[[Tensor], Tensor]


class Block:
    """One layer. A half is: norm, core, norm, scale, and added to the stream; any of them but the core may be missing."""

    def __init__(self, layer: nn.Module, index: int, family: Family, shape: Shape, ops: Ops, rope: RopeTable | None) -> None:
        def change(name: str | None) -> Change | None:
            return None if name is None else partial(ops.norm, norm=norm(layer, name, family.norms))

        self._attention_before, self._attention_after = change(family.attention_norm), change(family.attention_after)
        self._mlp_before, self._mlp_after = change(family.mlp_norm), change(family.mlp_after)
        self._scale, self._parallel = shape.scales.residual, shape.parallel
        self._attention = Attention(layer, index, family, shape, ops, rope)
        experts = expert_parts(layer, family)
        self._mlp = Mlp(layer, family, shape, ops) if experts is None else Experts(experts, shape.activation, ops)

    @property
    def linears(self) -> tuple[Linear, ...]:
        return (*self._attention.linears, *self._mlp.linears)

    def attention(self, x: Tensor, cache: KVCache, place: Place) -> Tensor:
        core = partial(self._attention, cache=cache, place=place)
        return self._half(x, x, self._attention_before, core, self._attention_after)

    def mlp(self, x: Tensor, entered: Tensor | None = None) -> Tensor:
        """`entered` is what entered the layer: where the halves are parallel, the MLP reads that."""
        read = entered if self._parallel and entered is not None else x
        return self._half(x, read, self._mlp_before, self._mlp, self._mlp_after)

    def _half(self, x: Tensor, read: Tensor, before: Change | None, core: Callable[..., Tensor], after: Change | None) -> Tensor:
        y = read if before is None else before(read)
        if after is None and self._scale == 1:
            added: Tensor = core(y, residual=x)  # adding is part of the core's last product
            return added
        y = core(y)
        if after is not None:
            y = after(y)
        return x + y * self._scale


class Attention:
    """Projections that read the same input are one product."""

    def __init__(self, layer: nn.Module, index: int, family: Family, shape: Shape, ops: Ops, rope: RopeTable | None) -> None:
        self._ops = ops
        parts, out = qkv_parts(layer, family, shape), part(layer, family.out)
        self._qkv = ops.linear([each.weight for each in parts], [each.bias for each in parts])
        self._out = ops.linear([out.weight], [out.bias])
        self._heads = Heads(
            layer=index,
            queries=shape.heads,
            keys=shape.kv_heads,
            size=shape.head_size,
            scale=attention_scale(layer, family),
            window=shape.windows[index],
            cap=shape.scales.score_cap,
            rope=rope,
            query_norm=head_norm(layer, family.query_norm, family, shape),
            key_norm=head_norm(layer, family.key_norm, family, shape),
        )

    @property
    def linears(self) -> tuple[Linear, ...]:
        return self._qkv, self._out

    def __call__(self, x: Tensor, cache: KVCache, place: Place, residual: Tensor | None = None) -> Tensor:
        return self._out(self._ops.attention(self._qkv(x), self._heads, cache, place), residual)


class Mlp:
    """act(gate) * up, or without a gate act(up); then down."""

    def __init__(self, layer: nn.Module, family: Family, shape: Shape, ops: Ops) -> None:
        parts, down = [part(layer, name) for name in family.gate_up], part(layer, family.down)
        self._up = ops.linear([each.weight for each in parts], [each.bias for each in parts])
        self._down = ops.linear([down.weight], [down.bias])
        self._activate = partial(ops.gated if family.gated else ops.activated, activation=shape.activation)

    @property
    def linears(self) -> tuple[Linear, ...]:
        return self._up, self._down

    def __call__(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        return self._down(self._activate(self._up(x)), residual)
