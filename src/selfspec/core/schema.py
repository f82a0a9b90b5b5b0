"""Values of a JSON file as what annotations say they are: dataclasses, alone or inside others.

A dataclass is the schema of its file. It is checked once, when the file is read, and its own
`__post_init__` may check more. A tuple of one annotation is a list of any length.
"""

from __future__ import annotations

import functools
import math
from dataclasses import MISSING, fields, is_dataclass
from types import NoneType
from typing import Any, Literal, TypeVar, get_args, get_origin, get_type_hints

T = TypeVar("T")
_WORDS = {int: "a whole number", float: "a finite number", str: "text", bool: "true or false"}


class Unfit(ValueError):
    """A value is not what its annotation says."""


def made(kind: type[T], value: Any, where: str = "it") -> T:
    """The value as that kind. `where` names it in an error."""
    result: T = _made(kind, value, where)
    return result


def _made(kind: Any, value: Any, where: str) -> Any:
    origin, inside = get_origin(kind), get_args(kind)
    if kind is Any:
        return value
    if is_dataclass(kind):
        return _dataclass(kind, value, where)
    if kind in _WORDS:
        return _simple(kind, value, where)
    if origin is Literal:
        if value not in inside:
            raise Unfit(f"{where} is {value!r}, not one of {', '.join(map(repr, inside))}")
        return value
    if origin is dict:
        if not isinstance(value, dict):
            raise Unfit(f"{where} is {_short(value)}, not an object")
        return {name: _made(inside[1], each, f"{where}.{name}") for name, each in value.items()}
    if origin in (list, tuple):
        if not isinstance(value, list | tuple):
            raise Unfit(f"{where} is {_short(value)}, not a list")
        return origin(_made(inside[0], each, f"{where}[{at}]") for at, each in enumerate(value))
    return _one_of(inside, value, where)


def _one_of(kinds: tuple[Any, ...], value: Any, where: str) -> Any:
    """A union: None where it may be, else the first kind that fits."""
    if value is None and NoneType in kinds:
        return None
    wrong: Unfit | None = None
    for kind in kinds:
        if kind is not NoneType:
            try:
                return _made(kind, value, where)
            except Unfit as error:
                wrong = wrong or error
    raise wrong or Unfit(f"{where} is {_short(value)}, which nothing here can be")


def _simple(kind: Any, value: Any, where: str) -> Any:
    allowed = (int, float) if kind is float else kind
    fits = isinstance(value, allowed) and (kind is bool or not isinstance(value, bool))
    if not fits or (kind is float and not math.isfinite(value)):
        raise Unfit(f"{where} is {_short(value)}, not {_WORDS[kind]}")
    return value


def _dataclass(kind: Any, value: Any, where: str) -> Any:
    if not isinstance(value, dict):
        raise Unfit(f"{where} is {_short(value)}, not an object")
    hints = _hints(kind)
    if unknown := sorted(set(value) - set(hints)):
        raise Unfit(f"{where} has {unknown[0]!r}, which is not known here")
    lacking = [each for each in _required(kind) if each not in value]
    if lacking:
        raise Unfit(f"{where} lacks {lacking[0]!r}")
    return kind(**{name: _made(hints[name], value[name], f"{where}.{name}") for name in value})


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) < 60 else f"{text[:40]}... ({type(value).__name__})"


@functools.cache
def _hints(kind: Any) -> dict[str, Any]:
    return get_type_hints(kind)


@functools.cache
def _required(kind: Any) -> tuple[str, ...]:
    return tuple(
        each.name
        for each in fields(kind)
        if each.init and each.default is MISSING and each.default_factory is MISSING
    )
