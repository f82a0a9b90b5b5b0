"""What stands between the norms of a half: an attention, something recurrent, an MLP, experts; each
made of products and of what our operations do between them. Knows no family and no layer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol, Self

import torch
from torch import Tensor

from .compute.cache import KVCache, TokenLayout
from .compute.halves import Half, HalfParts
from .compute.linear import Linear
from .compute.mixture import Mixture
from .compute.norms import Norm
from .compute.ops import Ops
from .compute.recurrent_cache import RecurrentCache
from .compute.selective import Selective

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

    def last(self, y: Tensor, residual: Tensor | None) -> Tensor:
        """The second product, behind a norm where there is one."""
        inner = self.made.inner
        return self.out(y if inner is None else self.ops.norm(y, inner), residual)


def changed(core: Any, change: ChangeLinear) -> Any:
    """The same with other products; modules of transformers stay as they are."""
    return core.with_linears(change) if hasattr(core, "with_linears") else core


class Attention(OwnCore):
    """Queries, keys and values are one product, since they read the same input."""

    def __call__(
        self, x: Tensor, cache: KVCache, layout: TokenLayout, residual: Tensor | None = None
    ) -> Tensor:
        made = self.made
        assert made.heads is not None
        y = self.ops.attention(made.into(x), made.heads, cache, layout)
        return self.last(y, residual)

    def file_keys(self, x: Tensor, cache: KVCache, layout: TokenLayout) -> None:
        """Of tokens of which nothing else is asked for."""
        assert self.made.heads is not None
        self.ops.file_keys(self.made.into(x), self.made.heads, cache, layout)


class GatedAttention(OwnCore):
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
    """In the place of an attention: a product, what goes on token by token, and a product. Where
    it is selective, products stand between."""

    @property
    def linears(self) -> tuple[Linear, ...]:
        selective = self._selective
        return self.made.into, *(selective.linears if selective else ()), self.out

    @property
    def out(self) -> Linear:
        assert self.made.out is not None
        return self.made.out

    @property
    def _selective(self) -> Selective | None:
        assert self.made.recurrence is not None
        return self.made.recurrence.selective

    def with_linears(self, change: ChangeLinear) -> Self:
        how = self.made.recurrence
        if how is not None and how.selective is not None:
            how = replace(how, selective=how.selective.changed(change))
        into, out = change(self.made.into), change(self.out)
        return replace(self, made=replace(self.made, into=into, recurrence=how, out=out))

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
        if made.gated:
            y = self.ops.gated(made.into(x), made.activation)
        else:
            y = self.ops.activated(made.into(x), made.activation, made.curve)
        return self.last(y, residual)


@dataclass(frozen=True)
class Experts:
    """Called like a dense MLP."""

    ops: Ops
    mixture: Mixture

    @property
    def linears(self) -> Sequence[Linear]:
        """What one token runs through."""
        return self.mixture.of_a_token

    @property
    def products(self) -> Sequence[Linear]:
        """All of them."""
        return self.mixture.linears

    def with_linears(self, change: ChangeLinear) -> Self:
        """The same with other products."""
        return replace(self, mixture=self.mixture.changed(change))

    def parts(self) -> HalfParts:
        return HalfParts(into=self.mixture.router, out=self.mixture.widen, mixture=self.mixture)

    def __call__(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        return self.ops.mixed(x, self.mixture, residual)


class OfToken(OwnCore):
    """act(first product) * what each token brings along for this layer; then the second."""

    def __call__(self, x: Tensor, of_tokens: Tensor, residual: Tensor | None = None) -> Tensor:
        made = self.made
        assert made.given is not None
        gates = made.into(x)
        own = of_tokens[:, made.given : made.given + gates.shape[1]]
        return self.out(self.ops.gated(torch.cat([gates, own], 1), made.activation), residual)


@dataclass(frozen=True)
class MlpAndExperts:
    """An MLP and a mixture side by side, each between norms of its own; router and experts have
    one each. What both give is added and normed once more."""

    mlp: Mlp
    experts: Experts
    before: Norm
    after: Norm
    scored: Norm
    reads: Norm
    given: Norm
    last: Norm

    @property
    def linears(self) -> Sequence[Linear]:
        """What one token runs through."""
        return *self.mlp.linears, *self.experts.linears

    @property
    def products(self) -> Sequence[Linear]:
        """All of them."""
        return *self.mlp.linears, *self.experts.products

    def with_linears(self, change: ChangeLinear) -> Self:
        """The same with other products."""
        mlp, experts = self.mlp.with_linears(change), self.experts.with_linears(change)
        return replace(self, mlp=mlp, experts=experts)

    def parts(self) -> HalfParts:
        experts = replace(
            self.experts.parts(),
            before=self.scored, reads=self.reads, after=self.given, last=self.last,
        )  # fmt: skip
        return replace(
            self.mlp.parts(), before=self.before, after=self.after, held=True, then=experts
        )

    def __call__(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        ops = self.mlp.ops
        held = ops.norm(self.mlp(ops.norm(x, self.before)), self.after)
        reads, scored = ops.norm(x, self.reads), ops.norm(x, self.scored)
        given = ops.mixed(reads, self.experts.mixture, scored=scored)
        added = ops.norm(ops.norm(given, self.given) + held, self.last)
        return added if residual is None else residual + added
