"""Callers of a server: how long each waits for its first token and between tokens, and what all get
together. Any server with OpenAI's interface will do.

Every caller asks one question after the other, streamed, and takes the times itself. Tokens are
those that the server counts (`stream_options.include_usage`). Knows no engine.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx

from ..errors import OptionError, Unavailable
from .html import Table
from .prompts import TEXT
from .schema import Provenance, Result
from .tables import markdown as paragraphs
from .tables import number

PERCENTILES = (50, 90, 99)
WARM = 2  # questions before the measured ones
_LISTED = 3  # failures that are quoted


@dataclass(frozen=True)
class Asked:
    """One question as its caller saw it. Seconds begin when it was sent."""

    seconds: float
    first: float | None
    """Until the first text."""
    gaps: list[float]
    """Between pieces of text."""
    tokens: int
    failure: str | None = None


@dataclass(frozen=True)
class Crowd:
    """So many callers at once."""

    callers: int
    seconds: float
    asked: list[Asked]

    @property
    def served(self) -> list[Asked]:
        return [each for each in self.asked if each.failure is None]

    @property
    def tokens_per_second(self) -> float:
        return sum(each.tokens for each in self.served) / self.seconds if self.seconds else 0.0


@dataclass
class ServeRun(Result):
    """What a server did under several crowds."""

    kind = "serving"
    measured_by = "selfspec bench-serve URL"

    server: str
    """What it is, in words: its address is nobody's business."""
    model: str
    max_tokens: int
    prompt_words: int
    extra: dict[str, Any] = field(default_factory=dict)
    """Fields that every request had beside the usual ones."""
    crowds: list[Crowd] = field(default_factory=list)


@dataclass(frozen=True)
class Target:
    """A server, and what is asked of it."""

    url: str
    model: str
    max_tokens: int
    key: str | None = None
    extra: dict[str, Any] = field(default_factory=dict)

    def body(self, prompt: str) -> dict[str, Any]:
        return {
            "model": self.model,
            "messages": [{"role": "user", "content": prompt}],
            "max_tokens": self.max_tokens,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
            **self.extra,
        }


def prompts(count: int, words: int, first: int = 0) -> list[str]:
    """Different questions about pieces of an ordinary text, from that number on."""
    text = TEXT.split()
    made = []
    for index in range(first, first + count):
        start = 37 * index % len(text)
        piece = (text[start:] + text * (words // len(text) + 1))[:words]
        made.append(f"({index}) Go on with this text: {' '.join(piece)}")
    return made


def model_at(url: str, key: str | None) -> str:
    """The name of the first model that a server offers."""
    try:
        found = httpx.get(f"{url}/v1/models", headers=_headers(key), timeout=30)
        found.raise_for_status()
        name: str = found.json()["data"][0]["id"]
    except (httpx.HTTPError, ValueError, KeyError, IndexError, TypeError) as error:
        raise Unavailable(
            f"{url}/v1/models names no model ({error}); is a server of OpenAI's interface there? "
            "Or say --model"
        ) from error
    return name


def measure(
    target: Target,
    callers: Sequence[int],
    requests: int,
    words: int,
    tell: Callable[[Crowd], None],
    first: int = 0,
) -> list[Crowd]:
    """Each crowd asks `requests` questions a caller, all different, the first few unmeasured.
    `first`: the number of its first question. One that was asked before is found in the cache."""
    if not callers or min(callers) < 1 or requests < 1:
        raise OptionError("0 callers or requests measure nothing; use 1 or more of both")
    crowds, at = [], WARM
    texts = prompts(WARM + sum(callers) * requests, words, first)
    asyncio.run(_crowd(target, 1, texts[:WARM]))
    for count in callers:
        crowd = asyncio.run(_crowd(target, count, texts[at : at + count * requests]))
        at += count * requests
        tell(crowd)
        crowds.append(crowd)
    return crowds


async def _crowd(target: Target, callers: int, texts: Sequence[str]) -> Crowd:
    left, asked = list(reversed(texts)), list[Asked]()
    limits = httpx.Limits(max_connections=callers)
    async with httpx.AsyncClient(timeout=600, limits=limits, headers=_headers(target.key)) as http:

        async def caller() -> None:
            while left:
                asked.append(await _ask(http, target, left.pop()))

        begin = time.perf_counter()
        await asyncio.gather(*(caller() for _ in range(callers)))
        return Crowd(callers, time.perf_counter() - begin, asked)


async def _ask(http: httpx.AsyncClient, target: Target, prompt: str) -> Asked:
    begin = time.perf_counter()
    came: list[float] = []
    tokens, failure = 0, None
    try:
        url = f"{target.url}/v1/chat/completions"
        async with http.stream("POST", url, json=target.body(prompt)) as found:
            if found.status_code != 200:
                await found.aread()
                failure = f"{found.status_code}: {found.text[:200]}"
            async for line in found.aiter_lines():
                chunk = _chunk(line)
                if chunk.get("error"):
                    failure = str(chunk["error"])[:200]
                if any(_says(choice) for choice in chunk.get("choices") or []):
                    came.append(time.perf_counter() - begin)
                tokens = (chunk.get("usage") or {}).get("completion_tokens", tokens)
    except httpx.HTTPError as error:
        failure = f"{type(error).__name__}: {error}"
    gaps = [after - before for before, after in itertools.pairwise(came)]
    seconds = time.perf_counter() - begin
    return Asked(seconds, came[0] if came else None, gaps, tokens, failure)


def _chunk(line: str) -> dict[str, Any]:
    """What a line of a stream says."""
    if not line.startswith("data: {"):
        return {}
    found: dict[str, Any] = json.loads(line.removeprefix("data: "))
    return found


def _says(choice: dict[str, Any]) -> bool:
    return bool((choice.get("delta") or {}).get("content") or choice.get("text"))


def _headers(key: str | None) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"} if key else {}


def percentile(values: Sequence[float], percent: int) -> float | None:
    """The smallest value that so many percent of all do not exceed."""
    if not values:
        return None
    return sorted(values)[max(0, -(-len(values) * percent // 100) - 1)]


def markdown(run: ServeRun) -> str:
    """Throughput and latencies by the number of callers, in milliseconds."""
    header = ["callers", "served", "tokens/s"]
    for what in ("first token", "gap", "whole"):
        header += [f"{what} p{percent}" for percent in PERCENTILES]
    rows, failures = [], []
    for crowd in run.crowds:
        served = crowd.served
        found = [
            [each.first for each in served if each.first is not None],
            [gap for each in served for gap in each.gaps],
            [each.seconds for each in served],
        ]
        cells = [percentile(values, percent) for values in found for percent in PERCENTILES]
        rows.append(
            [str(crowd.callers), f"{len(served)}/{len(crowd.asked)}",
             number(crowd.tokens_per_second),
             *(number(None if each is None else 1000 * each) for each in cells)]
        )  # fmt: skip
        failures += [each.failure for each in crowd.asked if each.failure]
    title = (
        f"{run.model} by {run.server}: up to {run.max_tokens} tokens to questions of about "
        f"{run.prompt_words} words; times in milliseconds"
    )
    said = [f"failed: {each}" for each in failures[:_LISTED]]
    return paragraphs([title, Table(header, rows), *said])


def run_of(
    provenance: Provenance, server: str, target: Target, words: int, crowds: list[Crowd]
) -> ServeRun:
    """All of it as a result."""
    return ServeRun(
        provenance, server, target.model, target.max_tokens, words, target.extra, crowds,
        complete=True,
    )  # fmt: skip
