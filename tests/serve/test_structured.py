"""Answers with a shape over the wire: response_format and tools, through openai's client."""

from __future__ import annotations

import json
from typing import Any

import httpx
import jsonschema
import openai
import pytest

CHAT: Any = [{"role": "user", "content": "one two three"}]
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"kind": {"enum": ["first", "second"]}, "sure": {"type": "boolean"}},
    "required": ["kind", "sure"],
    "additionalProperties": False,
    "x-guidance": {"whitespace_flexible": False},
}
TOOLS: Any = [
    {"type": "function", "function": {"name": name, "description": "x", "parameters": SCHEMA}}
    for name in ("look", "leave")
]


def _answer(sdk: openai.OpenAI, **more: Any) -> Any:
    options = {"temperature": 0, "max_tokens": 120, **more}
    return sdk.chat.completions.create(model="tiny", messages=CHAT, **options)


@pytest.mark.parametrize("temperature", [0, 1])
def test_a_schema_is_kept_with_drafts_and_without(sdk: openai.OpenAI, temperature: int) -> None:
    """A format that is taken and not used, or that drafts go around."""
    asked = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}
    texts = []
    for draft in ("none", "ngram", "early-exit"):
        found = _answer(
            sdk, response_format=asked, temperature=temperature, seed=5,
            extra_body={"selfspec": {"draft": draft}},
        )  # fmt: skip
        assert found.choices[0].finish_reason == "stop"
        texts.append(found.choices[0].message.content)
    jsonschema.validate(json.loads(texts[0]), SCHEMA)
    assert texts == texts[:1] * 3


def test_a_required_call_comes_as_a_call(sdk: openai.OpenAI) -> None:
    """A call as text, one of another tool, or arguments that fit no schema."""
    whole = _answer(sdk, tools=TOOLS, tool_choice="required", parallel_tool_calls=False)
    (call,) = whole.choices[0].message.tool_calls
    assert whole.choices[0].finish_reason == "tool_calls"
    assert whole.choices[0].message.content is None
    assert call.function.name in ("look", "leave")
    jsonschema.validate(json.loads(call.function.arguments), SCHEMA)
    named = _answer(
        sdk, tools=TOOLS, tool_choice={"type": "function", "function": {"name": "leave"}}
    )
    assert named.choices[0].message.tool_calls[0].function.name == "leave"


def test_a_streamed_call_is_the_whole_ones(sdk: openai.OpenAI) -> None:
    """A call that is streamed as text first, or without the number that clients add it up by."""
    options: Any = {"tools": TOOLS, "tool_choice": "required", "parallel_tool_calls": False}
    whole = _answer(sdk, **options).choices[0].message.tool_calls[0].function
    chunks = [chunk.choices[0] for chunk in _answer(sdk, stream=True, **options)]
    calls = [call for chunk in chunks for call in chunk.delta.tool_calls or []]
    assert [(call.index, call.function.name) for call in calls] == [(0, whole.name)]
    assert calls[0].function.arguments == whole.arguments
    assert not "".join(chunk.delta.content or "" for chunk in chunks)
    assert [chunk.finish_reason for chunk in chunks if chunk.finish_reason] == ["tool_calls"]


def test_tools_that_may_be_left_alone_change_no_words(sdk: openai.OpenAI) -> None:
    """Text that is held back for ever since it might have become a call."""
    free = _answer(sdk, max_tokens=24)
    offered = _answer(sdk, max_tokens=24, tools=TOOLS)
    assert offered.choices[0].message.content == free.choices[0].message.content
    assert offered.choices[0].finish_reason == "length"


def test_a_schema_that_nobody_can_read_is_refused_by_its_field(client: httpx.Client) -> None:
    """A 500 from inside the grammar's reader."""
    schema = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "nothing"}}}
    body = {"messages": CHAT, "response_format": schema}
    found = client.post("/v1/chat/completions", json=body)
    assert found.status_code == 400
    assert found.json()["error"]["param"] == "response_format"
