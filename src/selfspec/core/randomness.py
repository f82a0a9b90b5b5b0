"""Random numbers, and a token drawn with one.

Randomness is counter-based: a number is a function of (seed, position in the row, stream) and
nothing else. There is no generator whose state would have to be rewound when drafts are rejected.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor

_MASK = (1 << 64) - 1
# 2**64 over the golden ratio, the increment of splitmix64 (Steele, Lea, Flood 2014)
_GOLDEN = 0x9E3779B97F4A7C15


def _mix(x: int) -> int:
    """The finaliser of splitmix64. Each input bit flips each output bit with probability ~1/2."""
    x = (x + _GOLDEN) & _MASK
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK
    return x ^ (x >> 31)


# The streams of numbers at one position. Each has one use: no decision can be read off another.
PLAIN = 0  # the target's own draw, which drafts that are chosen outright share
DRAFT = 1  # a draft's draw that is verified by rejection, in a round of its own
REMAINDER = 2  # the target's draw where every draft was rejected, or none is left
ACCEPT = 3  # whether the first of a node's drafts is accepted; 4 and on: its next siblings


def key(seed: int, *counters: int) -> int:
    """64 random bits. They depend on the arguments only, their order included."""
    x = _mix(seed & _MASK)
    for counter in counters:
        x = _mix(x ^ (counter & _MASK))
    return x


def uniform(seed: int, position: int, stream: int = PLAIN) -> float:
    """A number in [0, 1). It depends on the arguments only, and streams are independent."""
    return (key(seed, position, stream) >> 11) * 2.0**-53  # exact in a float, and below 1


def invert(probabilities: Tensor, u: float) -> int:
    """The first index at which the cumulated probability exceeds u of the total.

    In float64, u * total rounds to less than the total for every u below 1, so such an index
    exists. The sum grew at it, so a token of probability 0 is never chosen.
    """
    cumulated = probabilities.cumsum(-1, dtype=torch.float64)
    return int(torch.searchsorted(cumulated, u * cumulated[-1], right=True))
