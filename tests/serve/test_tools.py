"""Tools: what requests say of them, calls in answers however they are cut into pieces, and calls by
force."""

from __future__ import annotations

import itertools
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from selfspec import Grammar, OptionError
from selfspec.core.grammar import Allowed, Grammars
from selfspec.serve.calls import Calls, Read, ToolCall
from selfspec.serve.tools import (
    Format,
    ToolUse,
    for_template,
    format_of,
    grammar_of,
    grammar_of_format,
    tool_use,
)
from selfspec.testing import CHAT_TEMPLATE, VOCABULARY, tiny_llm, tiny_tokenizer

WEATHER: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather of a place.",
        "parameters": {
            "type": "object",
            "properties": {"place": {"$ref": "#/$defs/place"}},
            "required": ["place"],
            "additionalProperties": False,
            "$defs": {"place": {"type": "string", "enum": ["Rome", "Oslo"]}},
        },
    },
}
CLOCK = {"type": "function", "function": {"name": "clock"}}
BOTH = [WEATHER, CLOCK]
ROME = ToolCall("weather", '{"place": "Rome"}')
NOW = ToolCall("clock", "{}")
A, B = '{"name": "weather", "arguments": {"place": "Rome"}}', '{"name": "clock", "arguments": {}}'


def read(text: str, cuts: list[int], use: ToolUse | None = None) -> Read:
    """All that came of a text which was pushed in pieces."""
    calls = Calls(use or tool_use(BOTH))
    places = sorted({0, len(text), *(cut % (len(text) + 1) for cut in cuts)})
    parts = [calls.push(text[a:b]) for a, b in itertools.pairwise(places)]
    parts.append(calls.finish())
    found = [call for part in parts for call in part.calls]
    assert found == calls.calls
    return Read("".join(part.content for part in parts), found)


ANSWERS: dict[str, tuple[str, str, list[ToolCall]]] = {
    "hermes": (f"<tool_call>\n{A}\n</tool_call>", "", [ROME]),
    "hermes-two": (
        f"I look.\n<tool_call>\n{A}\n</tool_call>\n<tool_call>\n{B}\n</tool_call>",
        "I look.\n",
        [ROME, NOW],
    ),
    "hermes-open": (f"<tool_call>{A}", "", [ROME]),
    "mistral": (f"[TOOL_CALLS] [{A}, {B}]", "", [ROME, NOW]),
    "mistral-bare": (f" [{A}]", "", [ROME]),
    "llama3": ('{"name": "weather", "parameters": {"place": "Rome"}}', "", [ROME]),
    "llama3-two": (f"<|python_tag|>{A}; {B}", "", [ROME, NOW]),
    "text-arguments": ('{"name": "clock", "arguments": "{}"}', "", [NOW]),
    "quoted-braces": (
        '{"name": "weather", "arguments": {"place": "\\"}{"}}',
        "",
        [ToolCall("weather", '{"place": "\\"}{"}')],
    ),
    "words": ("It is <b>warm</b> <tool", "It is <b>warm</b> <tool", []),
    "json": ('{"name": "Ada", "age": 3}', '{"name": "Ada", "age": 3}', []),
    "unknown": ('{"name": "rm", "arguments": {}}', '{"name": "rm", "arguments": {}}', []),
    "broken": ("<tool_call>\n{broken}\n</tool_call>", "<tool_call>\n{broken}\n</tool_call>", []),
    "cut-off": ('<tool_call>\n{"name": "wea', '<tool_call>\n{"name": "wea', []),
    "later": (f"Say {A}", f"Say {A}", []),
    "spaces": ("  \n ", "  \n ", []),
    "list": ("[1, 2] are numbers", "[1, 2] are numbers", []),
}


