"""Options by name: a frozen dataclass from a mapping, where an unknown name is an error that says the nearest known one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any, TypeVar

from .errors import OptionError, nearest

T = TypeVar("T")


def with_options(kind: type[T], options: Mapping[str, Any], what: str) -> T:
    """`kind(**options)`, with an error about `what` if an option does not exist."""
    known = [field.name for field in fields(kind)]  # type: ignore[arg-type]
    for name in options:
        if name not in known:
            raise OptionError(f"{what} has no option {name!r}; {nearest(name, known) if known else 'it has none'}")
    return kind(**options)
