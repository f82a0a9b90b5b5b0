"""The server as replicas of Ray Serve. Skipped where Ray is not installed: it needs an environment
of its own (`scripts/clients ray`)."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from selfspec import OptionError
from selfspec.serve.settings import Limits, Settings
from selfspec.testing import tiny_model, tiny_tokenizer

ray = pytest.importorskip("ray", reason="Ray is not installed; scripts/clients ray installs it")

SETTINGS = Settings(Limits(rows=2, queue=40), name="tiny", draft="early-exit")
ASK: dict[str, Any] = {"prompt": "abcabcabc", "temperature": 0, "max_tokens": 24}


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Two replicas of a tiny model, behind Ray's proxy."""
    from ray import serve

    from selfspec.integrations.ray_serve import application

    folder = tmp_path_factory.mktemp("tiny")
    tiny_model("llama").save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    paths = os.pathsep.join([str(Path(__file__).resolve().parents[2] / "src")])
    ray.init(num_cpus=4, include_dashboard=False, runtime_env={"env_vars": {"PYTHONPATH": paths}})
    serve.start(http_options={"host": "127.0.0.1", "port": 0 or _free()})
    app = application(folder, SETTINGS, replicas=2, sessions=True, health_check_period_s=1)
    serve.run(app)
    try:
        yield f"http://127.0.0.1:{_PORT[-1]}"
    finally:
        serve.shutdown()
        ray.shutdown()


_PORT: list[int] = []


def _free() -> int:
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        _PORT.append(probe.getsockname()[1])
    return _PORT[-1]


def test_replicas_answer_all_routes(url: str) -> None:
    """Streams, errors and headers that do not come through Ray's proxy."""
    with httpx.Client(base_url=url, timeout=60) as client:
        whole = client.post("/v1/completions", json=ASK)
        assert whole.status_code == 200 and whole.headers["x-request-id"]
        text = whole.json()["choices"][0]["text"]
        with client.stream("POST", "/v1/completions", json=ASK | {"stream": True}) as found:
            lines = [line for line in found.iter_lines() if line]
        assert lines[-1] == "data: [DONE]" and len(lines) > 3
        assert all(
            client.post("/v1/completions", json=ASK).json()["choices"][0]["text"] == text
            for _ in range(6)
        ), "each replica says the same"
        refused = client.post("/v1/completions", json=ASK | {"temprature": 1})
        assert refused.status_code == 400 and refused.json()["error"]["param"] == "temprature"
        assert client.get("/ready").status_code == 200


def test_a_conversation_stays_at_its_replica(url: str) -> None:
    """What a replica remembers of a conversation, sent to the other one."""
    with httpx.Client(base_url=url, timeout=60) as client:
        for session in ("a", "b", "c"):
            prompt, cached = f"{session} {'long ago and far away ' * 4}", []
            for _ in range(4):
                asked = ASK | {"prompt": prompt, "max_tokens": 2}
                usage = client.post(
                    "/v1/completions", json=asked, headers={"x-session-id": session}
                ).json()["usage"]
                cached.append(usage["prompt_tokens_details"]["cached_tokens"])
            assert min(cached[1:]) > 60, f"session {session}: {cached}"


def test_a_replica_that_is_killed_loses_only_what_had_begun(url: str) -> None:
    """kill -9 of one of two: requests that no replica had begun and that are not answered."""
    results: list[int] = []

    def ask(number: int) -> None:
        body = ASK | {"prompt": f"{number} abc", "max_tokens": 60, "ignore_eos": True}
        with httpx.Client(base_url=url, timeout=120) as client:
            for _ in range(20):
                found = client.post("/v1/completions", json=body)
                if found.status_code == 200:
                    results.append(number)
                    return
                began.append(number)  # it broke off: the caller asks again
                time.sleep(0.5)

    began: list[int] = []
    threads = [threading.Thread(target=ask, args=(number,)) for number in range(24)]
    for thread in threads:
        thread.start()
    time.sleep(0.2)
    os.kill(_replicas()[0], signal.SIGKILL)
    for thread in threads:
        thread.join()
    assert sorted(results) == list(range(24)), f"lost; broken off were {began}"
    assert len(set(began)) <= SETTINGS.limits.rows + SETTINGS.limits.queue


def _replicas() -> list[int]:
    """Processes of replicas."""
    import psutil

    found = []
    for process in psutil.process_iter(["cmdline"]):
        words = " ".join(process.info["cmdline"] or [])
        if words.startswith("ray::ServeReplica") and "selfspec" in words:
            found.append(process.pid)
    return found


def test_a_range_that_is_none_is_refused() -> None:
    """Ray's own words about a range of replicas."""
    from selfspec.integrations.ray_serve import application

    with pytest.raises(OptionError, match="no range"):
        application("demo", SETTINGS, replicas=(3, 1))
