"""Runs Python that a model wrote, to see whether its tests pass: another process with limits of
time, memory and file size, in an empty folder, without the environment, and without network and
other processes where the system lets us (`unshare`).

This is NOT a security boundary. It catches endless loops, huge lists and stray files; it does not
stop code that means harm, which could still read the user's files. Run it in a container or a
throw-away machine if the model might write such code. Knows no tasks.
"""

from __future__ import annotations

import contextlib
import functools
import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

WARNING = "Programs written by the model are run with limits, but this is no security boundary."
ISOLATE = ("unshare", "--map-root-user", "--net", "--pid", "--fork", "--kill-child")
MOST_SAID = 400  # characters of a program's last words
# Hard limits, set by the process itself before it looks at the program: a preexec function is not
# safe next to torch's threads.
LAUNCHER = """
import resource, runpy, sys
seconds, memory = int(sys.argv[1]), int(sys.argv[2])
limits = {"CPU": seconds, "AS": memory, "FSIZE": 1 << 24, "CORE": 0, "NOFILE": 64, "NPROC": 0}
for name, value in limits.items():
    kind = getattr(resource, "RLIMIT_" + name)
    most = resource.getrlimit(kind)[1]
    value = value if most == resource.RLIM_INFINITY else min(value, most)
    resource.setrlimit(kind, (value, value))
sys.argv = ["program.py"]
runpy.run_path("program.py", run_name="__main__")
"""


@dataclass(frozen=True)
class Ran:
    """What became of a program. `passed`: it ran to its very end."""

    passed: bool
    reason: str = ""


@functools.cache
def isolation() -> tuple[str, ...]:
    """The words that keep a program from the network and from other processes; none where this
    system does not allow them."""
    if shutil.which(ISOLATE[0]) is None:
        return ()
    try:
        done = subprocess.run([*ISOLATE, "true"], capture_output=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ()
    return ISOLATE if done.returncode == 0 else ()


def run_python(source: str, seconds: float = 10.0, memory: int = 2**30) -> Ran:
    """Run a program. Ending early, with `exit()` say, is no pass: the last line must be reached."""
    end = secrets.token_hex(16)
    with tempfile.TemporaryDirectory(prefix="selfspec-run-", ignore_cleanup_errors=True) as folder:
        Path(folder, "program.py").write_text(
            f"{source}\n\nprint({end!r}, flush=True)\n", encoding="utf-8", errors="replace"
        )
        with Path(folder, "out").open("wb") as out, Path(folder, "err").open("wb") as err:
            process = subprocess.Popen(
                [
                    *isolation(),
                    sys.executable,
                    "-I",
                    "-B",
                    "-c",
                    LAUNCHER,
                    str(max(1, round(seconds + 0.5))),
                    str(memory),
                ],
                cwd=folder,
                env={"PATH": os.defpath, "LANG": "C.UTF-8", "OMP_NUM_THREADS": "1"},
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                start_new_session=True,
            )
            try:
                process.wait(seconds)
            except subprocess.TimeoutExpired:
                return Ran(False, f"took longer than {seconds:g} s")
            finally:
                with contextlib.suppress(
                    ProcessLookupError, PermissionError
                ):  # all of it has ended already
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        said = Path(folder, "out").read_bytes()[-200:].decode(errors="replace")
        if said.rstrip().endswith(end):
            return Ran(True)
        words = Path(folder, "err").read_bytes()[-4 * MOST_SAID :].decode(errors="replace").strip()
    last = (
        words.splitlines()[-1][:MOST_SAID]
        if words
        else f"ended with status {process.returncode} before its last line"
    )
    return Ran(False, last)
