"""Our own forward of one decoder block as two residual halves: `attention` and `mlp`. Either may be
left out.

Written once over `Ops`; what differs between families is data in `families.py`. Does not know which
layers run or why.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol

from torch import Tensor, nn

from ..errors import UnsupportedModel
from .compute.cache import KVCache, TokenLayout
from .compute.halves import Half, HalfParts
from .compute.linear import Linear
from .compute.norms import Norm
from .compute.ops import ACTIVATIONS, Heads, Ops
from .compute.rope import RopeTable
from .experts import Experts
from .families import Family, Shape
from .weights import attention_scale, expert_weights, head_norm, linear_weights, norm, product, qkv

Change = Callable[[Tensor], Tensor]
ChangeLinear = Callable[[Linear], Linear]


class AttentionCore(Protocol):
    """What a block needs of an attention."""

    @property
    def linears(self) -> Sequence[Linear]: ...

    def parts(self) -> Half:
        """What it is made of, norms left out, or why it cannot be taken apart."""

    def __call__(
        self, x: Tensor, cache: KVCache, layout: TokenLayout, residual: Tensor | None = None
    ) -> Tensor:
        """Normed stream -> what attention adds to it, plus the residual if there is one."""


class MlpCore(Protocol):
    """What a block needs of an MLP."""

    @property
    def linears(self) -> Sequence[Linear]: ...

    def parts(self) -> Half:
        """What it is made of, norms left out, or why it cannot be taken apart."""

    def __call__(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        """Normed stream -> what the MLP adds to it, plus the residual if there is one."""


@dataclass(frozen=True)
class NormBy:
    """A norm and the operations that compute it."""

    ops: Ops
    norm: Norm

    def __call__(self, x: Tensor) -> Tensor:
        return self.ops.norm(x, self.norm)


@dataclass(frozen=True)
class Norms:
    """What happens to each half's input, and to what it adds; None: nothing."""

    attention_before: Change | None
    attention_after: Change | None
    mlp_before: Change | None
    mlp_after: Change | None


class Block:
    """One layer. A half is: norm, core, norm, scale, and added to the stream; any of them but the
    core may be missing.

    `parallel`: the MLP reads what entered the layer, not what attention has added to.
    """

    def __init__(
        self,
        attention: AttentionCore,
        mlp: MlpCore,
        norms: Norms,
        scale: float = 1.0,
        parallel: bool = False,
    ) -> None:
        self._attention, self._mlp, self._norms = attention, mlp, norms
        self._scale, self.parallel = scale, parallel

    @property
    def linears(self) -> tuple[Linear, ...]:
        return (*self._attention.linears, *self._mlp.linears)

    def with_linears(self, change: ChangeLinear) -> Block:
        """The same with other products. Experts and modules of transformers stay as they are."""
        other = copy(self)
        if isinstance(self._attention, Attention):
            other._attention = self._attention.with_linears(change)
        if isinstance(self._mlp, Mlp):
            other._mlp = self._mlp.with_linears(change)
        return other

    def taken_apart(self) -> tuple[Half, Half]:
        """Both halves, attention first."""
        norms = self._norms
        return (
            self._apart(self._attention, norms.attention_before, norms.attention_after),
            self._apart(self._mlp, norms.mlp_before, norms.mlp_after),
        )

    def _apart(
        self, core: AttentionCore | MlpCore, before: Change | None, after: Change | None
    ) -> Half:
        parts = core.parts()
        if isinstance(parts, str):
            return parts
        norms = []
        for change in (before, after):
            if change is not None and not isinstance(change, NormBy):
                return "its norm is a module of transformers"
            norms.append(None if change is None else change.norm)
        first, last = norms
        return replace(parts, before=first, after=last, parallel=self.parallel, scale=self._scale)

    def attention(self, x: Tensor, cache: KVCache, layout: TokenLayout) -> Tensor:
        core = partial(self._attention, cache=cache, layout=layout)
        return self._half(x, x, self._norms.attention_before, core, self._norms.attention_after)

    def mlp(self, x: Tensor, entered: Tensor | None = None) -> Tensor:
        """`entered` is what entered the layer, which parallel halves read."""
        read = entered if self.parallel and entered is not None else x
        return self._half(x, read, self._norms.mlp_before, self._mlp, self._norms.mlp_after)

    def _half(
        self,
        x: Tensor,
        read: Tensor,
        before: Change | None,
        core: Callable[..., Tensor],
        after: Change | None,
    ) -> Tensor:
        y = read if before is None else before(read)
        if after is None and self._scale == 1:
            added: Tensor = core(y, residual=x)  # adding is part of the core's last product
            return added
        y = core(y)
        if after is not None:
            y = after(y)
        return x + y * self._scale


def own_block(
    layer: nn.Module, index: int, family: Family, shape: Shape, ops: Ops, rope: RopeTable | None
) -> Block:
    """The block of a family in the table, run by our operations."""

    def change(name: str | None) -> Change | None:
        return None if name is None else NormBy(ops, norm(layer, name, family.norms))

    experts = expert_weights(layer, family)
    return Block(
        Attention(layer, index, family, shape, ops, rope),
        Mlp(layer, family, shape, ops)
        if experts is None
        else Experts(experts, shape.activation, ops),
        Norms(
            *map(
                change,
                (family.attention_norm, family.attention_after, family.mlp_norm, family.mlp_after),
            )
        ),
        shape.scales.residual,
        shape.parallel,
    )


class Attention:
    """Projections that read the same input are one product."""

    def __init__(
        self,
        layer: nn.Module,
        index: int,
        family: Family,
        shape: Shape,
        ops: Ops,
        rope: RopeTable | None,
    ) -> None:
        self._ops = ops
        self._qkv, self._out = (
            qkv(layer, family, shape, ops),
            product([linear_weights(layer, family.out)], ops),
        )
        self.heads = Heads(
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
    def linears(self) -> tuple[Linear, Linear]:
        return self._qkv, self._out

    def with_linears(self, change: ChangeLinear) -> Attention:
        """The same with other products."""
        other = copy(self)
        other._qkv, other._out = change(self._qkv), change(self._out)
        return other

    def parts(self) -> HalfParts:
        return HalfParts(into=self._qkv, out=self._out, heads=self.heads)

    def __call__(
        self, x: Tensor, cache: KVCache, layout: TokenLayout, residual: Tensor | None = None
    ) -> Tensor:
        return self._out(self._ops.attention(self._qkv(x), self.heads, cache, layout), residual)


class Mlp:
    """act(gate) * up, or without a gate act(up); then down."""

    def __init__(self, layer: nn.Module, family: Family, shape: Shape, ops: Ops) -> None:
        if shape.activation not in ACTIVATIONS:
            raise UnsupportedModel(
                f"activation {shape.activation!r} is not supported; known: {', '.join(ACTIVATIONS)}"
            )
        self._up = product([linear_weights(layer, name) for name in family.gate_up], ops)
        self._down = product([linear_weights(layer, family.down)], ops)
        self.activation, self.gated = shape.activation, family.gated
        self._activate = partial(
            ops.gated if family.gated else ops.activated, activation=shape.activation
        )

    @property
    def linears(self) -> tuple[Linear, Linear]:
        return self._up, self._down

    def with_linears(self, change: ChangeLinear) -> Mlp:
        """The same with other products."""
        other = copy(self)
        other._up, other._down = change(self._up), change(self._down)
        return other

    def parts(self) -> HalfParts:
        return HalfParts(
            into=self._up, out=self._down, activation=self.activation, gated=self.gated
        )

    def __call__(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        return self._down(self._activate(self._up(x)), residual)
