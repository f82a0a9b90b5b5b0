"""Where selfspec keeps what it makes: the demo model, converted files, compiled kernels."""

from __future__ import annotations

import os
from pathlib import Path

from ..errors import ResourceError

CACHE_VARIABLE = "SELFSPEC_CACHE"


def cache_root() -> Path:
    """`$SELFSPEC_CACHE`, or `~/.cache/selfspec`."""
    named = os.environ.get(CACHE_VARIABLE)
    try:
        return Path(named).expanduser().absolute() if named else Path.home() / ".cache" / "selfspec"
    except RuntimeError as error:  # nobody's home is known
        raise ResourceError(
            f"there is no home folder to keep selfspec's cache in ({error}); name a folder in "
            f"${CACHE_VARIABLE}"
        ) from error
