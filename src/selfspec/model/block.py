"""Our own forward of one decoder block as two residual halves: `attention` and `mlp`. Either may be
left out.

Written once over `Ops`; what differs between families is data in `families.py`. Does not know which
layers run or why.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor, nn

from ..errors import UnsupportedModel
from .altup import StreamsLayer, streams_layer
from .compute.cache import KVCache, TokenLayout
from .compute.halves import Half, HalfParts
from .compute.linear import Linear
from .compute.norms import Norm
from .compute.ops import ACTIVATIONS, Heads, Ops, Temperature
from .compute.rope import RopeTable
from .cores import (
    Attention,
    Beside,
    ChangeLinear,
    Core,
    Experts,
    GatedAttention,
    LatentAttention,
    Mlp,
    MlpAndExperts,
    OfToken,
    Recurrent,
    changed,
)
from .experts import mixture, router_norm
from .family import Family, OfTokenNames, Shape
from .heads import attention_scale, head_norm, qkv
from .latent import latent
from .recurrent import recurrent_parts
from .weights import (
    a_parameter,
    linear_weights,
    module,
    norm,
    number,
    one_after_the_other,
    parameter,
    product,
    side_by_side,
    xielu,
)

Change = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class NormBy:
    """A norm and the operations that compute it."""

    ops: Ops
    norm: Norm

    def __call__(self, x: Tensor) -> Tensor:
        return self.ops.norm(x, self.norm)


@dataclass(frozen=True)
class NormedTwice:
    """A norm, a product, an activation, and another norm."""

    first: NormBy
    product: Linear
    activation: str
    last: NormBy

    def __call__(self, x: Tensor) -> Tensor:
        y = self.product(self.first(x))
        return self.last(self.first.ops.activated(y, self.activation))


@dataclass(frozen=True)
class Norms:
    """What happens to each half's input, and to what it adds; None: nothing."""

    attention_before: Change | None
    attention_after: Change | None
    mlp_before: Change | None
    mlp_after: Change | None
    of_token_after: Change | None = None


