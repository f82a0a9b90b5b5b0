"""An answer that begins at one server and goes on at another: the same text as from one alone."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx
import pytest
from test_structured import SCHEMA, TOOLS

from selfspec.serve.app import _line

CHAT: Any = [{"role": "user", "content": "one two three"}]
BODIES: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "drawn": {"temperature": 1, "seed": 7, "top_p": 0.95},
    "penalties": {"temperature": 0, "frequency_penalty": 1.5, "presence_penalty": 0.5},
    "repetition": {"temperature": 0.9, "seed": 3, "repetition_penalty": 1.3},
    "ends late": {"temperature": 0, "logit_bias": {"2": 100}, "min_tokens": 20},
    "shape": {"temperature": 1, "seed": 5, "max_tokens": 120,
              "response_format": {"type": "json_schema",
                                  "json_schema": {"name": "x", "schema": SCHEMA}}},
    "call": {"temperature": 0, "max_tokens": 120, "tools": TOOLS, "tool_choice": "required"},
    "logprobs": {"temperature": 0, "logprobs": True, "top_logprobs": 1},
}  # fmt: skip


@dataclass
class Heard:
    """What a stream said."""

    text: str = ""
    ids: list[int] = field(default_factory=list)
    calls: list[Any] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    seed: int | None = None
    finish: str | None = None
    usage: dict[str, Any] = field(default_factory=dict)

    def take(self, line: str) -> None:
        if not line.startswith("data: {"):
            return
        chunk = json.loads(line.removeprefix("data: "))
        assert "error" not in chunk, chunk
        self.usage = chunk.get("usage") or self.usage
        for choice in chunk["choices"]:
            self.text += choice["delta"].get("content") or ""
            called = choice["delta"].get("tool_calls") or []
            self.calls += [(each["index"], each["function"]) for each in called]
            entries = (choice["logprobs"] or {}).get("content") or []
            self.logprobs += [each["logprob"] for each in entries]
            self.ids += choice.get("selfspec", {}).get("ids", [])
            self.seed = choice.get("selfspec", {}).get("seed", self.seed)
            self.finish = choice["finish_reason"] or self.finish


def heard(client: httpx.Client, rounds: int | None = None, **body: Any) -> Heard:
    """A stream, whole or until so many tokens were given."""
    asked = {"messages": CHAT, "max_tokens": 24, "stream": True,
             "stream_options": {"include_usage": True}, **body}  # fmt: skip
    asked["selfspec"] = {"stats": True, **body.get("selfspec", {})}
    found = Heard()
    with client.stream("POST", "/v1/chat/completions", json=asked) as answer:
        for line in answer.iter_lines():
            found.take(line)
            if rounds is not None and len(found.ids) >= rounds:
                break
    return found


@pytest.mark.parametrize("name", BODIES)
def test_an_answer_goes_on_wherever_it_was_cut(client: httpx.Client, name: str) -> None:
    """Draws that begin anew, penalties, lengths, grammars and calls that do not know what was
    given, text between the two parts that is lost or said twice."""
    body = BODIES[name]
    whole = heard(client, **body)
    assert len(whole.ids) > 8
    for cut in sorted({1, 2, 5, len(whole.ids) // 2, len(whole.ids) - 1}):
        begun = heard(client, cut, **body, selfspec={"draft": "none"})
        assert len(begun.ids) == cut and begun.finish is None
        how = {"resume": begun.ids, "draft": "early-exit", "control": "fixed"}
        rest = heard(client, **body, selfspec=how)
        assert [*begun.ids, *rest.ids] == whole.ids, f"cut at {cut}"
        assert begun.text + rest.text == whole.text and rest.finish == whole.finish
        assert begun.calls + rest.calls == whole.calls
        assert rest.usage == whole.usage | {"prompt_tokens_details": _any(rest.usage)}
        assert rest.logprobs == whole.logprobs[len(whole.logprobs) - len(rest.logprobs) :]
        assert bool(rest.logprobs) is ("logprobs" in body)


def _any(usage: dict[str, Any]) -> Any:
    """What was cached depends on who came before."""
    return usage["prompt_tokens_details"]


def test_stops_know_what_was_given(client: httpx.Client) -> None:
    """A stop string of which one half came from another server."""
    whole = heard(client, temperature=0)
    at = next(n for n in range(6, len(whole.text) - 3) if whole.text[n : n + 2].isprintable()
              and whole.text.find(whole.text[n : n + 2]) == n)  # fmt: skip
    stop = whole.text[at : at + 2]
    own = heard(client, temperature=0, stop=stop)
    assert own.text == whole.text[:at] and own.finish == "stop"
    parts = 0
    for cut in range(1, len(own.ids)):
        begun = heard(client, cut, temperature=0, stop=stop, selfspec={"draft": "none"})
        rest = heard(client, temperature=0, stop=stop, selfspec={"resume": begun.ids})
        assert begun.text + rest.text == own.text and rest.finish == "stop", cut
        parts += len(begun.text) < at
    assert parts > 2
    refused = {"messages": CHAT, "temperature": 0, "stop": stop, "selfspec": {"resume": own.ids}}
    found = client.post("/v1/chat/completions", json=refused)
    error = found.json()["error"]
    assert found.status_code == 400 and error["param"] == "selfspec.resume"
    assert "nothing to go on with" in error["message"]


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"max_tokens": 3}, "3 tokens and the answer may have 3"),
        ({"n": 2}, "goes on with one answer, and 2"),
        ({"selfspec": {"resume": [5, 300]}}, "vocabulary ends at 258"),
        ({"selfspec": {"resume": [5, 2, 5]}}, "ends at its token 2 of 3"),
        ({"selfspec": {"resume": []}}, "at least 1 item"),
    ],
)
def test_what_cannot_go_on_is_refused(
    client: httpx.Client, more: dict[str, Any], words: str
) -> None:
    """An answer that is longer than it was to be, or goes on behind its end."""
    body = {"messages": CHAT, "selfspec": {"resume": [5, 6, 7]}, **more}
    found = client.post("/v1/chat/completions", json=body)
    error = found.json()["error"]
    assert found.status_code == 400 and error["param"] == "selfspec.resume", error
    assert words in error["message"]


def test_a_whole_answer_is_whole(client: httpx.Client) -> None:
    """An answer without a stream that lacks its beginning, or an echo that is said twice."""
    ask = {"prompt": "abcabcabc", "temperature": 0, "max_tokens": 12, "echo": True}
    own = client.post("/v1/completions", json=ask | {"selfspec": {"stats": True}}).json()
    streamed = ask | {"stream": True, "selfspec": {"stats": True}}
    with client.stream("POST", "/v1/completions", json=streamed) as answer:
        chunks = [json.loads(line[6:]) for line in answer.iter_lines() if line[6:7] == "{"]
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    given = [token for each in choices for token in each.get("selfspec", {}).get("ids", [])][:4]
    assert len(given) == 4
    again = client.post("/v1/completions", json=ask | {"selfspec": {"resume": given}}).json()
    assert again["choices"][0]["text"] == own["choices"][0]["text"]
    assert again["usage"]["completion_tokens"] == own["usage"]["completion_tokens"] == 12


# ---- two processes, of which one is killed


SCRIPT = """
import sys
from selfspec.serve.running import serve
from selfspec.serve.service import Service
from selfspec.serve.settings import Limits, Settings
from selfspec.testing import tiny_llm

