"""Tools of a chat: what a request says of them, what the template is told, calls by force.

Models write calls in a few ways: Hermes and Qwen `<tool_call>{...}</tool_call>`, Mistral
`[TOOL_CALLS] [{...}]`, Llama 3 and others a bare JSON object. `format_of` tells by the template
which one is asked for; `calls.py` reads all of them. Where a call is required, a grammar forces one
in the model's own way.

Pure functions: knows no model, no HTTP and no engine.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from ..core.door import shown
from ..core.grammar import Grammar
from ..errors import OptionError

Format = Literal["hermes", "mistral", "llama3", "json"]
_NAME = re.compile(r"[a-zA-Z0-9_-]{1,64}")
HERMES = ("<tool_call>", "</tool_call>")
MISTRAL, PYTHON = "[TOOL_CALLS]", "<|python_tag|>"
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
    if HERMES[0] in text:
        return "hermes"
    if MISTRAL in text:
        return "mistral"
    return "llama3" if PYTHON in text or '"parameters": dictionary' in text else "json"


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
    begin, end = (json.dumps(text) for text in (HERMES[0] + "\n", "\n" + HERMES[1]))
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