class Block:
    """One layer. A half is: norm, core, norm, scale, and added to the stream; any of them but the
    core may be missing. `of_token` is another core behind the MLP, as a part of the same half.
    `stream` multiplies what leaves the layer.

    `parallel`: the MLP reads what entered the layer, not what attention has added to.
    """

    def __init__(
        self,
        attention: Core | None,
        mlp: Core | None,
        norms: Norms,
        scale: float = 1.0,
        parallel: bool = False,
        stream: float = 1.0,
        of_token: OfToken | None = None,
    ) -> None:
        """None: the model's layer has no such half."""
        self._attention, self._mlp, self._norms = attention, mlp, norms
        self._of_token = of_token
        self._scale, self.parallel, self._stream = scale, parallel, stream

    @property
    def linears(self) -> tuple[Linear, ...]:
        """The products that one token runs through."""
        return tuple(linear for core in self._cores for linear in core.linears)

    @property
    def products(self) -> tuple[Linear, ...]:
        """All of them, where there are experts."""
        return tuple(
            linear for core in self._cores for linear in getattr(core, "products", core.linears)
        )

    @property
    def _cores(self) -> Sequence[Core]:
        cores = (self._attention, self._mlp, self._of_token)
        return [core for core in cores if core is not None]

    def with_linears(self, change: ChangeLinear) -> Block:
        """The same with other products. Modules of transformers stay as they are."""
        attention, mlp = changed(self._attention, change), changed(self._mlp, change)
        of_token = changed(self._of_token, change)
        more = self._norms, self._scale, self.parallel, self._stream, of_token
        return Block(attention, mlp, *more)

    def taken_apart(self) -> tuple[Half | None, Half | None]:
        """Both halves, attention first; None for one that the layer does not have."""
        norms = self._norms
        attention = self._apart(self._attention, norms.attention_before, norms.attention_after)
        mlp = self._apart(self._mlp, norms.mlp_before, norms.mlp_after)
        of_token = self._apart(self._of_token, None, norms.of_token_after)
        if isinstance(of_token, str):
            return attention, of_token
        if isinstance(mlp, HalfParts):
            mlp = mlp.followed_by(of_token).with_stream(self._stream)
        return attention, mlp

    def _apart(
        self, core: Core | OfToken | None, before: Change | None, after: Change | None
    ) -> Half | None:
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
        assert parts.then is None or self._scale == 1
        if parts.then is None:
            parts = replace(parts, before=first, after=last)
        return replace(parts, parallel=self.parallel, scale=self._scale)

    def attention(
        self, x: Tensor, cache: KVCache, layout: TokenLayout, of_tokens: Tensor | None = None
    ) -> Tensor:
        """`of_tokens`: what layers read of the tokens themselves."""
        if self._attention is None:
            return x
        core = partial(self._attention, cache=cache, layout=layout)
        if isinstance(self._attention, StreamsLayer):
            core = partial(core, of_tokens=of_tokens)
        return self._half(x, x, self._norms.attention_before, core, self._norms.attention_after)

    @property
    def files_keys(self) -> bool:
        """Whether its attention can leave keys and values without being finished."""
        return isinstance(self._attention, Attention)

    def file_keys(self, x: Tensor, cache: KVCache, layout: TokenLayout) -> None:
        """What a token leaves here for later ones, where nothing else of it is asked for."""
        assert isinstance(self._attention, Attention)
        before = self._norms.attention_before
        self._attention.file_keys(x if before is None else before(x), cache, layout)

    def mlp(
        self, x: Tensor, entered: Tensor | None = None, of_tokens: Tensor | None = None
    ) -> Tensor:
        """`entered` is what entered the layer, which parallel halves read. `of_tokens`: what
        layers read of the tokens themselves."""
        if self._mlp is None:
            return x
        read = entered if self.parallel and entered is not None else x
        x = self._half(x, read, self._norms.mlp_before, self._mlp, self._norms.mlp_after)
        if self._of_token is not None:
            assert of_tokens is not None
            core = partial(self._of_token, of_tokens=of_tokens)
            x = self._half(x, x, None, core, self._norms.of_token_after)
        return x if self._stream == 1 else x * self._stream

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
    if index in shape.recurrent:
        family = replace(family, **family.where_recurrent)

    def change(name: str | None) -> Change | None:
        if name is None or isinstance(module(layer, name), nn.Identity):
            return None
        return NormBy(ops, norm(layer, name, family.norms, shape.width))

    names = family.of_token
    of_token = None if names is None else _of_token(layer, index, names, shape, ops)
    if shape.streams > 1:
        attention = _own_attention(layer, index, family, shape, ops, rope)
        mlp = _own_mlp(layer, family, shape, ops)
        assert isinstance(attention, Attention) and isinstance(mlp, Mlp) and of_token is not None
        whole = streams_layer(layer, attention, mlp, of_token, family, shape, ops)
        return Block(whole, None, Norms(None, None, None, None))
    inside = family.experts_normed is not None  # of which the MLP's norms are
    norms = Norms(
        change(family.attention_norm),
        change(family.attention_after),
        None if inside else change(family.mlp_norm),
        None if inside else change(family.mlp_after),
        None if names is None else change(names.after),
    )
    no_attention, no_mlp = ((index, which) in shape.missing for which in (True, False))
    return Block(
        None if no_attention else _own_attention(layer, index, family, shape, ops, rope),
        None if no_mlp else _own_mlp(layer, family, shape, ops),
        norms,
        shape.scales.residual,
        shape.parallel,
        1.0 if family.stream is None else float(number(layer, family.stream)),
        of_token,
    )


def _of_token(layer: nn.Module, index: int, names: OfTokenNames, shape: Shape, ops: Ops) -> OfToken:
    """What a layer makes of the token itself."""
    gate = product([linear_weights(layer, names.gate)], ops)
    made = HalfParts(
        into=gate,
        out=product([linear_weights(layer, names.out)], ops),
        activation=shape.activation,
        given=index * gate.outputs,
    )
    return OfToken(ops, made)


