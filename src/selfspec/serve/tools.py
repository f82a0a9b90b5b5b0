"""Tools of a chat: what a request says of them, what the template is told, calls in an answer.

Models write calls in a few ways: Hermes and Qwen `<tool_call>{...}</tool_call>`, Mistral
`[TOOL_CALLS] [{...}]`, Llama 3 and others a bare JSON object. `format_of` tells by the template
which one is asked for, and `Calls` reads all of them, so that a model that mixes them up is
understood too. Where a call is required, a grammar forces one in the model's own way.

Pure functions: knows no model, no HTTP and no engine.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from ..core.door import shown
from ..core.grammar import Grammar
from ..errors import OptionError

Format = Literal["hermes", "mistral", "llama3", "json"]
_NAME = re.compile(r"[a-zA-Z0-9_-]{1,64}")
_HERMES = ("<tool_call>", "</tool_call>")
_MISTRAL, _PYTHON = "[TOOL_CALLS]", "<|python_tag|>"
_MARKERS = (_HERMES[0], _MISTRAL, _PYTHON)
_NOTHING: dict[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}


@dataclass(frozen=True)
class Tool:
    """A function that the model may ask for."""

    name: str
    entry: Mapping[str, Any]
    """As the request has it, which is what templates read."""

    @property
    def parameters(self) -> Mapping[str, Any]:
        """The schema of its arguments. Without one it has none."""
        found: Mapping[str, Any] | None = self.entry["function"].get("parameters")
        return _NOTHING if found is None else found


@dataclass(frozen=True)
class ToolUse:
    """The tools of a request, and whether one has to be called."""

    tools: Sequence[Tool] = ()
    choice: Literal["none", "auto", "required"] = "none"
    named: str | None = None
    """The one that has to be called."""
    parallel: bool = True
    """Whether there may be several calls."""

    @property
    def for_template(self) -> list[dict[str, Any]] | None:
        """What a chat template is given as `tools`."""
        return [dict(tool.entry) for tool in self.tools] if self.choice != "none" else None

    @property
    def forced(self) -> Sequence[Tool]:
        """Of which tools one has to be called; none: the answer is free."""
        if self.choice != "required":
            return ()
        return [tool for tool in self.tools if self.named in (None, tool.name)]


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


# ------------------------------------------------------------------------------ what a request says


def tool_use(tools: Any, choice: Any = None, parallel: bool | None = None) -> ToolUse:
    """The fields `tools`, `tool_choice` and `parallel_tool_calls` of a request. What is wrong with
    them is an OptionError that begins with the field's name."""
    found = _tools(tools)
    names = [tool.name for tool in found]
    if choice is None:
        choice = "auto" if found else "none"
    several = parallel is not False
    if choice in ("none", "auto", "required"):
        if choice == "required" and not found:
            raise OptionError("tool_choice is 'required', but tools names none; give some")
        return ToolUse(found, choice if found else "none", None, several)
    name = _named(choice)
    if name is None:
        raise OptionError(
            f"tool_choice: {shown(choice)} is none of 'none', 'auto', 'required' and "
            "{'type': 'function', 'function': {'name': ...}}; use one of them"
        )
    if name not in names:
        known = ", ".join(names) or "none"
        raise OptionError(f"tool_choice names {name!r}, but tools has {known}; name one of these")
    return ToolUse(found, "required", name, False)


def _named(choice: Any) -> str | None:
    function = choice.get("function") if isinstance(choice, Mapping) else None
    name = function.get("name") if isinstance(function, Mapping) else None
    return name if isinstance(name, str) and choice.get("type") == "function" else None


def _tools(tools: Any) -> list[Tool]:
    if tools is None:
        return []
    if not isinstance(tools, list):
        raise OptionError(f"tools: {shown(tools)} is no list; give a list of functions")
    found: dict[str, Tool] = {}
    for number, entry in enumerate(tools):
        place = f"tools[{number}]"
        function = entry.get("function") if isinstance(entry, Mapping) else None
        if not isinstance(function, Mapping) or entry.get("type") != "function":
            raise OptionError(
                f"{place}: {shown(entry)} is no function; give {{'type': 'function', 'function': "
                "{'name': ..., 'parameters': {...}}}"
            )
        name, schema = function.get("name"), function.get("parameters")
        if not isinstance(name, str) or not _NAME.fullmatch(name):
            raise OptionError(
                f"{place}.function.name: {shown(name)} is no name; use up to 64 letters, digits, _ "
                "and -"
            )
        if schema is not None and not isinstance(schema, Mapping):
            raise OptionError(
                f"{place}.function.parameters: {shown(schema)} is no JSON schema; give an object"
            )
        if name in found:
            raise OptionError(f"{place}.function.name: {name!r} comes twice; name each once")
        found[name] = Tool(name, entry)
    return list(found.values())


