"""The door: what users pass, turned into the few types that are used inside.

What has one natural meaning is taken: whole numbers of any library, and numpy arrays or torch
tensors of one dimension as lists of them. All else is an error, never a default. Knows no models.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping, Sequence
from numbers import Integral, Real
from typing import Any

from ..errors import BrokenCheckpoint, OptionError, PromptError, SelfspecError

Prompt = str | list[int]
THREADS = 4 * (os.cpu_count() or 1)  # our kernels' threads wait for each other at every step
_NOT_ONE_ROW = "a table of ids has no lengths of its own; pass a list with the ids of each prompt"


def shown(value: object) -> str:
    """A value in an error: enough of it to be found again."""
    try:
        text = repr(value)
    except Exception as error:  # noqa: BLE001  (an object of somebody else's)
        text = f"<{type(value).__name__} without a repr: {type(error).__name__}>"
    text = text.encode("utf-8", "backslashreplace").decode()
    return text if len(text) <= 80 else f"{text[:40]}...{text[-24:]} ({type(value).__name__})"


def is_whole(value: object) -> bool:
    """Whether it is a whole number. True and False are none."""
    return isinstance(value, Integral) and not isinstance(value, bool)


def is_finite(value: Any) -> bool:
    """Whether it is a number that can be counted with."""
    if isinstance(value, bool):
        return False
    return isinstance(value, Real) and math.isfinite(value)


def whole(name: str, value: Any, least: int, remedy: str, most: int | None = None) -> int:
    """A count."""
    if is_whole(value) and value >= least and (most is None or value <= most):
        return int(value)
    limits = f"from {least} up" if most is None else f"from {least} to {most}"
    raise OptionError(f"{name}={shown(value)} is not a whole number {limits}; {remedy}")


def minutes(name: str, value: Any) -> float | None:
    """A limit of time, None for none."""
    if value is None or (is_finite(value) and value >= 0):
        return None if value is None else float(value)
    raise OptionError(f"{name}={shown(value)} is no time to work in; use a number from 0 up")


def word(name: str, value: Any) -> str:
    """One of some words, which are compared later."""
    if not isinstance(value, str):
        raise OptionError(f"{name}={shown(value)} is no text, as its values are; use one of them")
    return value


def switch(name: str, value: Any) -> bool:
    """True or False. Text such as "no" would count as true."""
    if not isinstance(value, bool):
        raise OptionError(f"{name}={shown(value)} is neither True nor False; use one of them")
    return value


def text(value: str, what: str, error: type[SelfspecError] = PromptError) -> str:
    """Text that can be written down in UTF-8."""
    try:
        value.encode()
    except UnicodeEncodeError as broken:
        raise error(
            f"{what} holds {value[broken.start]!r} at character {broken.start}, half of a pair or "
            "a byte that was not UTF-8, which no tokenizer can read; take it out"
        ) from broken
    return str(value)


def prompts(value: Any) -> tuple[list[Prompt], bool]:
    """Prompts, and whether it was one alone rather than a list."""
    value = _as_list(value, "the prompt")
    if isinstance(value, str) or (_is_list(value) and value and is_whole(value[0])):
        return [prompt(value)], True
    if not _is_list(value):
        raise PromptError(
            f"a prompt is text or a list of token ids, not {_kind(value)}; several prompts are a "
            "list of them"
        )
    if not len(value):
        raise PromptError("the list of prompts is empty; give at least one prompt")
    return [prompt(each, f"prompt {number}") for number, each in enumerate(value)], False


def prompt(value: Any, what: str = "the prompt") -> Prompt:
    """One prompt: text, or token ids."""
    value = _as_list(value, what)
    if isinstance(value, str):
        return text(value, what)
    if not _is_list(value):
        raise PromptError(f"{what} is {_kind(value)}, neither text nor token ids")
    return _ids(value, what, PromptError)


def ends(value: Any, vocabulary: int) -> frozenset[int] | None:
    """Ids to stop at. None: the model's own."""
    if value is None:
        return None
    value = _as_list(value, "eos", OptionError)
    ids = _ids([value] if is_whole(value) else value, "eos", OptionError)
    for token in ids:
        if not 0 <= token < vocabulary:
            raise OptionError(
                f"eos names token {token}, which cannot occur in a vocabulary of {vocabulary}, so "
                "nothing would stop there; leave it out"
            )
    return frozenset(ids)


def own_ends(generation_config: Any, tokenizer: Any) -> frozenset[int]:
    """Ids to stop at that the model's files name, the tokenizer's if its config names none."""
    value = getattr(generation_config, "eos_token_id", None)
    if value is None and tokenizer is not None:
        value = tokenizer.eos_token_id
    tokens = value if isinstance(value, list | tuple) else [] if value is None else [value]
    if not all(map(is_whole, tokens)):
        raise BrokenCheckpoint(
            f"the model's generation config names eos_token_id={shown(value)}, which is no token "
            "id, so answers would not end; correct it"
        )
    return frozenset(tokens)


