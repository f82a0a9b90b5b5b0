"""What a tuning says while it is at work. Knows no terminal."""

from __future__ import annotations

import time
from collections.abc import Callable

OFTEN = 0.2  # seconds between two words about the same stage
Say = Callable[[str, float], None]
"""Told the stage and the share of it that is done."""


def seldom(say: Say) -> Say:
    """The same a few times a second, and whenever a stage begins (share 0): parts of a pass are
    timed thousands of times a second."""
    last = 0.0

    def told(stage: str, share: float) -> None:
        nonlocal last
        now = time.perf_counter()
        if not share or now >= last + OFTEN:
            last = now
            say(stage, share)

    return told
