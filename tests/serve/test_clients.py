"""Clients that people use, against a real server. `scripts/clients` installs them in an environment
of their own and runs this file. Elsewhere those that are missing are skipped, and say so.

openai's own client has tests beside each feature (test_serving, test_structured)."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import jsonschema
import pytest

from conftest import api
from selfspec import LLM

PROMPT = "abcabcabcabc"
CHAT: Any = [{"role": "user", "content": PROMPT}]
SCHEMA: dict[str, Any] = {
    "title": "Found",
    "description": "what was found",
    "type": "object",
    "properties": {"kind": {"enum": ["first", "second"]}, "sure": {"type": "boolean"}},
    "required": ["kind", "sure"],
    "additionalProperties": False,
    "x-guidance": {"whitespace_flexible": False},
}
TOOL: Any = {"type": "function", "function": {"name": "look", "parameters": SCHEMA}}
CONFIG = Path(__file__).with_name("schemathesis.toml")


@pytest.fixture
def own(llm: LLM) -> str:
    """What the library says, without drafts."""
    return llm.chat(CHAT, max_new_tokens=24, draft=None).text


def program(name: str) -> str:
    """The command of a package, beside this interpreter or on the path."""
    beside = Path(sys.executable).with_name(name)
    found = str(beside) if beside.exists() else shutil.which(name)
    if found is None:
        pytest.skip(f"{name} is not installed; scripts/clients installs it")
    return found


# ---- LangChain


def langchain(client: httpx.Client, **more: Any) -> Any:
    package = pytest.importorskip("langchain_openai", reason="scripts/clients installs it")
    how = {"model": "tiny", "api_key": "-", "temperature": 0, "max_tokens": 24, "max_retries": 0}
    return package.ChatOpenAI(base_url=api(client), **{**how, **more})


def test_langchain_gets_the_text_of_the_library(client: httpx.Client, own: str) -> None:
    """Fields that LangChain sends and we refuse, and chunks that it cannot add up."""
    chat = langchain(client)
    found = chat.invoke(PROMPT)
    assert found.content == own and found.usage_metadata["output_tokens"] == 24
    assert found.response_metadata["finish_reason"] == "length"
    pieces = list(chat.stream(PROMPT))
    assert "".join(piece.content for piece in pieces) == own and len(pieces) > 3
    assert asyncio.run(chat.ainvoke(PROMPT)).content == own
    assert [each.content for each in chat.batch([PROMPT] * 3)] == [own] * 3


def test_langchain_gets_shapes_and_calls(client: httpx.Client) -> None:
    """Structured answers by both of its ways, and a call that an agent could run."""
    chat = langchain(client, max_tokens=120)
    for method in ("json_schema", "function_calling"):
        found = chat.with_structured_output(SCHEMA, method=method).invoke(PROMPT)
        jsonschema.validate(found, SCHEMA)
    (call,) = chat.bind_tools([TOOL], tool_choice="look").invoke(PROMPT).tool_calls
    assert call["name"] == "look" and call["type"] == "tool_call"
    jsonschema.validate(call["args"], SCHEMA)


# ---- litellm


def litellm(client: httpx.Client, **more: Any) -> Any:
    package = pytest.importorskip("litellm", reason="scripts/clients installs it")
    how: dict[str, Any] = {"model": "openai/tiny", "api_key": "-", "temperature": 0}
    how |= {"messages": CHAT, "max_tokens": 24, "base_url": api(client), "num_retries": 0}
    if more.pop("later", False):
        return package.acompletion(**{**how, **more})
    return package.completion(**{**how, **more})


def test_litellm_gets_the_text_of_the_library(client: httpx.Client, own: str) -> None:
    """Fields that litellm sends and we refuse, and chunks that it cannot read."""
    found = litellm(client)
    assert found.choices[0].message.content == own and found.usage.completion_tokens == 24
    chunks = list(litellm(client, stream=True, stream_options={"include_usage": True}))
    assert "".join(each.choices[0].delta.content or "" for each in chunks if each.choices) == own
    assert asyncio.run(litellm(client, later=True)).choices[0].message.content == own


def test_litellm_gets_calls_and_errors(client: httpx.Client) -> None:
    """A call with other names, and an error whose kind is lost on the way."""
    package = pytest.importorskip("litellm", reason="scripts/clients installs it")
    named = {"type": "function", "function": {"name": "look"}}
    found = litellm(client, tools=[TOOL], tool_choice=named, max_tokens=120)
    (call,) = found.choices[0].message.tool_calls
    jsonschema.validate(json.loads(call.function.arguments), SCHEMA)
    with pytest.raises(package.NotFoundError, match="no model 'other'"):
        litellm(client, model="openai/other")
    with pytest.raises(package.BadRequestError, match="temprature"):
        litellm(client, extra_body={"temprature": 1})


# ---- llm, the command


@pytest.mark.parametrize("more", [[], ["--no-stream"]], ids=["streamed", "whole"])
def test_the_command_llm_gets_the_text_of_the_library(
    client: httpx.Client, own: str, tmp_path: Path, more: list[str]
) -> None:
    """A server that llm's way to name other servers does not reach."""
    command = program("llm")
    (tmp_path / "extra-openai-models.yaml").write_text(
        f"- model_id: ours\n  model_name: tiny\n  api_base: {api(client)}\n", encoding="utf-8"
    )
    done = subprocess.run(
        [command, "-m", "ours", PROMPT, "-o", "temperature", "0", "-o", "max_tokens", "24", *more],
        env=os.environ | {"LLM_USER_PATH": str(tmp_path), "OPENAI_API_KEY": "-"},
        capture_output=True, timeout=120, stdin=subprocess.DEVNULL, check=False,
    )  # fmt: skip
    assert done.stdout.decode() == own + "\n", done.stderr.decode()[-2000:]


# ---- schemathesis, over our description


def test_schemathesis_finds_nothing(client: httpx.Client, tmp_path: Path) -> None:
    """Answers and refusals that the description does not know, input that it allows and that ends
    in an error of ours, input that it forbids and that is taken. $SELFSPEC_SCHEMATHESIS: where the
    report is kept."""
    command, report = program("st"), tmp_path / "report.json"
    kept = os.environ.get("SELFSPEC_SCHEMATHESIS")
    done = subprocess.run(
        [command, "--config-file", str(CONFIG), "--no-color", "run",
         f"{client.base_url}/openapi.json", "--seed", "1", "-n", "200" if kept else "20",
         "--request-timeout", "100",
         "--report", "json", "--report-json-path", str(report)],
        cwd=tmp_path, capture_output=True, text=True, timeout=600, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr
    found = json.loads(report.read_text(encoding="utf-8"))
    assert found["test_cases"]["generated"] > 300 and not found["failures"]
    assert found["operations"]["tested"] == found["operations"]["total"] >= 10
    if kept:
        del found["command"]  # it names the address
        Path(kept).write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
