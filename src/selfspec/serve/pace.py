"""How many tokens of new prompts a round may read, so that it stays short for everybody else.

Who writes waits for the chunk, and so does who comes next. Seconds by size are measured as they go
by. Knows neither rows nor requests.
"""

from __future__ import annotations

from collections import deque
from statistics import median

from ..control.costs import GROWTH, REMEMBERED, Curve
from ..model.layered import PREFILL_CHUNK

SIZES = (16, 32, 64, 128, 256, PREFILL_CHUNK)
SLOWDOWN = 4.0  # a round that also reads may take so many times one that only writes


class Pace:
    """The size of the next chunk."""

    def __init__(self) -> None:
        self._plain: deque[float] = deque(maxlen=REMEMBERED)
        self._reading = Curve(GROWTH)

    def observe(self, read: int, seconds: float) -> None:
        """A round that read so many prompt tokens took so long."""
        if not read:
            self._plain.append(seconds)
        elif read in SIZES:  # a whole chunk, and not the end of a prompt
            self._reading.observe(read, seconds)

    def chunk(self) -> int:
        """The largest size that is expected to keep a round short."""
        if not self._plain or not self._reading.known:
            return SIZES[1]
        limit = SLOWDOWN * median(self._plain)
        return max((each for each in SIZES if self._reading(each) <= limit), default=SIZES[0])