def _own_attention(
    layer: nn.Module, index: int, family: Family, shape: Shape, ops: Ops, rope: RopeTable | None
) -> Core:
    """A layer's attention, or what is recurrent in its place."""
    found = None
    if index in shape.recurrent:
        before = sum(other < index for other in shape.recurrent)
        found = recurrent_parts(layer, before, family, shape, ops)
    if found is not None and index in shape.keyless:
        into, out = product(found.into, ops, found.order), product([found.out], ops)
        return Recurrent(ops, HalfParts(into=into, out=out, recurrence=found.how))
    device = a_parameter(layer).device
    shape, rotary = shape.of_layer(index), None if rope is None else rope.rotary
    lender = shape.lenders[index] if shape.lenders else index
    heads = Heads(
        layer=lender - sum(other < lender for other in shape.keyless),
        borrowed=lender != index,
        queries=shape.heads,
        keys=shape.kv_heads,
        size=shape.head_size,
        scale=attention_scale(layer, family),
        window=shape.windows[index],
        cap=shape.scales.score_cap,
        clamp=shape.scales.clamp,
        sinks=None if family.sinks is None else parameter(layer, family.sinks),
        slopes=torch.tensor(shape.slopes, device=device) if shape.slopes else None,
        coarse=family.coarse_slopes,
        temperature=shape.temperatures[index] if shape.temperatures else Temperature(),
        rope=rope,
        norms_behind=family.norms_behind,
        query_norm=head_norm(layer, family.query_norm, family, shape, rotary),
        key_norm=head_norm(layer, family.key_norm, family, shape, rotary),
        value_norm=head_norm(layer, family.value_norm, family, shape, None),
    )
    if family.latent:
        first, unfolds = latent(layer, family, shape, ops)
        out = product([linear_weights(layer, family.out)], ops)
        return LatentAttention(ops, HalfParts(into=first, out=out, heads=heads, latent=unfolds))
    last = linear_weights(layer, family.out, shape.factors)
    parts, order = qkv(layer, family, shape, rotary, heads.borrowed)
    if found is not None:
        order = one_after_the_other((parts, order), (found.into, found.order))
        parts, last = [*parts, *found.into], side_by_side([last, found.out])
    made = HalfParts(
        into=product(parts, ops, order),
        out=product([last], ops),
        heads=heads,
        inner=_inner(layer, family.attention_inner, family),
        recurrence=None if found is None else found.how,
        gated=family.gated_attention,
    )
    if found is not None:
        return Beside(ops, made)
    return (GatedAttention if family.gated_attention else Attention)(ops, made)


def _inner(layer: nn.Module, name: str | None, family: Family) -> Norm | None:
    """A norm with weights of what a half's last product reads."""
    return None if name is None else norm(layer, name, family.norms, 0)


def _own_mlp(layer: nn.Module, family: Family, shape: Shape, ops: Ops) -> Core:
    if shape.activation not in ACTIVATIONS:
        raise UnsupportedModel(
            f"activation {shape.activation!r} is not supported; known: {', '.join(ACTIVATIONS)}"
        )
    experts = mixture(layer, family, shape.activation, ops)
    if experts is not None and family.experts_normed is None:
        return Experts(ops, experts)
    up = product([linear_weights(layer, name, shape.factors) for name in family.gate_up], ops)
    down = product([linear_weights(layer, family.down, shape.factors)], ops)
    inner = _inner(layer, family.mlp_inner, family)
    parts = HalfParts(
        into=up, out=down, inner=inner, activation=shape.activation, gated=family.gated
    )
    if shape.activation == "xielu":
        parts = replace(parts, curve=xielu(module(layer, "mlp.act_fn")))
    if experts is None or family.experts_normed is None:
        return Mlp(ops, parts)
    names = family.experts_normed

    def own(name: str | None) -> Norm:
        return norm(layer, str(name), family.norms, shape.width)

    return MlpAndExperts(
        Mlp(ops, parts), Experts(ops, experts),
        own(family.mlp_norm), own(names.mlp_after), router_norm(layer, family, shape),
        own(names.experts), own(names.after), own(family.mlp_after),
    )  # fmt: skip
