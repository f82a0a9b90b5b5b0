"""The harness's side of the peer protocol: processes that are given ids, give ids back, and are
timed from outside.

A peer is a folder with `peer.py` and, when it needs packages of its own, `install`, which makes
`.venv` beside it. The harness takes the wall time and counts the tokens, so nothing that a peer
says about itself is believed. A peer that fails or hangs raises `PeerFailed`, which becomes a row
that says so. Does not know any particular engine; our own goes through the same door.
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

from ..errors import OptionError, nearest
from .provenance import CHECKOUT, scrub
from .timing import Clock, ContestantFailed

HOST = Path(__file__).with_name("peer_host.py")
SHIPPED = Path(__file__).with_name(
    "shipped"
)  # peers that need nothing but what selfspec needs: they are in the wheel
PEERS_FOLDER = CHECKOUT / "benchmarks" / "peers"
FIRST = '{"first":'


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
        return (
            str(self.folder / ".venv" / "bin" / "python")
            if self.own_environment
            else sys.executable
        )

    def install(self, limit: float = 1800) -> None:
        """Make the peer's own environment if it has one and it is missing; needs the network
        once."""
        if not self.own_environment or Path(self.python).exists():
            return
        environment = {**os.environ, "SELFSPEC_PYTHON": sys.executable}
        try:
            done = subprocess.run(
                [str(self.folder / "install")],
                capture_output=True,
                text=True,
                env=environment,
                timeout=limit,
                check=False,
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            raise PeerFailed(scrub(f"install: {error}")) from error
        if done.returncode:
            raise PeerFailed(
                f"install ended with {done.returncode}: {last_line(done.stderr or done.stdout)}"
            )


def find_peers(folder: Path = PEERS_FOLDER, shipped: Path = SHIPPED) -> dict[str, PeerSpec]:
    """Every peer: those that come with the package, and those of a source checkout."""
    files = [*sorted(shipped.glob("*/peer.py")), *sorted(folder.glob("*/peer.py"))]
    return {file.parent.name: PeerSpec(file.parent.name, file.parent) for file in files}


def choose(names: Sequence[str], known: Mapping[str, PeerSpec]) -> list[PeerSpec]:
    """The peers of these names, in this order."""
    for name in names:
        if name not in known:
            far = (
                ""
                if PEERS_FOLDER.is_dir()
                else " Other engines' peers are in the source checkout, not in the wheel."
            )
            raise OptionError(f"Unknown peer {name!r}: {nearest(name, known)}{far}")
    return [known[name] for name in dict.fromkeys(names)]


@dataclass(frozen=True)
class Reply:
    """What a peer answered, and when: seconds from asking to the answer, and to its first tokens if
    it said so."""

    rows: list[list[int]]
    seconds: float
    first_seconds: float | None
    first_tokens: int
    counts: dict[str, Any] | None


class Peer:
    """A running peer."""

    def __init__(
        self, spec: PeerSpec, threads: int, limit: float, clock: Clock = time.perf_counter
    ) -> None:
        self.name = spec.name
        self.versions: dict[str, str] = {}
        self.precision = ""
        self.counts: dict[str, Any] | None = (
            None  # what it says of its last generation: drafted, accepted; shown, never used
        )
        self._limit, self._clock, self._threads = limit, clock, threads
        self._first: tuple[float, int] | None = (
            None  # of the last request: when its first tokens came, and how many
        )
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

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def dead(self) -> bool:
        """It was ended, or ended itself; a failure alone does not mean that."""
        return self._dead is not None

    def load(self, folder: Path, dtype: str, device: str = "cpu") -> float:
        """Let it load a Hugging Face folder, converting it first where it must; seconds of that."""
        request = {"load": str(folder), "dtype": dtype, "threads": self._threads}
        reply, seconds = self._ask(request if device == "cpu" else {**request, "device": device})
        self.precision = str(reply.get("precision", dtype))
        self.versions = {
            str(name): str(version) for name, version in dict(reply.get("versions", {})).items()
        }
        return seconds

    def echo(self, something: Sequence[int]) -> float:
        """Seconds of a request that asks for nothing."""
        return self._ask({"echo": list(something)})[1]

    def call(self, name: str, **arguments: Any) -> Any:
        """What another method of the peer returns. Not timed."""
        return self._ask({"call": name, "arguments": arguments})[0]["returned"]

    def answer(
        self,
        rows: Sequence[Sequence[int]],
        max_new_tokens: int,
        eos: Sequence[int],
        options: Mapping[str, Any],
    ) -> Reply:
        """New tokens of each row, timed from outside."""
        asked = (
            {"generate": list(rows[0])}
            if len(rows) == 1
            else {"batch": [list(row) for row in rows]}
        )
        reply, seconds = self._ask(
            {**asked, "max_new_tokens": max_new_tokens, "eos": list(eos), "options": dict(options)}
        )
        made = [reply.get("tokens")] if len(rows) == 1 else reply.get("rows")
        if (
            not isinstance(made, list)
            or len(made) != len(rows)
            or not all(isinstance(row, list) and row for row in made)
        ):
            raise PeerFailed(f"answered {len(rows)} rows with {str(reply)[:200]}")
        if any(
            len(row) > max_new_tokens or (len(row) < max_new_tokens and row[-1] not in eos)
            for row in made
        ):
            raise PeerFailed(
                f"made {[len(row) for row in made]} tokens where {max_new_tokens} or an end token "
                f"were asked for"
            )
        when, count = self._first or (None, 0)
        return Reply(made, seconds, when, count, reply.get("counts"))

    def generate(
        self,
        ids: Sequence[int],
        max_new_tokens: int,
        eos: Sequence[int] = (),
        options: Mapping[str, Any] | None = None,
    ) -> tuple[list[int], float]:
        """Greedy new tokens and the wall seconds they took. Without `eos`, any other number of
        tokens is a failure."""
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
        self._first = None
        start = self._clock()
        try:
            self._process.stdin.write(line)
            self._process.stdin.flush()
            answer = self._replies.get(timeout=self._limit)
            while answer is not None and answer.startswith(FIRST):
                now = self._clock()
                self._first = self._first or (now - start, int(json.loads(answer)["first"]))
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
    """The same number of threads for every peer; how they wait is each engine's own affair, as it
    is for its users."""
    package_root = str(HOST.parents[2])
    path = os.pathsep.join(filter(None, [package_root, os.environ.get("PYTHONPATH")]))
    settings = {"OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads)}
    return {
        **os.environ,
        **settings,
        "PYTHONPATH": path,
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }
