"""Calls in a model's answer, as the answer comes: Hermes and Qwen `<tool_call>{...}</tool_call>`,
Mistral `[TOOL_CALLS] [{...}]`, Llama 3 and others a bare JSON object. All are read whatever the
template asks for, so that a model that mixes them up is understood too.

Special tokens (Mistral's and Llama's markers) are mostly no part of the text, so an answer that
begins with an object or a list is looked at as well. Knows no model and no HTTP.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .tools import HERMES, MISTRAL, PYTHON, ToolUse

_MARKERS = (HERMES[0], MISTRAL, PYTHON)
_BETWEEN = " \t\r\n;"  # what stands between calls


@dataclass(frozen=True)
class ToolCall:
    """One call in an answer. `arguments` is JSON, as OpenAI has it."""

    name: str
    arguments: str

    def as_dict(self, identity: str, index: int | None = None) -> dict[str, Any]:
        """OpenAI's object. `index`: its number among the calls, in chunks of a stream."""
        call = {"name": self.name, "arguments": self.arguments}
        found: dict[str, Any] = {"id": identity, "type": "function", "function": call}
        return found if index is None else {"index": index, **found}


@dataclass(frozen=True)
class Read:
    """What some text makes certain: more of the answer's words, and calls that are complete."""

    content: str = ""
    calls: Sequence[ToolCall] = ()


class Calls:
    """Reads an answer piece by piece. What may become a call is held back until it is one, or is
    none and so part of the answer."""

    def __init__(self, use: ToolUse) -> None:
        self._names = {tool.name for tool in use.tools} if use.choice != "none" else set[str]()
        self._several = use.parallel
        self._open = ""  # text that has not been handed out
        self._begun = False  # whether words of the answer were
        self._called = False  # whether a call was the last thing read
        self.calls: list[ToolCall] = []

    def push(self, text: str) -> Read:
        """What this text makes certain."""
        self._open += text
        return self._read(last=False)

    def finish(self) -> Read:
        """The rest, when no text will follow."""
        return self._read(last=True)

    def _read(self, last: bool) -> Read:
        if not self._names:
            words, self._open = self._open, ""
            return Read(words)
        words, before = "", len(self.calls)
        while self._open:
            if self._called:  # what stands between calls
                self._open = self._open.lstrip(_BETWEEN)
            certain = self._plain(last)
            if certain:
                self._called = False
            words, self._open = words + self._open[:certain], self._open[certain:]
            self._begun = self._begun or bool(words.strip())
            length = self._call(last) if self._open else None
            if length is None:
                break
            self._called = length > 0
            if length == 0:  # it looked like a call and is none
                words, length, self._begun = words + self._open[0], 1, True
            self._open = self._open[length:]
        return Read(words, self.calls[before:])

    def _plain(self, last: bool) -> int:
        """How much of the open text comes before anything that may be a call."""
        first = self._open.lstrip()[:1]
        if not self._begun and first in ("{", "[", "") and (first or not last):
            return 0
        places = [at for at in map(self._open.find, _MARKERS) if at >= 0]
        if places:
            return min(places)
        return len(self._open) if last else len(self._open) - _beginning(self._open)

    def _call(self, last: bool) -> int | None:
        """The length of the call at the start of the open text, once it is whole. 0: it is none.
        None: nobody knows yet."""
        text = self._open
        lead = len(text) - len(text.lstrip())
        marker = next((each for each in _MARKERS if text.startswith(each, lead)), None)
        if marker is None and text[lead : lead + 1] not in ("{", "["):
            return None  # the beginning of a marker
        begin = lead + len(marker or "")
        value, end = _json_at(text, begin)
        if end is None:  # not whole, or no JSON at all
            return None if value is None and not last else 0
        found = list(_calls_in(value, self._names))
        if not found:
            return 0
        if marker == HERMES[0]:
            rest = text[end:].lstrip()
            if not last and len(rest) < len(HERMES[1]) and HERMES[1].startswith(rest):
                return None
            if rest.startswith(HERMES[1]):
                end = len(text) - len(rest) + len(HERMES[1])
        room = None if self._several else max(0, 1 - len(self.calls))
        self.calls += found[:room]
        return end


_BROKEN = object()


def _json_at(text: str, begin: int) -> tuple[Any, int | None]:
    """The JSON value that begins there, and where it ends. (None, None): it may still become one;
    (something, None): it is none."""
    start = begin + len(text[begin:]) - len(text[begin:].lstrip())
    if start == len(text):
        return None, None
    if text[start] not in "{[":
        return _BROKEN, None
    try:
        return json.JSONDecoder().raw_decode(text, start)
    except (json.JSONDecodeError, RecursionError):
        return (None if _unclosed(text, start) else _BROKEN), None


def _unclosed(text: str, start: int) -> bool:
    """Whether a bracket that opened there is still open, so that more text may mend it."""
    depth, quoted, escaped = 0, False, False
    for letter in text[start:]:
        if quoted:
            quoted = escaped or letter != '"'
            escaped = letter == "\\" and not escaped
        elif letter == '"':
            quoted = True
        else:
            depth += (letter in "{[") - (letter in "}]")
            if depth == 0:
                return False
    return True


def _calls_in(value: Any, names: set[str]) -> Iterator[ToolCall]:
    """The calls of an object, or of a list of such. One that names no tool of ours makes all of it
    words."""
    entries = value if isinstance(value, list) else [value]
    calls = [_call_of(entry) for entry in entries]
    if all(call is not None and call.name in names for call in calls):
        yield from (call for call in calls if call is not None)


def _call_of(entry: Any) -> ToolCall | None:
    name = entry.get("name") if isinstance(entry, Mapping) else None
    if not isinstance(name, str):
        return None
    arguments = entry.get("arguments", entry.get("parameters", {}))
    if isinstance(arguments, Mapping):
        return ToolCall(name, json.dumps(arguments, ensure_ascii=False))
    return ToolCall(name, arguments) if isinstance(arguments, str) else None


def _beginning(text: str) -> int:
    """How many of its last characters could be the beginning of a marker."""
    longest = max(map(len, _MARKERS)) - 1
    for size in range(min(longest, len(text)), 0, -1):
        if any(marker.startswith(text[-size:]) for marker in _MARKERS):
            return size
    return 0