@pytest.mark.parametrize("name", ANSWERS)
@given(cuts=st.lists(st.integers(0, 200), max_size=12))
def test_calls_are_read_however_the_answer_is_cut(name: str, cuts: list[int]) -> None:
    """A marker or an object that two pieces share: half of it is shown as words, or a call is
    lost. Words that only look like a call have to come out whole."""
    text, words, calls = ANSWERS[name]
    assert read(text, cuts) == Read(words, calls)
    assert read(text, list(range(len(text)))) == Read(words, calls)


def test_words_do_not_wait() -> None:
    """A reader that holds all text back until the end streams nothing."""
    calls = Calls(tool_use(BOTH))
    assert calls.push("It is warm").content == "It is warm"
    assert calls.push(" <tool_").content == " "
    assert calls.push("box>").content == "<tool_box>"


def test_without_tools_nothing_is_a_call() -> None:
    """tool_choice none, or no tools at all: the answer is what the model wrote."""
    for use in (tool_use(None), tool_use(BOTH, "none")):
        assert read(ANSWERS["hermes"][0], [4, 9], use) == Read(ANSWERS["hermes"][0], [])
        assert use.for_template is None


def test_parallel_calls_may_be_forbidden() -> None:
    """parallel_tool_calls=false: a client that expects one call gets one."""
    use = tool_use(BOTH, "auto", False)
    assert read(ANSWERS["hermes-two"][0], [], use).calls == [ROME]
    assert read(ANSWERS["mistral"][0], [5], use).calls == [ROME]


