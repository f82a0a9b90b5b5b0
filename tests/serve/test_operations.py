"""What keeps a server alive and quiet: keys, limits, drains, logs, figures, bad input."""

from __future__ import annotations

import json
import logging
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from typer.testing import CliRunner

from selfspec import OptionError
from selfspec.cli.app import app as commands
from selfspec.cli.serve import keys_from
from selfspec.core.machine import this_machine
from selfspec.profile import SCHEMA, Profile, Way
from selfspec.serve.asked import chat
from selfspec.serve.gate import Lines
from selfspec.serve.running import served
from selfspec.serve.schemas import IGNORED, ChatRequest
from selfspec.serve.service import Service
from selfspec.serve.settings import Limits, Settings

HELLO: Any = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 3}


def profile_of(llm: Any) -> Profile:
    """What a tuning could have left."""
    ways = (Way("early-exit", {"layer": 1}, measured=1.4),)
    return Profile(SCHEMA, "general", "tiny", {}, "float32", this_machine(), "abc", "Use it.", ways)


def refused(found: httpx.Response, status: int, param: str | None = None) -> str:
    """The message of OpenAI's error object."""
    assert found.status_code == status, found.text
    error = found.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["param"] == param, error
    message: str = error["message"]
    return message


# ---- bad input


@pytest.mark.parametrize(
    ("more", "param", "words"),
    [
        ({"temprature": 1}, "temprature", "did you mean 'temperature'"),
        ({"selfspec": {"draf": "x"}}, "selfspec.draf", "did you mean 'draft'"),
        ({"selfspec": {"draft": "draft-model"}}, "selfspec.draft", "no drafter 'draft-model'"),
        ({"selfspec": {"draft": "auto", "control": "fixed"}}, "selfspec", "decides itself"),
        ({"temperature": 3}, "temperature", "less than or equal to 2"),
        ({"temperature": "1"}, "temperature", "valid number"),
        ({"temperature": 1e-9}, "temperature", "use temperature=0"),
        ({"top_p": 0}, "top_p", "greater than 0"),
        ({"max_tokens": 0}, "max_tokens", "greater than or equal to 1"),
        ({"max_tokens": 10**9}, None, "together they may be 512"),
        ({"n": 99}, "n", "99 answers, and one request may have 16"),
        ({"stop": ""}, "stop", "at least 1 character"),
        ({"stop": ["a", 3]}, "stop.1", "valid string"),
        ({"stop_token_ids": [259]}, "stop_token_ids", "vocabulary ends at 258"),
        ({"logit_bias": {"300": 1}}, "logit_bias", "vocabulary ends at 258"),
        ({"logit_bias": {"a": 1}}, "logit_bias.a", "pattern"),
        ({"top_logprobs": 2}, None, "needs logprobs"),
        ({"stream_options": {"include_usage": True}}, None, "belong to a stream"),
        ({"messages": []}, "messages", "at least 1 item"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
         "messages.0.content.0", "'image_url' cannot be read"),
        ({"messages": [{"role": "nobody", "content": "x"}]}, "messages.0.role", "'user'"),
        ({"messages": [{"role": "user", "content": "\ud800"}]}, "messages", "half of a pair"),
        ({"tools": [{"type": "function"}]}, "tools", "is no function"),
        ({"response_format": {"type": "xml"}}, "response_format", "no type that is known"),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}},
         "response_format", "has no schema"),
        ({"tools": None, "tool_choice": "required"}, "tool_choice", "names none"),
        ({"tool_choice": {}}, "tool_choice", "is none of"),
        ({"model": "gpt"}, "model", "no model 'gpt'"),
    ],
)  # fmt: skip
def test_a_mistake_is_answered_with_its_field(
    client: httpx.Client, more: dict[str, Any], param: str | None, words: str
) -> None:
    """A typo that is swallowed, a message that names no field, a mistake that is a 500."""
    body, kind = json.dumps({**HELLO, **more}), {"Content-Type": "application/json"}
    found = client.post("/v1/chat/completions", content=body, headers=kind)
    assert words in refused(found, 404 if param == "model" else 400, param)


