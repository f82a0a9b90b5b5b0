"""A layer of Gemma 3n: some streams stand beside each other, the layer predicts all of them from
all, works on one, and corrects all by what that one became (AltUp). Beside its attention stands a
product of low rank (LAuReL), and some MLPs keep only gates well above their mean.

It is one half, which runs by itself: products and attention are our operations', and torch does
what lies between, number by number or row by row, so that a row's bits do not depend on others.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

import torch
from torch import Tensor, nn

from .compute.cache import KVCache, TokenLayout
from .compute.linear import Linear
from .compute.norms import Norm
from .compute.ops import Ops
from .cores import Attention, ChangeLinear, Mlp, OfToken
from .family import Family, Shape
from .weights import linear_weights, norm, parameter, product

LEAST = 1e-5  # of a stream's mean square
HALF = 2**-0.5
ALONE = "several streams stand beside each other"


@dataclass(frozen=True, eq=False)
class Router:
    """What each token makes of the streams: a few numbers, and by them coefficients."""

    ops: Ops
    norm: Norm
    product: Linear
    predicts: Tensor
    """(streams * streams, streams), like `corrects`, (streams, streams)."""
    corrects: Tensor

    def of(self, x: Tensor) -> Tensor:
        """(tokens, width) -> (tokens, streams)."""
        routed = self.product(self.ops.norm(x, self.norm)).float()
        return self.ops.soft_cap(routed, 1.0).to(x.dtype)

    def predicted(self, streams: Sequence[Tensor], active: int) -> list[Tensor]:
        count = len(streams)
        made = _small(self.of(streams[active]), self.predicts)
        found = []
        for i, own in enumerate(streams):
            mixed = streams[0] * made[:, i * count, None]
            for j in range(1, count):
                mixed = mixed + streams[j] * made[:, i * count + j, None]
            found.append(mixed + own)
        return found

    def corrected(self, predicted: Sequence[Tensor], became: Tensor, active: int) -> list[Tensor]:
        made = _small(self.of(became), self.corrects) + 1
        change = became - predicted[active]
        return [change * made[:, i, None] + each for i, each in enumerate(predicted)]


def _small(x: Tensor, weights: Tensor) -> Tensor:
    """A product with a few numbers, one after the other."""
    out = x[:, :1] * weights[:, 0]
    for i in range(1, x.shape[1]):
        out = out + x[:, i, None] * weights[:, i]
    return out


@dataclass(frozen=True, kw_only=True)
class StreamsLayer:
    """Called as an attention, with all streams, and gives all streams."""

    ops: Ops
    attention: Attention
    mlp: Mlp
    of_token: OfToken
    left: Linear
    right: Linear
    router: Router
    norms: tuple[Norm, Norm, Norm, Norm]
    """Before and after attention, before and after the MLP."""
    low_rank_norm: Norm
    of_token_norm: Norm
    active: int
    scale: Tensor | None
    """What the corrected stream is multiplied with before it meets the token's numbers."""
    above: float | None
    """Only what is this many deviations above its mean is left of a gate. None: all of it."""

    @property
    def linears(self) -> Sequence[Linear]:
        """The products that one token runs through."""
        parts = (self.attention, self.mlp, self.of_token)
        attention, mlp, of_token = (part.linears for part in parts)
        return (self.router.product, self.left, self.right, *attention, *mlp, *of_token)

    def with_linears(self, change: ChangeLinear) -> Self:
        """The same with other products."""
        return replace(
            self,
            attention=self.attention.with_linears(change),
            mlp=self.mlp.with_linears(change),
            of_token=self.of_token.with_linears(change),
            left=change(self.left),
            right=change(self.right),
            router=replace(self.router, product=change(self.router.product)),
        )

    def parts(self) -> str:
        return ALONE

    def __call__(
        self,
        x: Tensor,
        cache: KVCache,
        layout: TokenLayout,
        residual: Tensor | None = None,
        of_tokens: Tensor | None = None,
    ) -> Tensor:
        assert of_tokens is not None
        width = self.norms[0].size
        streams = [each.contiguous() for each in x.split(width, 1)]
        predicted = self.router.predicted(streams, self.active)
        became = self._worked(predicted[self.active], cache, layout)
        corrected = self.router.corrected(predicted, became, self.active)
        first = corrected[self.active]
        if self.scale is not None:
            first = (first.float() * self.scale).to(first.dtype)
        more = self.ops.norm(self.of_token(first, of_tokens), self.of_token_norm)
        return torch.cat([corrected[0], *(each + more for each in corrected[1:])], 1)

    def _worked(self, x: Tensor, cache: KVCache, layout: TokenLayout) -> Tensor:
        """What the layer makes of one stream."""
        norm, (before, after, mlp_before, mlp_after) = self.ops.norm, self.norms
        read = norm(x, before)
        low_rank = read + norm(self.right(self.left(read)), self.low_rank_norm)
        seen = x + norm(self.attention(read, cache, layout), after)
        both = (seen + low_rank) * HALF
        return both + norm(self._mlp(norm(both, mlp_before)), mlp_after)

    def _mlp(self, x: Tensor) -> Tensor:
        if self.above is None:
            return self.mlp(x)
        made = self.mlp.made
        gate, up = made.into(x).chunk(2, 1)
        found = [torch.var_mean(row, correction=0) for row in gate.contiguous()]
        variance, mean = map(torch.stack, zip(*found, strict=True))
        kept = torch.relu(gate - (mean + variance.sqrt() * self.above)[:, None])
        return self.mlp.out(self.ops.gated(torch.cat([kept, up], 1), made.activation))