def stops(value: Any) -> list[str]:
    """Strings to stop before."""
    if value is None:
        return []
    strings = [value] if isinstance(value, str) else value
    if not _is_list(strings) or not all(isinstance(each, str) and each for each in strings):
        raise OptionError(
            f"stop={shown(value)} is no text to stop before; use a string that is not empty, a "
            "list of them, or None (eos= takes token ids)"
        )
    return [text(each, f"stop string {shown(each)}", OptionError) for each in strings]


def options(name: str, value: Any) -> dict[str, Any]:
    """Named options."""
    if value is None:
        return {}
    if not isinstance(value, Mapping) or not all(isinstance(key, str) for key in value):
        raise OptionError(f"{name}={shown(value)} is no mapping of names to values; use {{}}")
    return dict(value)


def callables(name: str, value: Any) -> Sequence[Callable[..., Any]]:
    """Functions of the user's."""
    if not _is_list(value) or not all(callable(each) for each in value):
        raise OptionError(
            f"{name}={shown(value)} is no list of functions to call; put it into a list, or leave "
            "it out"
        )
    return list(value)


_SENSES = ("image", "video", "audio")  # in the type of a part that is no text


def messages(
    value: Any,
    what: str = "the conversation",
    error: type[SelfspecError] = PromptError,
    parts: bool = True,
) -> list[dict[str, Any]]:
    """A conversation for a chat template. `parts`: whether contents may be lists of parts, or
    calls of tools instead."""
    if not _is_list(value) or not len(value):
        raise error(
            f"{what} is {shown(value)}, which has no messages; give a list such as "
            "[{'role': 'user', 'content': 'Hello'}]"
        )
    for number, message in enumerate(value):
        place = f"{what}, message {number}"
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise error(
                f"{place}: {shown(message)} has no 'role'; give {{'role': ..., 'content': ...}}"
            )
        content = message.get("content")
        other = parts and (isinstance(content, list | tuple) or message.get("tool_calls"))
        if not isinstance(content, str) and not other:
            raise error(
                f"{place}: content={shown(content)} is no text, so the template would write "
                "something else; give text"
            )
        for part in content if isinstance(content, list | tuple) else ():
            kind = part.get("type") if isinstance(part, Mapping) else None
            if any(sense in str(kind) for sense in _SENSES):
                raise error(
                    f"{place} holds a part of type {shown(kind)}, and only text is read here, so "
                    "it would not be seen; leave it out, or use transformers for this message"
                )
        for held in (message["role"], content):
            if isinstance(held, str):
                text(held, place, error)
    return [dict(message) for message in value]


def _ids(value: Any, what: str, error: type[SelfspecError]) -> list[int]:
    """Token ids, each a whole number."""
    for place, each in enumerate(_list_of_ids(value, what, error)):
        if not is_whole(each):
            raise error(
                f"{what} holds {shown(each)} at place {place}, which is no token id; ids are whole "
                "numbers, and text is not mixed with them"
            )
    return [int(each) for each in value]


def _list_of_ids(value: Any, what: str, error: type[SelfspecError]) -> Sequence[Any]:
    if isinstance(value, Sequence) and _is_list(value):
        return value
    raise error(f"{what} is {_kind(value)}, no list of token ids; give a list of whole numbers")


def _as_list(value: Any, what: str, error: type[SelfspecError] = PromptError) -> Any:
    """An array or a tensor as a list of Python's numbers; everything else as it is."""
    known = isinstance(value, str | memoryview) or is_whole(value)
    if known or not (hasattr(value, "tolist") and hasattr(value, "ndim")):
        return value
    if value.ndim != 1:
        raise error(f"{what} is {_kind(value)} of {value.ndim} dimensions: {_NOT_ONE_ROW}")
    try:
        numbers = value.tolist()
    except (NotImplementedError, RuntimeError) as broken:  # a tensor without data
        raise error(f"{what} is {_kind(value)} without numbers in it ({broken})") from broken
    if not all(map(is_whole, numbers)):
        raise error(f"{what} is {_kind(value)} of {value.dtype}, and token ids are whole numbers")
    return numbers


def _is_list(value: object) -> bool:
    text_or_bytes = str | bytes | bytearray | memoryview
    return isinstance(value, Sequence) and not isinstance(value, text_or_bytes)


def _kind(value: object) -> str:
    """What kind of thing it is, with what to do where that is known."""
    if isinstance(value, bytes | bytearray | memoryview):
        return f"{type(value).__name__}, which could be text or ids (decode it, or list() it)"
    if isinstance(value, Mapping):
        return f"a {type(value).__name__} (of a tokenizer, pass its ['input_ids'])"
    return f"{shown(value)} ({type(value).__name__})"