def for_template(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Messages as templates read them: the arguments of earlier calls as objects, which a client
    sends as text, and text where a message is a call alone."""
    written = []
    for message in messages:
        turn = dict(message)
        if calls := turn.get("tool_calls"):
            turn["tool_calls"] = [_with_object(call) for call in calls]
            if turn.get("content") is None:
                turn["content"] = ""
        written.append(turn)
    return written


def _with_object(call: Mapping[str, Any]) -> dict[str, Any]:
    function = call.get("function")
    arguments = function.get("arguments") if isinstance(function, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(arguments, str):
        return dict(call)
    try:
        arguments = json.loads(arguments or "{}")
    except ValueError:  # a model's own mistake, which it may see again as it wrote it
        return dict(call)
    return {**call, "function": {**function, "arguments": arguments}}


# ---------------------------------------------------------------------------------- calls by force


def grammar_of_format(value: Any) -> Grammar | None:
    """The field `response_format` of a request. What is wrong with it is an OptionError that begins
    with the field's name; what is wrong with a schema says the grammar's reader."""
    kind = value.get("type") if isinstance(value, Mapping) else None
    if value is None or kind == "text":
        return None
    if kind == "json_object":
        return Grammar.json()
    if kind != "json_schema":
        raise OptionError(
            f"response_format: {shown(value)} has no type that is known here; use 'text', "
            "'json_object' or 'json_schema'"
        )
    held = value.get("json_schema")
    schema = held.get("schema") if isinstance(held, Mapping) else None
    if not isinstance(schema, Mapping):
        raise OptionError(
            f"response_format.json_schema: {shown(held)} has no schema; give {{'name': ..., "
            "'schema': {...}}"
        )
    return Grammar.json_schema(schema)


def format_of(template: str | None) -> Format:
    """How a model with this chat template writes calls."""
    text = template or ""
    if _HERMES[0] in text:
        return "hermes"
    if _MISTRAL in text:
        return "mistral"
    return "llama3" if _PYTHON in text or '"parameters": dictionary' in text else "json"


def grammar_of(use: ToolUse, form: Format) -> Grammar | None:
    """What forces a valid call, in the model's own way of writing. None: the answer is free.

    Special tokens that go before calls (Mistral's, Llama's) are left out: they say that a call
    comes, which is certain here, and they are no part of the text.
    """
    if not use.forced:
        return None
    schema = _schema(use.forced, "parameters" if form == "llama3" else "arguments")
    if form == "mistral":
        more = {} if use.parallel else {"maxItems": 1}
        definitions = schema.pop("$defs")
        schema = {"type": "array", "items": schema, "minItems": 1, **more, "$defs": definitions}
    if form != "hermes":
        return Grammar.json_schema({**schema, "x-guidance": {"whitespace_flexible": False}})
    several = '("\\n" one)*' if use.parallel else ""
    tight = {**schema, "x-guidance": {"whitespace_flexible": False}}
    begin, end = (json.dumps(text) for text in (_HERMES[0] + "\n", "\n" + _HERMES[1]))
    return Grammar.lark(
        f"start: one {several}\none: {begin} call {end}\ncall: %json {json.dumps(tight)}"
    )


def _schema(tools: Sequence[Tool], key: str) -> dict[str, Any]:
    """The schema of a call of one of these tools."""
    calls = [
        {
            "type": "object",
            "properties": {"name": {"const": tool.name}, key: {"$ref": f"#/$defs/{tool.name}"}},
            "required": ["name", key],
            "additionalProperties": False,
        }
        for tool in tools
    ]
    homes = {tool.name: _moved(tool.parameters, f"#/$defs/{tool.name}") for tool in tools}
    return {"anyOf": calls, "$defs": homes}


def _moved(schema: Any, home: str) -> Any:
    """A schema inside another one: what it refers to lies below `home` now."""
    if isinstance(schema, list):
        return [_moved(each, home) for each in schema]
    if not isinstance(schema, Mapping):
        return schema
    moved = {key: _moved(value, home) for key, value in schema.items()}
    target = schema.get("$ref")
    if isinstance(target, str) and target.startswith("#"):
        moved["$ref"] = home + target[1:]
    return moved


# ------------------------------------------------------------------------------ calls in an answer


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
                self._open = self._open.lstrip()
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
        if marker == _HERMES[0]:
            rest = text[end:].lstrip()
            if not last and len(rest) < len(_HERMES[1]) and _HERMES[1].startswith(rest):
                return None
            if rest.startswith(_HERMES[1]):
                end = len(text) - len(rest) + len(_HERMES[1])
        room = None if self._several else max(0, 1 - len(self.calls))
        self.calls += found[:room]
        return end + (text.startswith(";", end) if marker != _HERMES[0] else 0)


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
