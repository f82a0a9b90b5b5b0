"""What Mamba-1 does between its convolution and its states, as a value, and how torch computes it.

Two products of what left the convolution, x, give each channel's step and the keys and queries that
all channels share; the three may be normed. Every channel has a state, one number for each of a
key. With d = softplus(step), in each channel:

    S = exp(d A) S + d k x;  o = q'S + D x;  then o times the SiLU of a gate

Products read what the convolution gives, so they stand between, unlike those of other recurrences.
What is kept of a token are u, d and k: no product is run again. Knows no cache.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from .linear import Linear
from .memo import Memo
from .norms import Norm


@dataclass(frozen=True, eq=False, kw_only=True)
class Selective(Memo):
    """One layer's products and norms."""

    into: Linear
    """Gives the few numbers that steps come from, a key and a query."""
    steps: Linear
    norm: Norm | None = None
    """Of the few numbers."""
    key_norm: Norm | None = None
    query_norm: Norm | None = None

    @property
    def linears(self) -> tuple[Linear, Linear]:
        return self.into, self.steps

    def changed(self, change: Callable[[Linear], Linear]) -> Selective:
        """The same with other products."""
        return replace(self, into=change(self.into), steps=change(self.steps))

    def chosen(
        self, x: Tensor, norm: Callable[[Tensor, Norm], Tensor]
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Steps before their softplus, keys and queries of some tokens."""
        given, few = self.into(x), self.steps.inputs
        key = (given.shape[1] - few) // 2
        parts = [part.contiguous() for part in given.split([few, key, key], 1)]
        norms = (self.norm, self.key_norm, self.query_norm)
        made = [p if n is None else norm(p, n) for p, n in zip(parts, norms, strict=True)]
        return self.steps(made[0]), made[1], made[2]


def through_channels(
    state: Tensor, decay: Tensor, x: Tensor, step: Tensor, k: Tensor, q: Tensor | None
) -> Tensor | None:
    """o of every token, (tokens, channels), without D. `state`, (channels, key), goes on with them.
    Without q only the state is wanted."""
    out = torch.empty_like(x)
    for token in range(len(x)):
        state *= (step[token, :, None] * decay).exp()
        state += (step[token] * x[token])[:, None] * k[token]
        if q is not None:
            out[token] = (state * q[token]).sum(1)
    return None if q is None else out


def step_of(raw: Tensor) -> Tensor:
    return F.softplus(raw.float())
