"""How likely a token of a copy is the model's own.

A copy's logits are those of the model, each off by a little. How much is seen wherever the model
verifies a draft: the two tokens that the copy found likeliest lie further apart or nearer there. So
what the copy is in doubt about is known before it is verified: where its first token leads by three
times as much as leads are usually off, both say the same in 998 cases of 1,000, and where both are
level in one of two. Numbers only, no text. Does not know who drafts.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from statistics import NormalDist

from ..control.shares import LASTING, Share

LIKELY = 0.9  # that a token is the model's own, while nothing is known
ENOUGH = 8  # leads after which it is known how much they are off
LEAST = 1e-6  # which is never nothing


class Likeness:
    """Of a copy with its model, lately."""

    def __init__(self) -> None:
        self._agreed = Share(LASTING)
        self._squares, self._count = 0.0, 0.0

    def chance(self, lead: float | None) -> float:
        """That the model says the same, by how far the copy's likeliest token leads the next one.
        None: that is unknown."""
        if lead is None or self._count < ENOUGH:
            return self._agreed.expected(LIKELY)
        off = max(LEAST, math.sqrt(self._squares / self._count))
        return NormalDist(0, off).cdf(lead)

    def learn(self, agreed: Iterable[bool], off: Iterable[float]) -> None:
        """Of tokens that were verified whether they were the model's own, and by how much leads
        were off."""
        for same in agreed:
            self._agreed.fade()
            self._agreed.add(same)
        for difference in off:
            if math.isfinite(difference):
                self._squares = LASTING * self._squares + difference * difference
                self._count = LASTING * self._count + 1