@pytest.mark.parametrize("prompt", ["", [], [""], ["x", ""]])
def test_an_empty_prompt_is_a_mistake_of_the_prompt(client: httpx.Client, prompt: Any) -> None:
    """A prompt of no tokens that reaches the engine, and an error that names no field."""
    found = client.post("/v1/completions", json={"prompt": prompt, "max_tokens": 2})
    assert "the prompt is empty" in refused(found, 400, "prompt")


def test_habits_of_clients_are_no_mistakes(client: httpx.Client) -> None:
    """A client that cannot be used because it sends a user's name."""
    habits = dict.fromkeys(IGNORED, "x") | {"metadata": {"a": 1}, "tools": None, "stop": None}
    assert client.post("/v1/chat/completions", json=HELLO | habits).status_code == 200
    tools = [{"type": "function", "function": {"name": "f"}}]
    none = {"tools": tools, "tool_choice": "none", "parallel_tool_calls": True}
    assert client.post("/v1/chat/completions", json=HELLO | none).status_code == 200


BY_ROUTER = {"stream": False, "no_stop_trim": False, "ignore_eos": False,
             "skip_special_tokens": True, "return_hidden_states": False}  # fmt: skip


def test_what_a_router_writes_into_requests_is_no_mistake(client: httpx.Client) -> None:
    """Every completion behind vllm-router 0.1.17, which adds fields to all that it forwards; and
    one of them that is taken though it asks for something else."""
    chat = HELLO | BY_ROUTER | {
        "logprobs": False, "continue_final_message": False, "separate_reasoning": True,
        "stream_reasoning": True, "include_reasoning": True,
    }  # fmt: skip
    assert client.post("/v1/chat/completions", json=chat).status_code == 200
    text = BY_ROUTER | {"model": "tiny", "prompt": "abc", "max_tokens": 5, "echo": False}
    assert client.post("/v1/completions", json=text).status_code == 200
    for name in ("no_stop_trim", "return_hidden_states", "skip_special_tokens"):
        other = text | {name: not text[name]}
        refused(client.post("/v1/completions", json=other), 400, name)
    refused(client.post("/v1/chat/completions", json=chat | {"continue_final_message": True}), 400,
            "continue_final_message")  # fmt: skip


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/tokenize",
                                  "/detokenize"])  # fmt: skip
def test_no_input_is_an_error_of_ours(client: httpx.Client, path: str) -> None:
    """A traceback, or an answer that is no JSON, on input that nobody thought of."""
    dice = random.Random(path)
    odd: list[Any] = [
        None, True, -1, 0, 2**70, 1e308, float("nan"), float("inf"), "", "x", "\0", "\ud800",
        "\U0001f600", [], [[]], [None], [-1], [[5], "x"], {}, {"a": {}}, [{"role": "user"}],
        {"type": "json_schema"},
        "demo", [2**70], {"": 1}, [["a"]],
    ]  # fmt: skip
    names = ["messages", "prompt", "tokens", "max_tokens", "n", "stop", "seed", "logprobs",
             "stream", "selfspec", "logit_bias", "top_p", "model", "echo", "tools",
             "priority"]  # fmt: skip
    bodies = [b"", b"{", b"\xff\xfe", b"[" * 5000, b"null", b'{"messages": ' + b"[" * 3000, b"7"]
    for _ in range(150):
        base: dict[str, Any] = dict(HELLO) if "chat" in path else {"prompt": "hi", "max_tokens": 3}
        base = {} if "token" in path else base
        for _ in range(dice.choice([1, 1, 2, 4])):
            base[dice.choice(names)] = dice.choice(odd)
        bodies.append(json.dumps(base).encode())
    answered = 0
    for body in bodies:
        found = client.post(path, content=body, headers={"Content-Type": "application/json"})
        assert found.status_code < 500, (body, found.text)
        if found.status_code >= 400:
            assert found.json()["error"]["message"], body
        answered += found.status_code == 200
    assert answered > 3 or "token" in path


