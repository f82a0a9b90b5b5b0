"""Bad requests to a real server on loopback: values in the fields of bodies (`fields.txt`), whole
requests and raw bytes (`requests.txt`), and bodies that chance has damaged.

A good answer is one that was asked for, or a refusal as OpenAI's clients know it. Anything else is
an `AssertionError`, and afterwards the server must be well.
"""

from __future__ import annotations

import copy
import json
import random
import socket
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from urllib.parse import urlsplit

import httpx

from selfspec.errors import SelfspecError
from selfspec.serve.running import served
from selfspec.serve.service import Service
from selfspec.serve.settings import Limits, Settings
from selfspec.testing import tiny_llm

from .damage import VALUES, places
from .doors import NAMES, SECONDS, Target, lines, wrong

HELLO = [{"role": "user", "content": "hello"}]
BODIES: Mapping[str, Mapping[str, Any]] = {
    "/v1/chat/completions": {"messages": HELLO, "max_tokens": 3, "seed": 1},
    "/v1/completions": {"prompt": "hello", "max_tokens": 3, "seed": 1},
    "/tokenize": {"prompt": "hello"},
    "/detokenize": {"tokens": [104, 105]},
}
JSON = {"Content-Type": "application/json"}


class Refused(SelfspecError):
    """What a refusal said."""


def json_values() -> list[str]:
    """The lines of values.txt that a body can hold."""
    found = []
    for line in lines("values.txt"):
        try:
            json.dumps(eval(line, dict(NAMES)))
        except Exception:  # noqa: BLE001, S112  (an object of Python's, or one whose repr raises)
            continue
        found.append(line)
    return found


class FuzzedServer:
    """A server with a tiny model, and its client."""

    def __init__(self, client: httpx.Client, service: Service) -> None:
        self.client, self.service = client, service

    def field(self, target: Target, value: Any) -> None:
        """Ask with this value in a field; names with dots lie deeper."""
        body: Any = json.loads(json.dumps(BODIES[target.door]))
        *outer, name = target.name.split(".")
        inside = body
        for each in outer:
            inside = inside.setdefault(each, {})
        inside[name] = value
        self.ask(target.door, json.dumps(body).encode())

    def ask(
        self, path: str, body: bytes, method: str = "POST", headers: Mapping[str, str] = JSON
    ) -> None:
        """Send it, and look at the answer."""
        given = {name: value.encode() for name, value in headers.items()}
        self.judge(self.client.request(method, path, content=body, headers=given))

    def judge(self, found: httpx.Response) -> None:
        """Raise Refused for a proper refusal, AssertionError for anything but an answer."""
        assert found.headers.get("x-request-id"), "an answer without an id"
        if found.status_code < 400:
            assert "internal_error" not in found.text, found.text[-300:]
            if found.headers["content-type"].startswith("text/event-stream"):
                assert found.text.endswith("data: [DONE]\n\n"), found.text[-300:]
            return
        assert found.status_code < 500, f"{found.status_code}: {found.text[:300]}"
        error = found.json()["error"]
        assert set(error) == {"message", "type", "param", "code"}, error
        raise Refused(error["message"])

    def raw(self, sent: bytes) -> None:
        """Send bytes, and nothing more: the server answers, or closes the connection."""
        where = urlsplit(str(self.client.base_url))
        assert where.hostname is not None and where.port is not None
        with socket.create_connection((where.hostname, where.port), SECONDS - 1) as line:
            try:
                line.sendall(sent)
                line.shutdown(socket.SHUT_WR)
                said = line.recv(4096)
            except OSError:  # it has closed before
                said = b""
        assert not said or said.startswith(b"HTTP/1.1 "), said
        assert not said.startswith(b"HTTP/1.1 5"), said
        raise Refused(f"the answer to raw bytes was {said[:60]!r}")

    def well(self) -> None:
        """It answers, and nothing that was asked is still there."""
        assert self.client.get("/health").status_code == 200
        self.ask("/v1/completions", json.dumps(BODIES["/v1/completions"]).encode())

    def line(self, text: str) -> str | None:
        """One line of requests.txt: `METHOD path | headers | body`, or `RAW | | bytes`."""
        asked, headers, body = (part.strip() for part in text.split("|", 2))
        content: bytes = eval(body, {}) if body else b""
        if asked == "RAW":
            return wrong(lambda: self.raw(content), may_succeed=False)
        method, path = asked.split()
        given = json.loads(headers) if headers else JSON
        return wrong(lambda: self.ask(path, content, method, given), may_succeed=True)

    def chance(self, dice: random.Random) -> str | None:
        """One body that chance has damaged."""
        path = dice.choice(sorted(BODIES))
        body, what = damaged_body(path, dice)
        problem = wrong(lambda: self.ask(path, body), may_succeed=True)
        return problem and f"server: {path} {what}: {problem}"


def damaged_body(path: str, dice: random.Random) -> tuple[bytes, str]:
    """A body with some fields replaced or added, or with other bytes."""
    targets = [each for each in map(Target.of, lines("fields.txt")) if each.door == path]
    body: dict[str, Any] = json.loads(json.dumps(BODIES[path]))
    for _ in range(dice.choice([1, 1, 2, 4])):
        if dice.random() < 0.5:
            body[dice.choice(targets).name.partition(".")[0]] = copy.deepcopy(dice.choice(VALUES))
            continue
        where = dice.choice(list(places(body)))
        inside: Any = body
        for key in where[:-1]:
            inside = inside[key]
        inside[where[-1]] = copy.deepcopy(dice.choice(VALUES))
    sent = json.dumps(body).encode()
    if dice.random() < 0.25:
        at = dice.randrange(len(sent))
        sent = dice.choice([sent[:at], sent[:at] + dice.randbytes(3) + sent[at:]])
    return sent, repr(sent[:200])


@contextmanager
def fuzzed_server() -> Iterator[FuzzedServer]:
    """A server, drained and ended afterwards."""
    service = Service(Settings(Limits(rows=2, body=200_000), name="tiny"))
    service.adopt(tiny_llm(max_position_embeddings=64))
    with served(service) as url, httpx.Client(base_url=url, timeout=6 * SECONDS) as client:
        yield FuzzedServer(client, service)
