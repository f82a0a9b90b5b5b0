"""Our own forward of one decoder block as two residual halves: `attention` and `mlp`. Either may be
left out.

Written once over `Ops`; what differs between families is data in `families.py`. Does not know which
layers run or why.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol, Self

import torch
from torch import Tensor, nn

from ..errors import UnsupportedModel
from .compute.cache import KVCache, TokenLayout
from .compute.halves import Half, HalfParts
from .compute.linear import Linear
from .compute.mixture import Mixture
from .compute.norms import Norm
from .compute.ops import ACTIVATIONS, Heads, Ops
from .compute.recurrent_cache import RecurrentCache
from .compute.rope import RopeTable
from .experts import mixture
from .family import Family, Shape
from .latent import latent
from .recurrent import recurrent_parts
from .weights import (
    attention_scale,
    head_norm,
    linear_weights,
    norm,
    one_after_the_other,
    product,
    qkv,
    side_by_side,
)

Change = Callable[[Tensor], Tensor]
ChangeLinear = Callable[[Linear], Linear]


class Core(Protocol):
    """What a block needs of an attention or an MLP. Called with the normed stream (an attention
    also with cache and layout), it gives what it adds to the stream, plus `residual` if given."""

    @property
    def linears(self) -> Sequence[Linear]:
        """The products that one token runs through."""

    def parts(self) -> Half:
        """What it is made of, norms left out, or why it cannot be taken apart."""

    @property
    def __call__(self) -> Callable[..., Tensor]: ...


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
        attention: Core | None,
        mlp: Core | None,
        norms: Norms,
        scale: float = 1.0,
        parallel: bool = False,
    ) -> None:
        """None: the model's layer has no such half."""
        self._attention, self._mlp, self._norms = attention, mlp, norms
        self._scale, self.parallel = scale, parallel

    @property
    def linears(self) -> tuple[Linear, ...]:
        """The products that one token runs through."""
        return tuple(linear for core in self._cores for linear in core.linears)

    @property
    def products(self) -> tuple[Linear, ...]:
        """All of them, where there are experts."""
        return tuple(
            linear
            for core in self._cores
            for linear in (core.mixture if isinstance(core, Experts) else core).linears
        )

    @property
    def _cores(self) -> Sequence[Core]:
        return [core for core in (self._attention, self._mlp) if core is not None]

    def with_linears(self, change: ChangeLinear) -> Block:
        """The same with other products. Modules of transformers stay as they are."""
        attention, mlp = _changed(self._attention, change), _changed(self._mlp, change)
        return Block(attention, mlp, self._norms, self._scale, self.parallel)

    def taken_apart(self) -> tuple[Half | None, Half | None]:
        """Both halves, attention first; None for one that the layer does not have."""
        norms = self._norms
        return (
            self._apart(self._attention, norms.attention_before, norms.attention_after),
            self._apart(self._mlp, norms.mlp_before, norms.mlp_after),
        )

    def _apart(self, core: Core | None, before: Change | None, after: Change | None) -> Half | None:
        if core is None:
            return None
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
        if self._attention is None:
            return x
        core = partial(self._attention, cache=cache, layout=layout)
        return self._half(x, x, self._norms.attention_before, core, self._norms.attention_after)

    def mlp(self, x: Tensor, entered: Tensor | None = None) -> Tensor:
        """`entered` is what entered the layer, which parallel halves read."""
        if self._mlp is None:
            return x
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


@dataclass(frozen=True)
class OwnCore:
    """A product, what our operations do with it, and another product."""

    ops: Ops
    made: HalfParts

    @property
    def linears(self) -> tuple[Linear, ...]:
        assert self.made.out is not None
        return self.made.into, self.made.out

    @property
    def out(self) -> Linear:
        """The second product."""
        return self.linears[-1]

    def with_linears(self, change: ChangeLinear) -> Self:
        """The same with other products."""
        into, out = change(self.made.into), change(self.out)
        return replace(self, made=replace(self.made, into=into, out=out))

    def parts(self) -> HalfParts:
        return self.made


def _changed(core: Any, change: ChangeLinear) -> Any:
    return core.with_linears(change) if isinstance(core, OwnCore | Experts) else core


class Attention(OwnCore):
    """Queries, keys and values are one product, since they read the same input."""

    def __call__(
        self, x: Tensor, cache: KVCache, layout: TokenLayout, residual: Tensor | None = None
    ) -> Tensor:
        made = self.made
        assert made.heads is not None
        y = self.ops.attention(made.into(x), made.heads, cache, layout)
        return self.out(y, residual)


class GatedAttention(Attention):
    """Behind queries, keys and values come gates, as many as what comes out."""

    def __call__(
        self, x: Tensor, cache: KVCache, layout: TokenLayout, residual: Tensor | None = None
    ) -> Tensor:
        made = self.made
        assert made.heads is not None
        both, gates = made.into(x), made.heads.queries * made.heads.size
        y = self.ops.attention(both[:, :-gates].contiguous(), made.heads, cache, layout)
        return self.out(self.ops.times_sigmoid(y, both[:, -gates:]), residual)


class LatentAttention(OwnCore):
    """Queries, keys and values are unfolded from a few numbers of each token."""

    @property
    def linears(self) -> tuple[Linear, ...]:
        assert self.made.latent is not None and self.made.out is not None
        return self.made.into, *self.made.latent.linears, self.made.out

    def with_linears(self, change: ChangeLinear) -> Self:
        assert self.made.latent is not None
        latent = self.made.latent.changed(change)
        into, out = change(self.made.into), change(self.out)
        return replace(self, made=replace(self.made, into=into, latent=latent, out=out))

    def __call__(
        self, x: Tensor, cache: KVCache, layout: TokenLayout, residual: Tensor | None = None
    ) -> Tensor:
        made = self.made
        assert made.heads is not None and made.latent is not None
        qkv = made.latent.unfolded(made.into(x), self.ops.norm)
        y = self.ops.attention(qkv, made.heads, cache, layout)
        return self.out(made.latent.values(y), residual)