port = int(sys.argv[1])
serve(Service(Settings(Limits(rows=2), name="tiny")), tiny_llm, "127.0.0.1", port)
"""


@contextmanager
def server_process() -> Iterator[tuple[subprocess.Popen[bytes], httpx.Client]]:
    """A server of its own, once it is ready."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    process = subprocess.Popen(
        [sys.executable, "-c", SCRIPT, str(port)], stderr=subprocess.DEVNULL,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
    )  # fmt: skip
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60) as client:
            end = time.monotonic() + 120
            while time.monotonic() < end and process.poll() is None:
                try:
                    if client.get("/ready").status_code == 200:
                        break
                except httpx.HTTPError:
                    pass
                time.sleep(0.05)
            yield process, client
    finally:
        process.kill()
        process.wait()


def test_an_answer_outlives_its_server() -> None:
    """kill -9 in the midst of an answer that nobody has given a seed: another server goes on, and
    the text is the one that a server gives which was left alone."""
    ask = {"temperature": 1.0, "max_tokens": 300, "frequency_penalty": 0.4, "ignore_eos": True}
    with server_process() as (first, one), server_process() as (_, two):
        begun = Heard()
        body = {"messages": CHAT, **ask, "stream": True, "selfspec": {"stats": True}}
        with (
            pytest.raises(httpx.HTTPError),
            one.stream("POST", "/v1/chat/completions", json=body) as answer,
        ):
            for line in answer.iter_lines():
                begun.take(line)
                if len(begun.ids) > 20:
                    first.kill()
        assert begun.finish is None and 20 < len(begun.ids) < 300 and begun.seed is not None
        rest = heard(two, **ask, seed=begun.seed, selfspec={"resume": begun.ids})
        whole = heard(two, **ask, seed=begun.seed, selfspec={"draft": "none"})
        assert [*begun.ids, *rest.ids] == whole.ids and len(whole.ids) == 300
        assert begun.text + rest.text == whole.text and rest.finish == "length"


@pytest.mark.parametrize("sign", ["\u0085", "\u2028", "\u2029", "\x1c", "\x0b", "\n"])
def test_an_event_of_a_stream_is_one_line(sign: str) -> None:
    """A sign in an answer that its reader takes for the end of a line: half a JSON."""
    event, *rest = _line({"content": f"a{sign}b"}).splitlines()
    assert rest == [""]
    assert json.loads(event.removeprefix("data: ")) == {"content": f"a{sign}b"}
