"""A server for a long time: many callers at once, some of whom leave, some of whom talk nonsense.

The server is a process of its own. After each piece it has nothing to do, and says what it holds:
Python's objects and bytes, bytes of tensors, rows and slots. Callers count: what was answered, what
was refused and how, answers that are not whole, and answers that differ from an earlier one to the
same question, which other drafters and other neighbours may not change.
"""

from __future__ import annotations

import asyncio
import json
import random
import subprocess
import sys
import time
import tracemalloc
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import httpx

from .memory import Measured, Reading, reading

ROOT = Path(__file__).resolve().parents[2]
QUESTIONS = 400
DRAFTS = ("auto", "none", "cosine", "early-exit", "hybrid", "jacobi", "kv-subset", "layer-skip",
          "ngram", "quantised", "recycle")  # fmt: skip
SAMPLINGS: tuple[dict[str, Any], ...] = (
    {"temperature": 0},
    {"temperature": 0, "repetition_penalty": 1.2},
    {"temperature": 0.8, "top_p": 0.9},
    {"top_k": 30, "presence_penalty": 0.5},
)
LEAVING = MALFORMED = 0.1
SCHEMA = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"enum": ["yes", "no"]}}}


# ------------------------------------------------------------------------------- the server's side


def serve_for_a_soak() -> None:
    """Serve on a free port, which is the first line written; each line read is answered by a line
    that says what is held. No request is refused for its wait: the machine may stand still."""
    from selfspec import LLM
    from selfspec.serve.running import served
    from selfspec.serve.service import Service
    from selfspec.serve.settings import Limits, Settings
    from selfspec.testing import near_identity_model, tiny_tokenizer

    tracemalloc.start()
    model: Any = near_identity_model(0.6)
    llm = LLM.from_pretrained(model, tokenizer=tiny_tokenizer())
    service = Service(
        Settings(Limits(rows=8, queue=1000, queue_seconds=9999, seconds=9999), name="tiny")
    )
    service.adopt(llm)
    worker = service.worker
    assert worker is not None
    with served(service) as url:
        print(url, flush=True)
        for line in sys.stdin:
            while worker._running or len(worker._waiting):
                time.sleep(0.01)
            time.sleep(0.2)  # for connections that are just being closed
            held = len(worker._slots.used) + len(worker._generation.rows) + len(worker._waiting)
            print(json.dumps(asdict(reading(llm, int(line))) | {"held": held}), flush=True)