class Recurrent(OwnCore):
    """In the place of an attention: a product, what goes on token by token, and a product."""

    def __call__(
        self, x: Tensor, cache: KVCache, layout: TokenLayout, residual: Tensor | None = None
    ) -> Tensor:
        made = self.made
        assert isinstance(cache, RecurrentCache) and layout.ancestors is None
        assert made.recurrence is not None
        y = self.ops.recurrence(made.into(x), made.recurrence, cache, layout)
        return self.out(y, residual)


class Beside(OwnCore):
    """An attention, and what is recurrent beside it: one product before both, one behind."""

    def __call__(
        self, x: Tensor, cache: KVCache, layout: TokenLayout, residual: Tensor | None = None
    ) -> Tensor:
        made, heads = self.made, self.made.heads
        assert isinstance(cache, RecurrentCache) and layout.ancestors is None
        assert heads is not None and made.recurrence is not None
        both, width = made.into(x), (heads.queries + 2 * heads.keys) * heads.size
        seen = self.ops.attention(both[:, :width].contiguous(), heads, cache, layout)
        gone_on = self.ops.recurrence(both[:, width:], made.recurrence, cache, layout)
        return self.out(torch.cat([seen, gone_on], 1), residual)


class Mlp(OwnCore):
    """act(gate) * up, or without a gate act(up); then down."""

    def __call__(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        made = self.made
        activate = self.ops.gated if made.gated else self.ops.activated
        return self.out(activate(made.into(x), made.activation), residual)


@dataclass(frozen=True)
class Experts:
    """Called like a dense MLP."""

    ops: Ops
    mixture: Mixture

    @property
    def linears(self) -> Sequence[Linear]:
        """What one token runs through."""
        return self.mixture.of_a_token

    def with_linears(self, change: ChangeLinear) -> Self:
        """The same with other products."""
        return replace(self, mixture=self.mixture.changed(change))

    def parts(self) -> HalfParts:
        return HalfParts(into=self.mixture.router, mixture=self.mixture)

    def __call__(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        return self.ops.mixed(x, self.mixture, residual)


def own_block(
    layer: nn.Module, index: int, family: Family, shape: Shape, ops: Ops, rope: RopeTable | None
) -> Block:
    """The block of a family in the table, run by our operations."""

    def change(name: str | None) -> Change | None:
        return None if name is None else NormBy(ops, norm(layer, name, family.norms, shape.width))

    names = (family.attention_norm, family.attention_after, family.mlp_norm, family.mlp_after)
    no_attention, no_mlp = ((index, which) in shape.missing for which in (True, False))
    return Block(
        None if no_attention else _own_attention(layer, index, family, shape, ops, rope),
        None if no_mlp else _own_mlp(layer, family, shape, ops),
        Norms(*map(change, names)),
        shape.scales.residual,
        shape.parallel,
    )


def _own_attention(
    layer: nn.Module, index: int, family: Family, shape: Shape, ops: Ops, rope: RopeTable | None
) -> Core:
    """A layer's attention, or what is recurrent in its place."""
    found = None
    if index in shape.recurrent:
        before = sum(other < index for other in shape.recurrent)
        found = recurrent_parts(layer, before, family, shape)
    if found is not None and index in shape.keyless:
        into, out = product(found.into, ops, found.order), product([found.out], ops)
        return Recurrent(ops, HalfParts(into=into, out=out, recurrence=found.how))
    rotary = None if rope is None else rope.rotary
    heads = Heads(
        layer=index - sum(other < index for other in shape.keyless),
        queries=shape.heads,
        keys=shape.kv_heads,
        size=shape.head_size,
        scale=attention_scale(layer, family),
        window=shape.windows[index],
        cap=shape.scales.score_cap,
        rope=rope,
        query_norm=head_norm(layer, family.query_norm, family, shape, rotary),
        key_norm=head_norm(layer, family.key_norm, family, shape, rotary),
    )
    if family.latent:
        first, unfolds = latent(layer, family, shape, ops)
        out = product([linear_weights(layer, family.out)], ops)
        return LatentAttention(ops, HalfParts(into=first, out=out, heads=heads, latent=unfolds))
    last = linear_weights(layer, family.out, shape.factors)
    parts, order = qkv(layer, family, shape, rotary)
    if found is not None:
        order = one_after_the_other((parts, order), (found.into, found.order))
        parts, last = [*parts, *found.into], side_by_side([last, found.out])
    made = HalfParts(
        into=product(parts, ops, order),
        out=product([last], ops),
        heads=heads,
        recurrence=None if found is None else found.how,
        gated=family.gated_attention,
    )
    if found is not None:
        return Beside(ops, made)
    return (GatedAttention if family.gated_attention else Attention)(ops, made)


def _own_mlp(layer: nn.Module, family: Family, shape: Shape, ops: Ops) -> Core:
    if shape.activation not in ACTIVATIONS:
        raise UnsupportedModel(
            f"activation {shape.activation!r} is not supported; known: {', '.join(ACTIVATIONS)}"
        )
    experts = mixture(layer, family, shape.activation, ops)
    if experts is not None:
        return Experts(ops, experts)
    up = product([linear_weights(layer, name, shape.factors) for name in family.gate_up], ops)
    down = product([linear_weights(layer, family.down, shape.factors)], ops)
    parts = HalfParts(into=up, out=down, activation=shape.activation, gated=family.gated)
    return Mlp(ops, parts)
