"""What half of a layer is made of, for whoever runs many halves at once. Computes nothing."""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch import Tensor

from .latent import Latent
from .linear import Linear
from .mixture import Mixture
from .norms import Norm
from .ops import Heads
from .recurrence import Recurrence


@dataclass(frozen=True, kw_only=True)
class HalfParts:
    """An attention if it has heads, recurrent if it has a recurrence, else an MLP: norm, product,
    what stands between, perhaps normed, product, norm, scale, added to the stream, and the stream
    scaled. The first product of a mixture is its router."""

    into: Linear
    out: Linear | None = None
    """None: a mixture whose experts' own products are the last."""
    mixture: Mixture | None = None
    heads: Heads | None = None
    latent: Latent | None = None
    """What makes queries, keys and values of what the first product gives."""
    recurrence: Recurrence | None = None
    activation: str = ""
    gated: bool = False
    """An MLP, or an attention whose heads have gates, which come behind queries, keys, values."""
    curve: Tensor | None = None
    """The numbers of an activation that has some."""
    inner: Norm | None = None
    """Of what the last product reads."""
    before: Norm | None = None
    after: Norm | None = None
    parallel: bool = False
    scale: float = 1.0
    stream: float = 1.0
    """What the stream is multiplied with behind it."""

    given: int | None = None
    """An MLP's second factor is not its own: the numbers that each token brings along, from this
    one on."""
    held: bool = False
    """What it adds is held for the part behind it, which adds it to its own."""
    reads: Norm | None = None
    """Of what a mixture's experts read, where the router reads something else."""
    last: Norm | None = None
    """Of the sum with what was held."""
    then: HalfParts | None = None
    """What follows it as a part of the same half."""

    def followed_by(self, then: HalfParts | None) -> HalfParts:
        """The same with another part behind its last one."""
        behind = then if self.then is None else self.then.followed_by(then)
        return replace(self, then=behind)

    def with_stream(self, stream: float) -> HalfParts:
        """The same with the stream scaled behind its last part."""
        if self.then is None:
            return replace(self, stream=stream)
        return replace(self, then=self.then.with_stream(stream))

    @property
    def alone(self) -> str:
        """Why our kernels cannot take it into the one call of a pass; "" if they can."""
        behind = "" if self.then is None else self.then.alone
        if self.mixture is not None:
            return self.mixture.alone or behind
        assert self.out is not None
        selective = self.recurrence.selective if self.recurrence else None
        between = [*(self.latent.linears if self.latent else ())]
        between += selective.linears if selective else ()
        linears = [self.into, *between, self.out]
        return next((linear.alone for linear in linears if linear.alone), behind)


Half = HalfParts | str
"""What a half is made of, or in words why it cannot be taken apart."""