def streams_layer(
    layer: Any, attention: Attention, mlp: Mlp, of_token: OfToken, family: Family, shape: Shape,
    ops: Ops,
) -> StreamsLayer:  # fmt: skip
    """The layer of a family that has such ones, from its module."""
    found = layer.altup
    config, names = found.config, family.of_token
    assert names is not None

    def own(root: nn.Module, name: str | None) -> Norm:
        return norm(root, str(name), family.norms, shape.width)

    def plain(name: str) -> Linear:
        return product([linear_weights(layer, name)], ops)

    before = own(found, "router_norm")
    router = Router(
        ops,
        replace(before, weight=before.weight / shape.width),
        plain("altup.modality_router"),
        found.prediction_coefs.weight.detach().clone(),
        found.correction_coefs.weight.detach().clone(),
    )
    share = float(layer.mlp.activation_sparsity)
    normal = torch.distributions.Normal(0.0, 1.0)
    around = (family.attention_norm, family.attention_after, family.mlp_norm, family.mlp_after)
    first, second, third, fourth = (own(layer, name) for name in around)
    return StreamsLayer(
        ops=ops,
        attention=attention,
        mlp=mlp,
        of_token=of_token,
        left=plain("laurel.linear_left"),
        right=plain("laurel.linear_right"),
        router=router,
        norms=(first, second, third, fourth),
        low_rank_norm=own(layer, "laurel.post_laurel_norm"),
        of_token_norm=own(layer, names.after),
        active=config.altup_active_idx,
        scale=parameter(found, "correct_output_scale") if config.altup_correct_scale else None,
        above=float(normal.icdf(torch.tensor(share))) if share > 0 else None,
    )


@dataclass(frozen=True, eq=False)
class Spread:
    """One stream to several: itself, and products of it as large as it is."""

    products: Sequence[Linear]

    def __call__(self, x: Tensor) -> Tensor:
        size = _mean_square(x).sqrt()
        return torch.cat([x, *(_as_large(each(x), size) for each in self.products)], 1)


@dataclass(frozen=True, eq=False)
class Gathered:
    """Several streams to one, their mean, and its norm. One that comes alone (a trained part's) is
    normed as it is."""

    ops: Ops
    products: Sequence[Linear]
    norm: Norm

    def __call__(self, x: Tensor) -> Tensor:
        first, *others = (each.contiguous() for each in x.split(self.norm.size, 1))
        if not others:
            return self.ops.norm(first, self.norm)
        size, total = _mean_square(first).sqrt(), first
        for each, found in zip(self.products, others, strict=True):
            total = total + _as_large(each(found), size)
        return self.ops.norm(total / (1 + len(others)), self.norm)


def _as_large(x: Tensor, size: Tensor) -> Tensor:
    return x * size / _mean_square(x).clamp(min=LEAST).sqrt()


def _mean_square(x: Tensor) -> Tensor:
    """Of each row, by itself, (rows, 1)."""
    return torch.stack([row.mean() for row in x * x])[:, None]