def test_paths_and_methods_that_are_not_there(client: httpx.Client) -> None:
    """Errors of the framework's own form."""
    assert "no such path" in refused(client.get("/v2/models"), 404)
    assert "other methods" in refused(client.put("/health"), 405)
    assert "Content-Type" in refused(client.post("/v1/completions", content=b"{}"), 400)


# ---- keys, origins, limits


def test_keys(serving: Any, caplog: pytest.LogCaptureFixture) -> None:
    """A server that answers without a key, or writes keys and prompts into its log."""
    logger = logging.getLogger("selfspec.serve")
    logger.propagate = True
    caplog.set_level(logging.INFO, "selfspec.serve")
    secret = "a prompt that nobody should read"
    with serving(keys=["first-key", "second-kéy"]) as (client, _):
        ask = {"prompt": secret, "max_tokens": 2}
        for header in ({}, {"Authorization": "Bearer first-kez"}, {"Authorization": "first-key"}):
            assert "key" in refused(client.post("/v1/completions", json=ask, headers=header), 401)
        for key in ("first-key", "second-kéy"):
            good = {"Authorization": f"Bearer {key}".encode()}
            assert client.post("/v1/completions", json=ask, headers=good).status_code == 200
        assert client.get("/v1/models").status_code == 401
        for path in ("/health", "/ready", "/metrics", "/version"):
            assert client.get(path).status_code == 200, path
    lines = [json.loads(Lines().format(record)) for record in caplog.records]
    assert sum(line["event"] == "request" for line in lines) >= 10
    assert all(word not in json.dumps(lines) for word in (secret, "first-key", "nobody"))