@contextmanager
def soaked_server() -> Iterator[subprocess.Popen[str]]:
    """The process, with its address still to be read."""
    code = "from tests.endurance.soak import serve_for_a_soak; serve_for_a_soak()"
    process = subprocess.Popen(
        [sys.executable, "-c", code], cwd=ROOT, text=True,
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    try:
        yield process
    finally:
        process.kill()
        process.wait()


# ------------------------------------------------------------------------------ the callers' side


@dataclass
class Soaked:
    """What became of all requests."""

    requests: int = 0
    at_once: int = 0
    answered: int = 0
    """Whole, and with the tokens that were asked for or an end."""
    left: int = 0
    """By their callers, before the end."""
    statuses: dict[str, int] = field(default_factory=dict)
    lost: list[str] = field(default_factory=list)
    """Good requests without a whole answer."""
    wrong: list[str] = field(default_factory=list)
    """Bad requests that were not refused with a 4xx and an error object."""
    compared: int = 0
    differing: int = 0
    """Answers that are not the earlier one to the same question."""
    held: int = 0
    """Rows, slots and jobs that were still in use while nobody asked anything, at the most."""
    readings: list[Reading] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def bad(self) -> list[str]:
        """What should not have been."""
        found = [*self.lost, *self.wrong, *Measured.growth(self.readings)]
        found += [f"{n} answers of {code}" for code, n in self.statuses.items() if code[0] == "5"]
        found += [f"{self.differing} answers differ"] * bool(self.differing)
        return found + [f"{self.held} rows, slots or jobs were kept"] * bool(self.held)

    def as_dict(self) -> dict[str, Any]:
        return {**asdict(self), "bad": self.bad}


def question(number: int) -> tuple[str, dict[str, Any]]:
    """The path and the body of one of the questions, always the same."""
    dice = random.Random(number)
    body: dict[str, Any] = {
        **dice.choice(SAMPLINGS), "seed": number, "max_tokens": dice.choice([1, 4, 8, 16]),
    }  # fmt: skip
    words = " ".join(
        dice.choice(["boat", "sea", "far", "home"]) for _ in range(dice.choice([2, 25]))
    )
    if dice.random() < 0.1:
        body["response_format"] = SCHEMA
    if dice.random() < 0.2:
        body["stop"] = dice.choice(["a", " ", "e"])
    if dice.random() < 0.5:
        return "/v1/completions", body | {"prompt": words, "n": dice.choice([1, 1, 2])}
    return "/v1/chat/completions", body | {"messages": [{"role": "user", "content": words}]}


def nonsense(dice: random.Random) -> tuple[str, bytes]:
    """A body that has to be refused."""
    path, body = question(dice.randrange(QUESTIONS))
    what: list[Any] = [
        b"", b"{", b"\xff", b"[]", b"7", b"[" * 2000,
        {**body, "temprature": 1}, {**body, "max_tokens": 10**6}, {**body, "max_tokens": "3"},
        {**body, "model": "gpt"}, {**body, "top_p": 0}, {**body, "stop_token_ids": [10**6]},
        {**body, "selfspec": {"draft": "draft-model"}}, {**body, "n": 100},
        {**body, "response_format": {"type": "xml"}}, {**body, "stop": [""] * 3},
        {**body, "prompt": [], "messages": []},
    ]  # fmt: skip
    made = dice.choice(what)
    return path, made if isinstance(made, bytes) else json.dumps(made).encode()


class Crowd:
    """Callers that ask until so many requests were made."""

    def __init__(self, url: str, at_once: int, seed: int) -> None:
        self.found = Soaked(at_once=at_once)
        self._url, self._dice = url, random.Random(seed)
        self._said: dict[int, Any] = {}
        self._statuses: Counter[str] = Counter()

    async def ask(self, count: int) -> None:
        """So many requests more."""
        left = iter(range(count))
        limits = httpx.Limits(max_connections=self.found.at_once)
        async with httpx.AsyncClient(base_url=self._url, timeout=None, limits=limits) as http:

            async def caller() -> None:
                for _ in left:
                    await self._one(http)

            await asyncio.gather(*(caller() for _ in range(self.found.at_once)))
        self.found.requests += count
        self.found.statuses = dict(sorted(self._statuses.items()))

    async def _one(self, http: httpx.AsyncClient) -> None:
        chance = self._dice.random()
        try:
            if chance < MALFORMED:
                await self._nonsense(http)
            elif chance < MALFORMED + LEAVING:
                await self._leaving(http)
            else:
                await self._good(http)
        except httpx.HTTPError as error:
            self.found.lost.append(f"{type(error).__name__}: {error}"[:200])

    async def _nonsense(self, http: httpx.AsyncClient) -> None:
        path, body = nonsense(self._dice)
        kind = {"Content-Type": "application/json"}
        found = await http.post(path, content=body, headers=kind)
        self._statuses[str(found.status_code)] += 1
        refused = 400 <= found.status_code < 500 and found.json().get("error", {}).get("message")
        if not refused:
            self.found.wrong.append(f"{found.status_code} to {body[:100]!r}")

    async def _leaving(self, http: httpx.AsyncClient) -> None:
        """Go away: after a few lines of a stream, or while an answer is being made."""
        path, body = question(self._dice.randrange(QUESTIONS))
        body |= {"max_tokens": 100, "ignore_eos": True, "stop": None, "response_format": None}
        self.found.left += 1
        if self._dice.random() < 0.5:
            asked = http.post(path, json=body, timeout=self._dice.random() * 0.1 + 0.001)
            try:
                self._statuses[str((await asked).status_code)] += 1
            except httpx.TimeoutException:
                self._statuses["none"] += 1
            return
        lines = self._dice.randrange(6)
        async with http.stream("POST", path, json=body | {"stream": True}) as found:
            self._statuses[str(found.status_code)] += 1
            async for _ in found.aiter_lines():
                lines -= 1
                if lines < 0:
                    break

    async def _good(self, http: httpx.AsyncClient) -> None:
        number = self._dice.randrange(QUESTIONS)
        path, body = question(number)
        body["selfspec"] = {"draft": self._dice.choice(DRAFTS)}
        streamed = self._dice.random() < 0.5
        texts = await self._streamed(http, path, body) if streamed else None
        if not streamed:
            found = await http.post(path, json=body)
            self._statuses[str(found.status_code)] += 1
            texts = _whole(found, body)
        if texts is None:
            self.found.lost.append(f"question {number}, streamed: {streamed}")
            return
        self.found.answered += 1
        if number in self._said:
            self.found.compared += 1
            self.found.differing += self._said[number] != texts
        self._said.setdefault(number, texts)

    async def _streamed(self, http: httpx.AsyncClient, path: str, body: dict[str, Any]) -> Any:
        asked = body | {"stream": True, "stream_options": {"include_usage": True}}
        async with http.stream("POST", path, json=asked) as found:
            self._statuses[str(found.status_code)] += 1
            lines = [line async for line in found.aiter_lines() if line]
        if not lines or lines[-1] != "data: [DONE]":
            return None
        chunks = [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]
        if any("error" in chunk for chunk in chunks) or not chunks[-1].get("usage"):
            return None
        texts, ends = [""] * (body.get("n") or 1), 0
        for choice in (each for chunk in chunks for each in chunk["choices"]):
            texts[choice["index"]] += choice.get("text") or choice.get("delta", {}).get(
                "content", ""
            )
            ends += choice["finish_reason"] is not None
        return texts if ends == len(texts) else None


def _whole(found: httpx.Response, body: dict[str, Any]) -> list[str] | None:
    """The texts of an answer that is whole."""
    if found.status_code != 200:
        return None
    choices = found.json()["choices"]
    if len(choices) != (body.get("n") or 1) or not all(each["finish_reason"] for each in choices):
        return None
    return [each["text"] if "text" in each else each["message"]["content"] for each in choices]


def soaked(requests: int, at_once: int, seed: int, readings: int = 5) -> Soaked:
    """A run on a server of its own, which is read so many times. Before the first reading its
    caches fill."""
    begin = time.monotonic()
    every = max(1, requests // readings)
    with soaked_server() as process:
        assert process.stdout and process.stdin
        crowd = Crowd(process.stdout.readline().strip(), at_once, seed)
        while crowd.found.requests < requests:
            asyncio.run(crowd.ask(min(every, requests - crowd.found.requests)))
            process.stdin.write(f"{crowd.found.requests}\n")
            process.stdin.flush()
            said = json.loads(process.stdout.readline())
            crowd.found.held = max(crowd.found.held, said.pop("held"))
            crowd.found.readings.append(Reading(**said))
    crowd.found.seconds = time.monotonic() - begin
    return crowd.found


def total(pieces: list[dict[str, Any]]) -> dict[str, Any]:
    """What all pieces have together."""
    names = ("requests", "answered", "left", "compared", "differing", "seconds")
    statuses: Counter[str] = Counter()
    for piece in pieces:
        statuses.update(piece["statuses"])
    return {
        **{name: sum(piece[name] for piece in pieces) for name in names},
        "at_once": max(piece["at_once"] for piece in pieces),
        "held": max(piece["held"] for piece in pieces),
        "statuses": dict(sorted(statuses.items())),
        "bad": [said for piece in pieces for said in piece["bad"]],
    }
