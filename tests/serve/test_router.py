"""Two of our servers behind vllm-router, and one of them is killed. Skipped where the router is not
installed: it needs an environment of its own (`scripts/clients router`)."""

from __future__ import annotations

import asyncio
import json
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
from test_clients import program
from test_resuming import server_process

from selfspec.testing import tiny_llm

PROMPT = "abcabcabc"


def _free() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@contextmanager
def routed(folder: Path, workers: list[str], policy: str) -> Iterator[httpx.Client]:
    """A router before these servers."""
    port, figures = _free(), _free()
    log = (folder / "router.log").open("wb")
    process = subprocess.Popen(
        [program("vllm-router"), "--worker-urls", *workers, "--port", str(port),
         "--policy", policy, "--health-check-endpoint", "/ready",
         "--health-check-interval-secs", "1", "--health-failure-threshold", "1",
         "--prometheus-port", str(figures)],
        cwd=folder, stdout=log, stderr=log,
    )  # fmt: skip
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60) as client:
            end = time.monotonic() + 60
            while True:
                try:
                    if client.get("/v1/models").status_code == 200:
                        break
                except httpx.HTTPError:
                    pass
                said = (folder / "router.log").read_text("utf-8")[-2000:]
                assert time.monotonic() < end and process.poll() is None, said
                time.sleep(0.1)
            yield client
    finally:
        process.kill()
        process.wait()


def test_what_had_not_begun_is_answered_when_a_server_dies(tmp_path: Path) -> None:
    """Requests that a router sends to a dead server, or loses, and streams that end as if all were
    well. A stream that had begun breaks, which its caller sees, and goes on by `resume`."""
    program("vllm-router")
    with (
        server_process() as (first, one),
        server_process() as (_, two),
        routed(tmp_path, [str(one.base_url), str(two.base_url)], "round_robin") as router,
    ):
        llm = tiny_llm()
        texts = asyncio.run(_asked(str(router.base_url), first))
        broken = [number for number, text in texts.items() if text is None]
        assert len(texts) == 60
        for number, text in texts.items():
            own = llm.generate(f"{number} {PROMPT}", max_new_tokens=100, eos=[], draft=None).text
            assert text in (own, None), f"answer {number} was cut or mixed up"
        # each of its 2 rows and what waited there; all of these had been sent to it before it died
        assert len(broken) <= 12, broken
        after = [_ask(router, number) for number in range(10)]
        assert all(found.status_code == 200 for found in after), "the dead one is still asked"


def _ask(router: httpx.Client, number: int) -> httpx.Response:
    return router.post("/v1/completions", json=_body(number))


def _body(number: int) -> dict[str, Any]:
    return {"model": "tiny", "prompt": f"{number} {PROMPT}", "temperature": 0, "max_tokens": 100,
            "ignore_eos": True}  # fmt: skip


async def _asked(url: str, first: subprocess.Popen[bytes]) -> dict[int, str | None]:
    """Sixty requests, a few at once; the server dies in their midst. None: it broke off."""
    found: dict[int, str | None] = {}
    left = iter(range(60))
    async with httpx.AsyncClient(base_url=url, timeout=60) as client:

        async def caller() -> None:
            for number in left:
                if number == 20:
                    first.kill()
                answer = await client.post("/v1/completions", json=_body(number))
                whole = answer.status_code == 200
                found[number] = answer.json()["choices"][0]["text"] if whole else None

        await asyncio.gather(*(caller() for _ in range(6)))
    return found


def test_a_conversation_stays_at_its_server(tmp_path: Path) -> None:
    """What a server remembers of a conversation, asked of the other."""
    program("vllm-router")
    with (
        server_process() as (_, one),
        server_process() as (_, two),
        routed(tmp_path, [str(one.base_url), str(two.base_url)], "consistent_hash") as router,
    ):
        for session in "abcd":
            prompt, cached = f"{session} {'long ago and far away ' * 4}", []
            for _ in range(4):
                body = _body(0) | {"prompt": prompt, "max_tokens": 2}
                headers = {"x-session-id": session}
                answer = router.post("/v1/completions", json=body, headers=headers).json()
                cached.append(answer["usage"]["prompt_tokens_details"]["cached_tokens"])
            assert min(cached[1:]) > 60, json.dumps(cached)
