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
SLOWDOWN = 3.0  # a chunk may take so many times a round of those that write


class Pace:
    """The size of the next chunk."""

    def __init__(self) -> None:
        self._writing: deque[float] = deque(maxlen=REMEMBERED)
        self._reading = {size: deque[float](maxlen=REMEMBERED) for size in SIZES}

    def observe(self, read: int, reading: float, writing: float) -> None:
        """A step read so many prompt tokens. Seconds of that, and of the round of the others. They
        are kept apart: drafts make a round long, and that says nothing of what reading costs."""
        if writing:
            self._writing.append(writing)
        if read in self._reading:  # a whole chunk, and not the end of a prompt
            self._reading[read].append(reading)

    def chunk(self) -> int:
        """The largest size that keeps a step short. A larger one is tried if twice the seconds of
        the one before would do, and not ruled out by a time or two, which may be a spike."""
        if not self._writing or not any(self._reading.values()):
            return FIRST
        limit, found, before = SLOWDOWN * median(self._writing), SIZES[0], None
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
