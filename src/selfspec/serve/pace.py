"""How many tokens of new prompts a round may read, so that it stays short for everybody else.

Who writes waits for the chunk, and so does who comes next. Seconds by size are measured as they go
by. Knows neither rows nor requests.
"""

from __future__ import annotations

from collections import deque
from statistics import median

from ..control.curves import ENOUGH, REMEMBERED
from ..model.layered import PREFILL_CHUNK

SIZES = (16, 32, 64, 128, 256, PREFILL_CHUNK)  # each twice the one before
FIRST = 32  # while nothing is known
SLOWDOWN = 4.0  # a round that also reads may take so many times one that only writes


class Pace:
    """The size of the next chunk."""

    def __init__(self) -> None:
        self._plain: deque[float] = deque(maxlen=REMEMBERED)
        self._reading = {size: deque[float](maxlen=REMEMBERED) for size in SIZES}

    def observe(self, read: int, seconds: float) -> None:
        """A round that read so many prompt tokens took so long."""
        if not read:
            self._plain.append(seconds)
        elif read in self._reading:  # a whole chunk, and not the end of a prompt
            self._reading[read].append(seconds)

    def chunk(self) -> int:
        """The largest size that keeps a round short. A larger one is tried if twice the seconds of
        the one before would do, and not ruled out by a time or two, which may be a spike."""
        if not self._plain or not any(self._reading.values()):
            return FIRST
        limit, found, before = SLOWDOWN * median(self._plain), SIZES[0], None
        for size in SIZES:
            times = self._reading[size]
            promising = before is not None and 2 * before <= limit
            if times and (len(times) >= ENOUGH or not promising):
                before = median(times)
                if before > limit:
                    break
                found = size
            elif promising:
                return size
        return found
