"""How fast the machine is now, beside how fast it was when costs were measured.

Other work on a machine makes everything slower for a while, by a third for a minute, say. A size
that was measured then would look dear beside one that was measured before. Does not know what costs
what.
"""

from __future__ import annotations

from collections import deque
from dataclasses import replace
from statistics import median

from ..core.contract import RoundTime

HEARD = 5  # rounds whose median counts, since single ones may be spikes


class Pace:
    """What rounds take now, as a multiple of what they took."""

    def __init__(self) -> None:
        self._ratios: deque[float] = deque(maxlen=HEARD)
        self._now = 1.0

    def even(self, time: RoundTime, expected: float | None) -> RoundTime:
        """A round as it would have been at the first measurements' pace. `expected`: what its pass
        took then, if that is known well."""
        seconds = time.verify + time.host
        if expected and seconds:  # a clock may stand still
            self._ratios.append(seconds / expected)
            if len(self._ratios) == HEARD:
                self._now = median(self._ratios)
        draft, verify, host = (each / self._now for each in (time.draft, time.verify, time.host))
        return replace(time, draft=draft, verify=verify, host=host)
