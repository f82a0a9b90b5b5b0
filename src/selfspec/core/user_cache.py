"""Where selfspec keeps what it makes: the demo model, converted files, compiled kernels."""

from __future__ import annotations

import os
from pathlib import Path

CACHE_VARIABLE = "SELFSPEC_CACHE"


def cache_root() -> Path:
    """`$SELFSPEC_CACHE`, or `~/.cache/selfspec`."""
    named = os.environ.get(CACHE_VARIABLE)
    return Path(named).expanduser().absolute() if named else Path.home() / ".cache" / "selfspec"
