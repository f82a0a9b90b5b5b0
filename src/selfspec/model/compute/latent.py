"""Latent attention as a value: each head's query, key and value are another product of a few normed
numbers, and one rotated key serves all heads. And how torch unfolds them.

What is unfolded are ordinary heads, and the cache keeps these: one kernel attends for all families,
in more memory than the few numbers would take. A value may be shorter than a key. Knows no cache.
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
class Latent(Memo):
    """One layer's. The product before it gives the queries, or the few numbers that they come from,
    then those that keys and values come from, then the rotated key. Rotated numbers come first in a
    head."""

    queries: Linear | None
    """From few numbers to all queries; None: they come as they are."""
    query_norm: Norm | None
    rest: Linear
    """From few numbers to each head's unrotated part of the key, and its value."""
    norm: Norm
    rotary: int
    """Numbers of a key that are rotated, and those that are not."""
    plain: int
    value: int
    heads: int

    @property
    def size(self) -> int:
        """Of a head, as the cache keeps it."""
        return max(self.rotary + self.plain, self.value)

    @property
    def asked(self) -> int:
        """The columns that queries come from."""
        if self.queries is not None:
            return self.queries.inputs
        return self.heads * (self.rotary + self.plain)

    @property
    def linears(self) -> tuple[Linear, ...]:
        return (self.rest,) if self.queries is None else (self.queries, self.rest)

    def changed(self, change: Callable[[Linear], Linear]) -> Latent:
        """The same with other products."""
        queries = None if self.queries is None else change(self.queries)
        return replace(self, queries=queries, rest=change(self.rest))

    def unfolded(self, y: Tensor, norm: Callable[[Tensor, Norm], Tensor]) -> Tensor:
        """Queries, keys and values of all heads, (tokens, 3 * heads * size)."""
        asked, few, turned = y.split([self.asked, self.rest.inputs, self.rotary], dim=1)
        if self.queries is not None:
            assert self.query_norm is not None
            asked = self.queries(norm(asked.contiguous(), self.query_norm))
        rest = self.rest(norm(few.contiguous(), self.norm)).view(len(y), self.heads, -1)
        plain, value = rest.split([self.plain, self.value], dim=2)
        key = torch.cat([turned[:, None].expand(-1, self.heads, -1), plain], dim=2)
        parts = (asked.view(len(y), self.heads, -1), key, value)
        filled = [F.pad(part, (0, self.size - part.shape[2])) for part in parts]
        return torch.stack(filled, dim=1).view(len(y), -1)

    def values(self, y: Tensor) -> Tensor:
        """What heads give without what fills them up: (tokens, heads * value)."""
        heads = y.view(len(y), self.heads, self.size)[..., : self.value]
        return heads.reshape(len(y), -1)