WRONG: dict[str, tuple[Any, Any, str]] = {
    "no list": ({}, None, r"tools: \{\} is no list"),
    "no function": ([{"type": "retrieval"}], None, r"tools\[0\]: .* is no function"),
    "bad name": (
        [{"type": "function", "function": {"name": "a b"}}], None, r"tools\[0\].function.name"
    ),
    "bad schema": (
        [{"type": "function", "function": {"name": "a", "parameters": 3}}],
        None,
        r"tools\[0\].function.parameters: 3",
    ),
    "twice": ([CLOCK, CLOCK], None, r"tools\[1\].function.name: 'clock' comes twice"),
    "required without": (None, "required", "tool_choice is 'required'"),
    "unknown word": (BOTH, "always", "tool_choice: 'always'"),
    "unknown tool": (
        BOTH, {"type": "function", "function": {"name": "x"}}, "tool_choice names 'x'.*weather"
    ),
    "half a choice": (BOTH, {"type": "function"}, "tool_choice"),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_what_is_wrong_is_named(name: str) -> None:
    """A request with mistakes answered by a 500, or taken as if the field were not there."""
    tools, choice, words = WRONG[name]
    with pytest.raises(OptionError, match=words):
        tool_use(tools, choice)


def test_templates_read_arguments_as_objects() -> None:
    """A template writes the text of arguments as JSON again, with quotes within quotes."""
    call = {"id": "1", "type": "function", "function": {"name": "clock", "arguments": '{"a": 1}'}}
    broken = {**call, "function": {"name": "clock", "arguments": '{"a": '}}
    turn = {"role": "assistant", "content": None, "tool_calls": [call, broken]}
    told = for_template([{"role": "user", "content": "Hi"}, turn])
    assert told[0] == {"role": "user", "content": "Hi"}
    assert told[1]["content"] == ""
    assert [each["function"]["arguments"] for each in told[1]["tool_calls"]] == [{"a": 1}, '{"a": ']
    assert turn["content"] is None and call["function"]["arguments"] == '{"a": 1}', "not changed"


def test_the_template_is_told_of_the_tools() -> None:
    """tools that are read from the request and never reach the model."""
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = "{% if tools %}{{ tools | tojson }}{% endif %}" + CHAT_TEMPLATE
    llm = tiny_llm()
    llm.tokenizer = tokenizer
    turn = [{"role": "user", "content": "Hi"}]
    told, free = (
        tokenizer.decode(llm.encode_chat(turn, tools=tool_use(BOTH, choice).for_template))
        for choice in ("auto", "none")
    )
    assert '"name": "weather"' in told and told.endswith(free)
    assert free == tokenizer.decode(llm.encode_chat(turn))


def test_the_template_tells_the_format() -> None:
    """A call forced in another model's way of writing."""
    templates = {
        "hermes": "... <tool_call> ...",
        "mistral": "[AVAILABLE_TOOLS] ... [TOOL_CALLS]",
        "llama3": '{"name": function name, "parameters": dictionary of argument ...}',
        "json": "{{ messages }}",
    }
    assert {form: format_of(text) for form, text in templates.items()} == {
        form: form for form in templates
    }
    assert format_of(None) == "json"


GOOD: dict[Format, str] = {
    "hermes": '<tool_call>\n{"name":"weather","arguments":{"place":"Rome"}}\n</tool_call>',
    "mistral": '[{"name":"weather","arguments":{"place":"Rome"}}]',
    "llama3": '{"name":"weather","parameters":{"place":"Rome"}}',
    "json": '{"name":"weather","arguments":{"place":"Rome"}}',
}


def allowed(grammar: Grammar) -> Allowed:
    found = Grammars(tiny_tokenizer(), VOCABULARY).allowed(grammar, frozenset([2]))
    assert found is not None
    return found


def fits(grammar: Grammar, text: str) -> bool:
    """Whether a grammar takes a whole text."""
    tokens, rules = tiny_tokenizer()(text)["input_ids"], allowed(grammar)
    steps = [*tokens, 2]
    return all(rules.follows(steps[:place], token) for place, token in enumerate(steps))


@pytest.mark.parametrize("form", GOOD)
def test_a_required_call_is_forced_and_read_again(form: Format) -> None:
    """A grammar that lets words through, another tool, arguments that do not fit the schema (which
    refers to itself), or that forces what our own reader does not take for a call."""
    grammar = grammar_of(tool_use(BOTH, "required"), form)
    assert grammar is not None
    assert fits(grammar, GOOD[form])
    assert read(GOOD[form], []) == Read("", [ROME])
    for wrong in ("Rome", GOOD[form].replace("Rome", "Paris"), GOOD[form].replace("weather", "x")):
        assert not fits(grammar, wrong)
    named = grammar_of(tool_use(BOTH, CLOCK | {"function": {"name": "clock"}}), form)
    assert named is not None
    assert not fits(named, GOOD[form])
    assert fits(named, GOOD[form].replace("weather", "clock").replace('{"place":"Rome"}', "{}"))


def test_a_free_answer_has_no_grammar() -> None:
    """auto and none: the model decides whether it calls."""
    assert grammar_of(tool_use(BOTH, "auto"), "hermes") is None
    assert grammar_of(tool_use(BOTH, "none"), "json") is None


def test_calls_for_a_client() -> None:
    """The object of OpenAI's SDK: arguments are text, and chunks of a stream have an index."""
    told = ROME.as_dict("call_1", 0)
    assert told == {
        "index": 0,
        "id": "call_1",
        "type": "function",
        "function": {"name": "weather", "arguments": '{"place": "Rome"}'},
    }
    assert json.loads(ROME.as_dict("x")["function"]["arguments"]) == {"place": "Rome"}


def test_response_formats_become_grammars() -> None:
    """A schema that is read and forgotten, or the name of a format that is taken for free text."""
    schema = {"type": "object"}
    held = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema, "strict": True}}
    assert grammar_of_format(held) == Grammar.json_schema(schema)
    assert grammar_of_format({"type": "json_object"}) == Grammar.json()
    assert grammar_of_format({"type": "text"}) is grammar_of_format(None) is None
    for wrong in ({"type": "xml"}, "json", {"type": "json_schema"}, {**held, "json_schema": 3}):
        with pytest.raises(OptionError, match=r"^response_format"):
            grammar_of_format(wrong)
