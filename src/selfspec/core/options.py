"""Options by name: a frozen dataclass from a mapping. And numbers from text.

An unknown name is an error that says the nearest known one. So is a value of the wrong kind, which
would otherwise fail in the middle of a generation.
"""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Mapping
from dataclasses import MISSING, fields
from typing import Any, TypeVar

from ..errors import OptionError, nearest
from .door import is_finite, is_whole, shown
from .json_text import from_json

T = TypeVar("T")

MOST_NUMBERS = 100_000
MAX_NEW_TOKENS = 256  # of a generation, for `LLM` and the command line


def with_options(kind: type[T], options: Mapping[str, Any], what: str) -> T:
    """`kind(**options)`. An option that does not exist, or a value it cannot have, is an error."""
    declared = fields(kind)  # type: ignore[arg-type]
    annotations = {field.name: annotation_of(field.type) for field in declared}
    for name in options:
        if name not in annotations:
            hint = nearest(name, annotations) if annotations else "it has none"
            raise OptionError(f"{what} has no option {name!r}; {hint}")
    for each in fields(kind):  # type: ignore[arg-type]
        if each.default is MISSING and each.default_factory is MISSING and each.name not in options:
            raise OptionError(f"{what} needs {each.name}={annotations[each.name]}; give it")
    return kind(**{key: _checked(key, v, annotations[key], what) for key, v in options.items()})


def numbers(text: str, option: str) -> tuple[int, ...]:
    """'64,512' or '1-16' as numbers."""
    try:
        parts = [part.split("-") for part in text.split(",")]
        ranges = [range(int(part[0]), int(part[-1]) + 1) for part in parts]
    except ValueError as error:
        raise OptionError(
            f"{option}={text!r} is not a list of whole numbers such as 64,512 or 1-16."
        ) from error
    if sum(map(len, ranges)) > MOST_NUMBERS:
        raise OptionError(
            f"{option}={text!r} is more than {MOST_NUMBERS:,} numbers, which nothing here can use; "
            "name fewer"
        )
    return tuple(itertools.chain(*ranges))


def value_of(text: str) -> Any:
    """What was typed for an option: JSON (numbers, true, lists), else text."""
    try:
        return from_json(text)
    except ValueError:
        return text


def annotation_of(annotation: object) -> str:
    """A field's annotation as it is written."""
    return annotation if isinstance(annotation, str) else inspect.formatannotation(annotation)


def _checked(name: str, value: Any, annotation: str, what: str) -> Any:
    """The value, a list as a tuple. Kinds that are not in the table are left to the class."""
    simple = annotation.removesuffix(" | None")
    if simple not in KINDS or (value is None and simple != annotation):
        return value
    fits, words = KINDS[simple]
    if not fits(value):
        raise OptionError(f"{what}: {name}={shown(value)} is not {words}, as it has to be")
    return tuple(value) if isinstance(value, list) else value


KINDS: Mapping[str, tuple[Callable[[Any], bool], str]] = {
    "bool": (lambda value: isinstance(value, bool), "true or false"),
    "int": (is_whole, "a whole number"),
    "float": (is_finite, "a finite number"),
    "str": (lambda value: isinstance(value, str), "text"),
    "tuple[int, ...]": (
        lambda value: isinstance(value, list | tuple) and all(map(is_whole, value)),
        "a list of whole numbers such as [3, 4]",
    ),
}