def test_keys_come_from_a_file_or_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An empty file that opens the server to everybody."""
    monkeypatch.setenv("SELFSPEC_API_KEYS", "a, b")
    (tmp_path / "keys").write_text("c\n\n d \n", encoding="utf-8")
    (tmp_path / "none").write_text("\n", encoding="utf-8")
    assert keys_from(None) == ["a", "b"]
    assert keys_from(tmp_path / "keys") == ["a", "b", "c", "d"]
    monkeypatch.delenv("SELFSPEC_API_KEYS")
    with pytest.raises(OptionError, match="everybody would be served"):
        keys_from(tmp_path / "none")


def test_no_page_may_call_unless_it_was_named(client: httpx.Client, serving: Any) -> None:
    """Any web page that a user has open could use a server on the same machine."""
    asks = {"Origin": "http://page.example", "Access-Control-Request-Method": "POST"}
    header = "access-control-allow-origin"
    assert header not in client.options("/v1/completions", headers=asks).headers
    assert header not in client.get("/version", headers=asks).headers
    with serving(origins=["http://page.example"], keys=["k"]) as (open_to, _):
        found = open_to.options("/v1/completions", headers=asks)
        assert found.status_code == 200 and found.headers[header] == "http://page.example"
        other = open_to.get("/version", headers=asks | {"Origin": "http://other.example"})
        assert header not in other.headers


def test_bodies_have_a_limit(serving: Any) -> None:
    """Memory that a client can fill, with a stated length or without one."""
    with serving(limits=Limits(rows=1, body=2000)) as (client, _):
        large = json.dumps({"prompt": "x" * 3000}).encode()
        kind = {"Content-Type": "application/json"}
        assert "2000 bytes" in refused(client.post("/v1/completions", content=large), 413)

        def pieces() -> Iterator[bytes]:
            for piece in (large[:1500], large[1500:]):
                yield piece
                time.sleep(0.1)  # or the server is handed both at once

        assert "2000 bytes" in refused(
            client.post("/v1/completions", content=pieces(), headers=kind), 413
        )
        assert client.get("/health").status_code == 200


def test_too_many_are_told_when_to_come_again(serving: Any) -> None:
    """A full server that says nothing, or 500."""
    long = {"prompt": "x", "max_tokens": 400, "ignore_eos": True, "stream": True}
    with (
        serving(limits=Limits(rows=1, queue=1)) as (client, service),
        client.stream("POST", "/v1/completions", json=long) as running,
    ):
        next(running.iter_lines())
        found = client.post("/v1/completions", json={"prompt": ["a", "b"], "max_tokens": 2})
        assert "wait already" in refused(found, 429)
        assert int(found.headers["Retry-After"]) >= 1
        assert service.worker is not None


# ---- beginning and ending


def test_it_listens_while_it_loads(llm: Any) -> None:
    """A load balancer that sends requests to a server without a model, or ends one that loads."""
    service = Service(Settings(Limits(rows=1), name="tiny"))
    with served(service) as url, httpx.Client(base_url=url) as client:
        assert client.get("/health").status_code == 200
        assert "being loaded" in refused(client.get("/ready"), 503)
        found = client.post("/v1/chat/completions", json=HELLO)
        assert "being loaded" in refused(found, 503) and found.headers["Retry-After"]
        service.adopt(llm)
        assert client.get("/ready").status_code == 200
        assert client.post("/v1/chat/completions", json=HELLO).status_code == 200
        service.drain()
        assert "about to end" in refused(client.get("/ready"), 503)


def test_it_drafts_by_the_profile_and_says_so(llm: Any, caplog: pytest.LogCaptureFixture) -> None:
    """A profile of `selfspec tune` that the server does not read, or that changes a text."""
    logger = logging.getLogger("selfspec.serve")
    logger.propagate = True
    caplog.set_level(logging.INFO, "selfspec.serve")
    made = profile_of(llm)
    tuned = llm.view(llm.model)
    tuned.profile = made
    texts, drafters = [], []
    for each in (llm, tuned):
        service = Service(Settings(Limits(rows=1), name="tiny"))
        service.adopt(each)
        with served(service) as url, httpx.Client(base_url=url, timeout=60) as client:
            texts.append(client.post("/v1/chat/completions", json=HELLO | {"seed": 1}).json())
            assert service.worker is not None
            body = ChatRequest(**HELLO, selfspec={"most": 3})
            drafters.append([
                chat(service.worker, asked, "auto").requests[0].drafter
                for asked in (ChatRequest(**HELLO), ChatRequest(**HELLO), body)
            ])  # fmt: skip
    assert texts[0]["choices"] == texts[1]["choices"]
    plain, (first, second, three) = drafters[0][0], drafters[1]
    assert first is second and first == made.drafter() != plain, "rows of it draft together"
    assert three == made.drafter(most=3)
    lines = [json.loads(Lines().format(record)) for record in caplog.records]
    ready = [line for line in lines if line["event"] == "ready"]
    assert "profile" not in ready[0] and ready[0]["draft"] == "auto"
    assert ready[1]["profile"] == [str(way) for way in made.ways]


SCRIPT = """
import sys
from selfspec.serve.running import serve
from selfspec.serve.service import Service
from selfspec.serve.settings import Limits, Settings
from selfspec.testing import tiny_llm

