"""Memo: a value that keeps what others make of it, so that it is made once and lives as long.

Does not know what is kept, nor by whom.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Any, TypeVar

Made = TypeVar("Made")


@dataclass(frozen=True, eq=False)
class Memo:
    """Base of frozen dataclasses. A copy by `replace` starts with nothing kept."""

    _kept: dict[Hashable, Any] = field(default_factory=dict, init=False, compare=False, repr=False)

    def once(self, name: Hashable, make: Callable[[], Made]) -> Made:
        """What `make` gives, made at the first call of this name. Two threads that both come first
        get the same one: addresses are taken of what is kept."""
        made: Made | None = self._kept.get(name)
        return self._kept.setdefault(name, make()) if made is None else made
