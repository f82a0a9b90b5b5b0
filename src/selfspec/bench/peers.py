"""The harness's side of the peer protocol: processes that are given ids, give ids back, and are timed from outside.

A peer is a folder with `peer.py` and, when it needs packages of its own, `install`, which makes `.venv` beside it. The harness
takes the wall time and counts the tokens, so nothing that a peer says about itself is believed. A peer that fails or hangs
raises `PeerFailed`, which becomes a row that says so. Does not know any particular engine; our own goes through the same door.
"""

from __future__ import annotations

import json
import os
import queue
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import OptionError, Unavailable, nearest
from .provenance import CHECKOUT, scrub
from .timing import Clock, ContestantFailed

HOST = Path(__file__).with_name("peer_host.py")
PEERS_FOLDER = CHECKOUT / "benchmarks" / "peers"


class PeerFailed(ContestantFailed):
    """A peer could not be installed, started, loaded or finished in time."""


@dataclass(frozen=True)
class PeerSpec:
    """Where a peer is and which interpreter runs it."""

    name: str
    folder: Path

    @property
    def own_environment(self) -> bool:
        return (self.folder / "install").exists()

    @property
    def python(self) -> str:
        return str(self.folder / ".venv" / "bin" / "python") if self.own_environment else sys.executable

    def install(self, limit: float = 1800) -> None:
        """Make the peer's own environment if it has one and it is missing; needs the network once."""
        if not self.own_environment or Path(self.python).exists():
            return
        environment = {**os.environ, "SELFSPEC_PYTHON": sys.executable}
        try:
            done = subprocess.run(
                [str(self.folder / "install")], capture_output=True, text=True, env=environment, timeout=limit, check=False
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            raise PeerFailed(scrub(f"install: {error}")) from error
        if done.returncode:
            raise PeerFailed(f"install ended with {done.returncode}: {last_line(done.stderr or done.stdout)}")


def find_peers(folder: Path = PEERS_FOLDER) -> dict[str, PeerSpec]:
    """Every peer in a folder of peers."""
    found = {file.parent.name: PeerSpec(file.parent.name, file.parent) for file in sorted(folder.glob("*/peer.py"))}
    if not found:
        raise Unavailable(
            "There are no benchmark peers: no benchmarks/peers/*/peer.py here. They belong to the source checkout, "
            "not to the wheel: run scripts/bench in a clone."
        )
    return found


def choose(names: Sequence[str], known: Mapping[str, PeerSpec]) -> list[PeerSpec]:
    """The peers of these names, in this order."""
    for name in names:
        if name not in known:
            raise OptionError(f"Unknown peer {name!r}: {nearest(name, known)}")
    return [known[name] for name in dict.fromkeys(names)]


class Peer:
    """A running peer."""

    def __init__(self, spec: PeerSpec, threads: int, limit: float, clock: Clock = time.perf_counter) -> None:
        self.name = spec.name
        self.versions: dict[str, str] = {}
        self.counts: dict[str, int] | None = None  # what it says of its last generation: drafted, accepted; shown, never used
        self._limit, self._clock, self._threads = limit, clock, threads
        self._dead: str | None = None  # why it can answer no more
        self._errors = tempfile.TemporaryFile(mode="w+", encoding="utf-8", errors="replace")  # noqa: SIM115  (until close)
        self._replies: queue.Queue[str | None] = queue.Queue()
        try:
            self._process = subprocess.Popen(
                [spec.python, "-P", str(HOST), str(spec.folder / "peer.py")],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._errors,
                text=True, encoding="utf-8", env=_environment(threads), start_new_session=True,
            )  # fmt: skip
        except OSError as error:
            self._errors.close()
            raise PeerFailed(scrub(f"could not be started: {error}")) from error
        self._reader = threading.Thread(target=self._listen, daemon=True)
        self._reader.start()

    def load(self, folder: Path, dtype: str) -> None:
        """Let it load a Hugging Face folder, converting it first where it must. Not timed."""
        reply, _ = self._ask({"load": str(folder), "dtype": dtype, "threads": self._threads})
        self.versions = {str(name): str(version) for name, version in dict(reply.get("versions", {})).items()}

    def generate(
        self, ids: Sequence[int], max_new_tokens: int, eos: Sequence[int] = (), options: Mapping[str, Any] | None = None
    ) -> tuple[list[int], float]:
        """Greedy new tokens and the wall seconds they took. Without `eos`, any other number of tokens is a failure."""
        request = {"generate": list(ids), "max_new_tokens": max_new_tokens, "eos": list(eos)}
        reply, seconds = self._ask({**request, "options": dict(options)} if options else request)
        self.counts = reply.get("counts")
        tokens = reply.get("tokens")
        if not isinstance(tokens, list):
            raise PeerFailed(f"answered without tokens: {str(reply)[:200]}")
        if not eos and len(tokens) != max_new_tokens:
            raise PeerFailed(f"made {len(tokens)} tokens where {max_new_tokens} were asked for")
        return tokens, seconds

    def close(self) -> None:
        """End the process; harmless when it is gone already."""
        if self._process.poll() is None:
            self._process.kill()
        self._process.wait()
        self._reader.join(timeout=5)
        for stream in (self._process.stdin, self._process.stdout):
            if stream is not None:
                _close_quietly(stream)
        if not self._errors.closed:
            self._errors.close()

    def _ask(self, request: Mapping[str, Any]) -> tuple[dict[str, Any], float]:
        assert self._process.stdin is not None
        if self._dead is not None:
            raise PeerFailed(self._dead)
        line = json.dumps(request) + "\n"
        answer: str | None
        start = self._clock()
        try:
            self._process.stdin.write(line)
            self._process.stdin.flush()
            answer = self._replies.get(timeout=self._limit)
        except queue.Empty:
            self._process.kill()
            self._dead = f"no answer within {self._limit:g} s, so it was ended; allow it more with --time-limit"
            raise PeerFailed(self._dead) from None
        except BrokenPipeError:
            answer = None
        seconds = self._clock() - start
        if answer is None:
            self._dead = f"ended with {self._process.wait()}: {self._last_words()}"
            raise PeerFailed(self._dead)
        return self._parsed(answer), seconds

    def _parsed(self, answer: str) -> dict[str, Any]:
        try:
            reply = json.loads(answer)
        except ValueError as error:
            raise PeerFailed(f"answered something other than JSON: {answer[:200]!r}") from error
        if not isinstance(reply, dict) or "error" in reply:
            raise PeerFailed(last_line(str(reply["error"] if isinstance(reply, dict) else reply)))
        return reply

    def _listen(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._replies.put(line)
        self._replies.put(None)  # the end, so that nobody waits out the time limit for a dead peer

    def _last_words(self) -> str:
        self._errors.seek(0)
        return last_line(self._errors.read())


def last_line(text: str) -> str:
    """The last line that says something, without paths."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return scrub(lines[-1])[:300] if lines else "no message"


def _close_quietly(stream: Any) -> None:
    try:
        stream.close()
    except BrokenPipeError:  # unsent bytes for a process that is gone
        return


def _environment(threads: int) -> dict[str, str]:
    """The same thread settings for every peer; idle OpenMP threads must sleep, or a waiting peer slows the one at work."""
    package_root = str(HOST.parents[2])
    path = os.pathsep.join(filter(None, [package_root, os.environ.get("PYTHONPATH")]))
    settings = {"OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads), "OMP_WAIT_POLICY": "PASSIVE"}
    return {**os.environ, **settings, "PYTHONPATH": path, "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