port = int(sys.argv[1])
serve(Service(Settings(Limits(rows=2), name="tiny")), tiny_llm, "127.0.0.1", port)
"""


def test_sigterm_finishes_what_runs_and_ends_with_0() -> None:
    """Answers that are cut off at every release."""
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    process = subprocess.Popen(
        [sys.executable, "-c", SCRIPT, str(port)], stderr=subprocess.PIPE, text=True,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
    )  # fmt: skip
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60) as client:
            _until_ready(client)
            ask = {"prompt": "x", "max_tokens": 480, "ignore_eos": True, "stream": True,
                   "stream_options": {"include_usage": True}}  # fmt: skip
            with client.stream("POST", "/v1/completions", json=ask) as found:
                lines = found.iter_lines()
                next(lines)
                process.send_signal(signal.SIGTERM)
                rest = [line for line in lines if line]
        assert rest[-1] == "data: [DONE]"
        assert json.loads(rest[-2][6:])["usage"]["completion_tokens"] == 480
        _, said = process.communicate(timeout=60)
        assert process.returncode == 0, said
        events = [json.loads(line) for line in said.splitlines() if line.startswith("{")]
        assert [e["whole"] for e in events if e["event"] == "stopped"] == [True]
    finally:
        process.kill()
        process.wait()


def _until_ready(client: httpx.Client) -> None:
    end = time.monotonic() + 90
    while time.monotonic() < end:
        try:
            if client.get("/ready").status_code == 200:
                return
        except httpx.TransportError:
            time.sleep(0.05)
        time.sleep(0.05)
    raise AssertionError("the server never came up")


def test_a_model_that_cannot_be_loaded_says_why(tmp_path: Path) -> None:
    """A server that listens for ever without a model."""
    found = CliRunner().invoke(commands, ["serve", str(tmp_path / "nothing"), "--port", "0"])
    assert found.exit_code == 1
    assert "nothing" in found.output


def test_the_command_checks_before_it_loads(tmp_path: Path) -> None:
    """A mistake that is found after minutes of loading."""
    found = CliRunner().invoke(commands, ["serve", "demo", "--draft", "draft-head"])
    assert found.exit_code == 1 and "needs more than the model" in found.output
    missing = CliRunner().invoke(commands, ["serve", "--api-key-file", str(tmp_path / "none")])
    assert missing.exit_code == 1 and "none" in missing.output


# ---- ids, figures


def test_a_request_has_an_id(client: httpx.Client) -> None:
    """Ids that are lost, or that let a client write lines into the log."""
    mine = client.get("/version", headers={"X-Request-Id": "abc-1"})
    assert mine.headers["X-Request-Id"] == "abc-1"
    made = client.get("/nowhere", headers={"X-Request-Id": "x" * 500}).headers["X-Request-Id"]
    assert made != "x" * 500 and len(made) == 32


@pytest.mark.parametrize("draft", ["early-exit", "hybrid"])
def test_figures_have_the_names_that_people_know(serving: Any, draft: str) -> None:
    """A dashboard that shows nothing, or figures that count what did not happen; `hybrid` has
    several rounds in a step."""
    with serving() as (client, service):
        how = {"draft": draft, "control": "fixed", "most": 3}
        ask = {"prompt": "abcabc", "max_tokens": 20, "temperature": 0, "selfspec": how}
        stats = client.post(
            "/v1/completions", json=ask | {"selfspec": how | {"stats": True}}
        ).json()
        drafts = stats["choices"][0]["selfspec"]
        text = client.get("/metrics").text
        value = service.metrics.registry.get_sample_value
        assert value("selfspec:generation_tokens_total") == 20
        assert value("selfspec:prompt_tokens_total") == 6
        assert value("selfspec:time_to_first_token_seconds_count") == 1
        assert value("selfspec:inter_token_latency_seconds_count") == 19
        accepted = value("selfspec:spec_decode_num_accepted_tokens_total")
        assert accepted == drafts["accepted"] > 3
        assert value("selfspec:spec_decode_num_draft_tokens_total") == drafts["drafted"]
        places = [
            value("selfspec:spec_decode_num_accepted_tokens_per_pos_total", {"position": str(at)})
            for at in range(3)
        ]
        assert sum(filter(None, places)) == accepted
        route = '{route="/v1/completions",status="200"}'
        assert f"selfspec:http_requests_total{route} 1.0" in text
        for name in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc"):
            assert f"selfspec:{name} 0.0" in text, name
