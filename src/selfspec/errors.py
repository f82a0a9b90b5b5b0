"""Every error a user can meet. A message names value, limit, consequence and remedy."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class SelfspecError(Exception):
    """Base of everything selfspec raises on purpose."""

    def __str__(self) -> str:
        """The message, which can be printed whatever a user passed."""
        return super().__str__().encode("utf-8", "backslashreplace").decode()


class OptionError(SelfspecError, ValueError):
    """A value or an option's name is wrong. Also a ValueError."""


class PromptError(SelfspecError, ValueError):
    """The prompt is empty or does not fit into the context. Also a ValueError."""


class ModelError(SelfspecError):
    """Something about the model that was asked for."""


class UnsupportedModel(ModelError):
    """A family or kind of model that selfspec cannot run."""

    reason = ""
    """In a few words, where a message quotes it."""


class BrokenCheckpoint(ModelError):
    """Truncated, corrupt or incomplete model files."""


class SelfCheckFailed(ModelError):
    """Our forward disagrees with the model's own forward on a probe prompt."""


class ResourceError(SelfspecError):
    """Too little memory or disk; the message says how much is needed."""


class DataError(SelfspecError):
    """Rows of text that cannot be read, or lack what is needed."""


class TrainingError(SelfspecError):
    """Training cannot start or go on: its data, its loss, or another run's checkpoint."""


class Unavailable(SelfspecError):
    """No network and nothing cached, or an optional package is missing; the message says which."""


class Busy(SelfspecError):
    """An object is already in use by another call."""


def nearest(name: object, known: Iterable[str]) -> str:
    """The tail of an error about an unknown name: the nearest known one, or all of them."""
    names = sorted(known)
    close = difflib.get_close_matches(name, names, n=1) if isinstance(name, str) else []
    return f"did you mean {close[0]!r}?" if close else f"known: {', '.join(names)}."
