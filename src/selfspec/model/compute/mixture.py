"""A mixture of experts as a value, and how torch chooses among them.

p = softmax(router x), or its sigmoid; y = sum over the chosen experts of p_e * expert_e(x), plus an
expert that all tokens share, perhaps weighed by the sigmoid of a product. Each expert runs once on
all tokens that chose it, and a token's sum goes through its experts in a fixed order, so its bits
do not depend on what others choose. Training's load-balancing loss has no place here.

Experts may read and give fewer numbers than the stream has (Nemotron-H). Then one product narrows
what they read, and one widens their sum; what all tokens share stands beside them in both.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from .linear import Linear
from .memo import Memo


@dataclass(frozen=True, eq=False, kw_only=True)
class Mixture(Memo):
    """One layer's."""

    router: Linear
    """Gives a number for each expert that can be chosen, then one that weighs the shared one."""
    into: Sequence[Linear]
    """The first product of each expert, gate and up. The shared one comes last."""
    out: Sequence[Linear]
    chosen: int
    """Experts that a token chooses."""
    shared: bool = False
    """There is one expert more, which every token has."""
    narrow: Linear | None = None
    """Makes what experts read, and behind it what the shared one activates."""
    widen: Linear | None = None
    """Of what chosen experts give, and behind it of what was activated."""
    activation: str = "silu"
    gated: bool = True
    sigmoid: bool = False
    """Scores are sigmoids, not a softmax."""
    favour: Tensor | None = None
    """Added to each expert's score where experts are chosen, not where they are weighed."""
    groups: int = 1
    """Experts are chosen from the best `kept` of so many groups, by the sum of the `best` scores of
    each."""
    kept: int = 1
    best: int = 1
    margin: float = 0.0
    """A chosen expert's weight is its share among all whose score is near, next to its size, and
    that were not chosen before (Phi-3.5-MoE's sparse mixer). 0: not so."""
    of_inputs: bool = False
    """Weights are of what the chosen experts read, not of what they give (Llama 4)."""
    normalised: bool = True
    """Whether the chosen experts' weights are divided by their sum, plus `least`."""
    least: float = 0.0
    shares: Tensor | None = None
    """What each expert's weight is multiplied with at last."""
    scale: float = 1.0
    """Of what the chosen experts give."""

    @property
    def count(self) -> int:
        """Experts that can be chosen."""
        return len(self.into) - self.shared

    @property
    def weighed(self) -> bool:
        """Whether the shared expert is weighed."""
        return self.router.outputs > self.count

    @property
    def width(self) -> int:
        """Numbers that an expert reads of a token."""
        return self.into[0].inputs

    @property
    def ends(self) -> Sequence[Linear]:
        """What narrows and widens."""
        return [each for each in (self.narrow, self.widen) if each is not None]

    @property
    def linears(self) -> Sequence[Linear]:
        """All products."""
        return (self.router, *self.ends, *self.into, *self.out)

    @property
    def of_a_token(self) -> Sequence[Linear]:
        """What one token runs through."""
        each = [*range(self.chosen), *range(self.count, len(self.into))]
        pairs = [linear for expert in each for linear in (self.into[expert], self.out[expert])]
        return (self.router, *self.ends, *pairs)

    @property
    def alone(self) -> str:
        """Why our kernels cannot run it; "" if they can."""
        return next((linear.alone for linear in self.linears if linear.alone), "")

    def changed(self, change: Callable[[Linear], Linear]) -> Mixture:
        """The same with other products. The router, which is small and decides, stays."""
        into, out = ([change(linear) for linear in each] for each in (self.into, self.out))
        narrow, widen = (each and change(each) for each in (self.narrow, self.widen))
        return replace(self, into=into, out=out, narrow=narrow, widen=widen)

    def choose(self, scores: Tensor) -> tuple[Tensor, Tensor]:
        """(tokens, count) -> weights of the chosen experts, and which they are, (tokens, chosen)"""
        if self.margin:
            return self._choose_near(scores)
        choosing = scores if self.favour is None else scores + self.favour
        if self.kept < self.groups:
            grouped = choosing.unflatten(1, (self.groups, -1))
            best = grouped.topk(self.best, dim=-1).values.sum(-1).topk(self.kept, dim=-1).indices
            opened = torch.zeros_like(grouped[..., 0], dtype=torch.bool).scatter_(1, best, True)
            choosing = grouped.masked_fill(~opened[..., None], -torch.inf).flatten(1)
        chosen = choosing.topk(self.chosen, dim=-1).indices
        weights = scores.gather(1, chosen)
        if self.normalised:
            weights = weights / (weights.sum(-1, keepdim=True) + self.least)
        if self.shares is not None:
            weights = weights * self.shares[chosen]
        return weights * self.scale, chosen

    def _choose_near(self, scores: Tensor) -> tuple[Tensor, Tensor]:
        """The same, of the router's numbers as they are, with a margin."""
        left, found = scores, []
        for _ in range(self.chosen):
            best, expert = left.max(-1, keepdim=True)
            far = (best - scores) / scores.abs().clamp(min=best) > self.margin
            shares = left.masked_fill(far, -torch.inf).softmax(-1)
            found.append((shares.gather(1, expert) * self.scale, expert))
            left = left.scatter(1, expert, -torch.inf)
        weights, chosen = zip(*found, strict=True)
        return torch.cat(weights, 1), torch.cat(chosen, 1)
