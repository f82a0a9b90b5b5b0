"""The harness's side of the peer protocol: processes that are given ids, give ids back, and are
timed from outside.

A peer is a folder with `peer.py` and, when it needs packages of its own, `install`, which makes
`.venv` beside it. The harness takes the wall time and counts the tokens, so nothing that a peer
says about itself is believed. A peer that fails or hangs raises `PeerFailed`, which becomes a row
that says so. Does not know any particular engine; our own goes through the same door.
"""

from __future__ import annotations

import contextlib
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
SHIPPED = Path(__file__).with_name("shipped")  # peers that need nothing but what selfspec needs
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
        own = self.folder / ".venv" / "bin" / "python"
        return str(own) if self.own_environment else sys.executable

    def install(self, limit: float = 1800) -> None:
        """Make the peer's own environment if it has one and it is missing; needs the network."""
        if not self.own_environment or Path(self.python).exists():
            return
        try:
            done = subprocess.run(
                [str(self.folder / "install")], capture_output=True, text=True, timeout=limit,
                env={**os.environ, "SELFSPEC_PYTHON": sys.executable}, check=False,
            )  # fmt: skip
        except (OSError, subprocess.TimeoutExpired) as error:
            raise PeerFailed(scrub(f"install: {error}")) from error
        if done.returncode:
            said = last_line(done.stderr or done.stdout)
            raise PeerFailed(f"install ended with {done.returncode}: {said}")


def find_peers(folder: Path = PEERS_FOLDER, shipped: Path = SHIPPED) -> dict[str, PeerSpec]:
    """Every peer: those that come with the package, and those of a source checkout."""
    files = [*sorted(shipped.glob("*/peer.py")), *sorted(folder.glob("*/peer.py"))]
    return {file.parent.name: PeerSpec(file.parent.name, file.parent) for file in files}


def choose(names: Sequence[str], known: Mapping[str, PeerSpec]) -> list[PeerSpec]:
    """The peers of these names, in this order."""
    for name in names:
        if name not in known:
            far = " Other engines' peers are in the source checkout, not in the wheel."
            far = "" if PEERS_FOLDER.is_dir() else far
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
    counts: dict[str, Any]
    """What it says of its own work, such as drafts; shown, never used."""


class Peer:
    """A running peer."""

    def __init__(
        self, spec: PeerSpec, threads: int, limit: float, clock: Clock = time.perf_counter
    ) -> None:
        self.name = spec.name
        self.versions: dict[str, str] = {}
        self.precision = ""
        self._limit, self._clock, self._threads = limit, clock, threads
        self._first: tuple[float, int] | None = None  # when the first tokens came, and how many
        self._dead: str | None = None  # why it can answer no more
        self._errors = tempfile.TemporaryFile(  # noqa: SIM115
            mode="w+", encoding="utf-8", errors="replace"
        )
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

    def load(self, folder: Path, dtype: str, device: str = "cpu", weights: str = "auto") -> float:
        """Let it load a Hugging Face folder, converting it first where it must; seconds of that.
        `weights`: a kind that is not of `dtype`."""
        request = {"load": str(folder), "dtype": dtype, "threads": self._threads}
        more = {"device": (device, "cpu"), "weights": (weights, "auto")}
        told = {name: value for name, (value, usual) in more.items() if value != usual}
        reply, seconds = self._ask({**request, **told})
        self.precision = str(reply.get("precision", dtype))
        said = dict(reply.get("versions", {}))
        self.versions = {str(name): str(version) for name, version in said.items()}
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
        eos: Sequence[int] = (),
        options: Mapping[str, Any] | None = None,
    ) -> Reply:
        """New tokens of each row, timed from outside. Too many or too few of them are a failure."""
        request = {"max_new_tokens": max_new_tokens, "eos": list(eos), "options": options or {}}
        alone = len(rows) == 1
        asked = {"generate": list(rows[0])} if alone else {"batch": [list(row) for row in rows]}
        reply, seconds = self._ask({**asked, **request})
        made = [reply.get("tokens")] if alone else reply.get("rows")
        if not isinstance(made, list) or [type(row) for row in made] != [list] * len(rows):
            raise PeerFailed(f"answered {len(rows)} rows with {str(reply)[:200]}")
        for row in made:
            ended = len(row) < max_new_tokens and row and row[-1] in eos
            if len(row) != max_new_tokens and not ended:
                wanted = f"{max_new_tokens}{' or an end token' if eos else ''} were asked for"
                raise PeerFailed(f"made {len(row)} tokens where {wanted}")
        when, count = self._first or (None, 0)
        return Reply(made, seconds, when, count, dict(reply.get("counts") or {}))

    def close(self) -> None:
        """End the process; harmless when it is gone already."""
        if self._process.poll() is None:
            self._process.kill()
        self._process.wait()
        self._reader.join(timeout=5)
        for stream in (self._process.stdin, self._process.stdout):
            if stream is not None:
                with contextlib.suppress(BrokenPipeError):  # bytes that a dead process did not read
                    stream.close()
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
                now, said = self._clock(), json.loads(answer)
                self._first = self._first or (now - start - said["ago"], int(said["first"]))
                answer = self._replies.get(timeout=self._limit)
        except queue.Empty:
            self._process.kill()
            said = f"no answer within {self._limit:g} s, so it was ended"
            self._dead = f"{said}; allow it more with --time-limit"
            raise PeerFailed(self._dead) from None
        except BrokenPipeError:
            answer = None
        seconds = self._clock() - start
        if answer is None:
            code = self._process.wait()
            self._errors.seek(0)
            self._dead = f"ended with {code}: {last_line(self._errors.read())}"
            raise PeerFailed(self._dead)
        return _parsed(answer), seconds

    def _listen(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._replies.put(line)
        self._replies.put(None)  # the end, so that nobody waits out the time limit for a dead peer


def _parsed(answer: str) -> dict[str, Any]:
    try:
        reply = json.loads(answer)
    except ValueError as error:
        raise PeerFailed(f"answered something other than JSON: {answer[:200]!r}") from error
    if not isinstance(reply, dict) or "error" in reply:
        raise PeerFailed(last_line(str(reply["error"] if isinstance(reply, dict) else reply)))
    return reply


def last_line(text: str) -> str:
    """The last line that says something, without paths."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return scrub(lines[-1])[:300] if lines else "no message"


def _environment(threads: int) -> dict[str, str]:
    """The same number of threads for every peer; how they wait is each engine's own affair, as it
    is for its users."""
    roots = [str(HOST.parents[2]), *([str(CHECKOUT)] if PEERS_FOLDER.is_dir() else [])]
    path = os.pathsep.join(filter(None, [*roots, os.environ.get("PYTHONPATH")]))
    count = str(threads)
    settings = {"OMP_NUM_THREADS": count, "MKL_NUM_THREADS": count, "PYTHONPATH": path}
    return {**os.environ, **settings, "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
