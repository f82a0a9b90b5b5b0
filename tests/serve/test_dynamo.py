"""Our engine as workers of NVIDIA Dynamo. Skipped where Dynamo is not installed: it needs an
environment of its own (`scripts/clients dynamo`)."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from selfspec import LLM, SamplingParams
from selfspec.testing import tiny_model, tiny_tokenizer

pytest.importorskip(
    "dynamo.common.backend", reason="Dynamo is not installed; scripts/clients dynamo installs it"
)

PROMPT = "abcabcabc one two"
BODIES: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "penalties": {"temperature": 0, "frequency_penalty": 1.5, "presence_penalty": 0.5},
    "drawn": {"temperature": 1, "seed": 7, "frequency_penalty": 1.0, "min_tokens": 150},
    "no seed": {"temperature": 1, "frequency_penalty": 0.5},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model as a folder, which the frontend reads its tokenizer from."""
    made = tmp_path_factory.mktemp("tiny")
    tiny_model("llama", max_position_embeddings=2048).save_pretrained(made)
    tiny_tokenizer().save_pretrained(made)
    return made


class Fleet:
    """Workers and a frontend, which find each other through a folder."""

    def __init__(self, folder: Path, work: Path) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        root = Path(__file__).resolve().parents[2]
        self._env = os.environ | {
            "DYN_FILE_KV": str(work / "found"), "PYTHONPATH": str(root / "src"),
            "DYN_LOG": "warn",
        }  # fmt: skip
        (work / "found").mkdir()
        self.notes, self._folder, self._work = work / "notes", folder, work
        self.workers = [self._worker(number) for number in range(2)]
        self._frontend = self._start(
            "frontend", "-m", "dynamo.frontend", "--http-port", str(self.port),
            "--discovery-backend", "file", "--request-plane", "tcp", "--event-plane", "zmq",
            "--migration-limit", "3",
        )  # fmt: skip

    def _worker(self, number: int) -> subprocess.Popen[bytes]:
        return self._start(
            f"worker-{number}", "-m", "selfspec.integrations.dynamo", str(self._folder),
            "--served-name", "tiny", "--notes", str(self.notes), "--draft", "early-exit",
            "--rows", "4",
        )  # fmt: skip

    def replace(self, dead: subprocess.Popen[bytes]) -> None:
        """Begin another worker, and wait until it can be found."""
        before = self._found()
        self.workers[self.workers.index(dead)] = self._worker(9)
        self.until_found(lambda: bool(self._found() - before))

    def _found(self) -> set[str]:
        return {each.name for each in (self._work / "found").glob("v1/instances/*")}

    def until_found(self, done: Callable[[], bool]) -> None:
        end = time.monotonic() + 150
        while not done():
            assert time.monotonic() < end, "no worker came: " + self.said()
            time.sleep(0.2)
        time.sleep(3)  # for the frontend to notice
        self.ready(2)

    def _start(self, name: str, *words: str) -> subprocess.Popen[bytes]:
        log = (self._work / f"{name}.log").open("wb")
        return subprocess.Popen([sys.executable, *words], env=self._env, stdout=log, stderr=log)

    def ready(self, workers: int) -> None:
        """Wait until an answer has come from so many workers, one after the other."""
        end, good = time.monotonic() + 150, 0
        while good < 2 * workers:
            assert time.monotonic() < end, "Dynamo did not begin: " + self.said()
            try:
                found = self.client.post("/v1/completions", json=ask(max_tokens=1))
                good = good + 1 if found.status_code == 200 else 0
            except httpx.HTTPError:
                good = 0
            if good == 0:
                time.sleep(1)

    @property
    def client(self) -> httpx.Client:
        return httpx.Client(base_url=f"http://127.0.0.1:{self.port}", timeout=60)

    def said(self) -> str:
        return "\n".join(f.read_text("utf-8")[-1500:] for f in self._work.glob("*.log"))

    def close(self) -> None:
        for process in (*self.workers, self._frontend):
            process.kill()
            process.wait()


@pytest.fixture(scope="module")
def fleet(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    made = Fleet(folder, tmp_path_factory.mktemp("dynamo"))
    try:
        made.until_found(lambda: len(made._found()) == 2)
        yield made
    finally:
        made.close()


def ask(**more: Any) -> dict[str, Any]:
    return {"model": "tiny", "prompt": PROMPT, "max_tokens": 400, "ignore_eos": True, **more}


def own(llm: LLM, body: dict[str, Any]) -> str:
    """What the library says, without drafts."""
    how = {name: body[name] for name in ("temperature", "seed", "frequency_penalty",
                                         "presence_penalty") if name in body}  # fmt: skip
    how["min_new_tokens"] = body.get("min_tokens", 0)
    sampling = SamplingParams(**how)
    return llm.generate(PROMPT, sampling=sampling, max_new_tokens=400, eos=[], draft=None).text


@pytest.mark.parametrize("name", BODIES)
def test_a_request_outlives_its_worker_with_the_same_text(
    fleet: Fleet, folder: Path, name: str
) -> None:
    """kill -9 of the worker in the midst of an answer: Dynamo moves it, and the text goes on as if
    nothing had been: draws, penalties and least lengths count from where the answer began."""
    body, text, lines, killed = ask(**BODIES[name], stream=True), "", 0, None
    with fleet.client.stream("POST", "/v1/completions", json=body) as found:
        assert found.status_code == 200
        identity = None
        for line in found.iter_lines():
            if not line.startswith("data: {"):
                continue
            chunk = json.loads(line.removeprefix("data: "))
            assert "id" in chunk, f"{chunk}: {fleet.said()}"
            identity = chunk["id"].removeprefix("cmpl-")
            text += "".join(choice["text"] for choice in chunk["choices"])
            lines += 1
            if lines == 20 and killed is None:
                killed = _busy(fleet)
                os.kill(killed.pid, signal.SIGKILL)
                killed.wait()
    assert killed is not None and identity is not None
    seeded = BODIES[name]
    if seeded["temperature"] and "seed" not in seeded:
        from selfspec.integrations.dynamo import seed_of

        seeded = seeded | {"seed": seed_of(identity)}
    assert text == own(LLM.from_pretrained(folder), seeded), fleet.said()
    assert not list(fleet.notes.iterdir()), "a note was left"
    fleet.replace(killed)


def _busy(fleet: Fleet) -> subprocess.Popen[bytes]:
    """The worker that computes."""
    import psutil

    def used(process: subprocess.Popen[bytes]) -> float:
        return sum(psutil.Process(process.pid).cpu_times()[:2])

    before = [used(each) for each in fleet.workers]
    time.sleep(0.15)
    spent = [used(each) - old for each, old in zip(fleet.workers, before, strict=True)]
    return fleet.workers[spent.index(max(spent))]


def test_every_request_is_answered_when_a_worker_dies(fleet: Fleet, folder: Path) -> None:
    """Requests that had begun, and were lost with their worker."""
    import threading

    texts: dict[int, str] = {}

    def one(number: int) -> None:
        body = ask(temperature=0, max_tokens=150, prompt=f"{number} {PROMPT}")
        found = fleet.client.post("/v1/completions", json=body)
        texts[number] = found.json()["choices"][0]["text"] if found.status_code == 200 else ""

    threads = [threading.Thread(target=one, args=(number,)) for number in range(16)]
    for thread in threads:
        thread.start()
    time.sleep(0.3)
    fleet.workers[0].kill()
    for thread in threads:
        thread.join()
    llm = LLM.from_pretrained(folder)
    for number in range(16):
        alone = llm.generate(f"{number} {PROMPT}", max_new_tokens=150, eos=[], draft=None).text
        assert texts[number] == alone, fleet.said()
