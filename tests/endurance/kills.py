"""Commands that are killed at random moments and given again: is the result that of a run which
nobody killed, bit for bit?

Each run is a process of its own, forked from one that has imported everything (so that moments fall
into the work, not into imports) and ended by SIGKILL. The same folder meets kill after kill until a
run comes to its end. Then it is compared, and a new folder is begun.
"""

from __future__ import annotations

import multiprocessing
import os
import random
import shutil
import time
import uuid
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any

import psutil

MARK = "SELFSPEC_ENDURANCE"  # in the environment of every process of a command
PATIENCE = 60.0  # seconds until what a killed process started has to be gone
Contents = Mapping[str, str]  # a digest of everything that has to be the same


@dataclass(frozen=True)
class Command:
    """Something that writes into a folder and can be given again."""

    name: str
    run: Callable[[Path, Path], None]
    """(world, folder): called in the process that is killed."""
    contents: Callable[[Path], Contents]


@dataclass
class Found:
    """What came of one command."""

    command: str
    seed: int
    whole_seconds: float = 0.0
    """Of a run that nobody killed."""
    killed_at: list[float] = field(default_factory=list)
    """Seconds after its start, for every kill."""
    compared: int = 0
    """Folders that came to their end and were compared."""
    most_kills: int = 0
    """The most that one folder met."""
    differences: list[str] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    left_running: int = 0
    """Processes that a killed one had started and that did not end."""

    def as_dict(self) -> dict[str, Any]:
        return {**asdict(self), "kills": len(self.killed_at)}


def forked() -> ForkServerContext:
    """Where processes come from: a fresh one that has imported all commands, and done nothing."""
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        os.environ.setdefault(name, "1")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.endurance.preload"])
    return context


def _process(run: Callable[[Path, Path], None], world: Path, folder: Path, mark: str) -> None:
    log = os.open(folder.with_suffix(".log"), os.O_CREAT | os.O_WRONLY | os.O_APPEND)
    os.dup2(log, 1), os.dup2(log, 2)
    os.environ[MARK] = mark
    os.environ["SELFSPEC_CACHE"] = str(world / "cache")
    run(world, folder)


class Killer:
    """Runs commands in a world, and kills them."""

    def __init__(self, world: Path, work: Path) -> None:
        self.world, self.work, self._context = world, work, forked()
        self.mark = uuid.uuid4().hex

    def run(self, command: Command, folder: Path, after: float | None = None) -> float | None:
        """Run it into that folder. Killed after so many seconds, it returns None; else the seconds
        that it took. Raises with its last words if it fails."""
        given = (command.run, self.world, folder, self.mark)
        process = self._context.Process(target=_process, args=given)
        begin = time.monotonic()
        process.start()
        process.join(after)
        if process.exitcode is None:
            process.kill()
            process.join()
        if process.exitcode == -9:
            return None
        if process.exitcode:
            said = folder.with_suffix(".log").read_text(encoding="utf-8", errors="replace")
            raise RuntimeError(f"ended with {process.exitcode}: {said.strip()[-600:]}")
        return time.monotonic() - begin

    def fresh(self, name: str) -> Path:
        """An empty folder."""
        folder = self.work / name
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        return folder

    def killed(
        self, command: Command, kills: int, seed: int, tell: Callable[[str], None] = print
    ) -> Found:
        """Kill a command so often, and compare whatever comes to its end."""
        found, dice = Found(command.name, seed), random.Random(f"{command.name} {seed}")
        expected = self._whole(command, found)
        while len(found.killed_at) < kills and not found.failures:
            folder, mine = self.fresh(f"{command.name}-{found.compared}"), 0
            try:
                while len(found.killed_at) < kills:
                    after = dice.uniform(0, found.whole_seconds)
                    if self.run(command, folder, after) is not None:
                        break
                    found.killed_at.append(round(after, 3))
                    mine += 1
                else:
                    self.run(command, folder)
            except RuntimeError as error:
                found.failures.append(f"after {mine} kills: {error}")
                break
            found.differences += differences(expected, command.contents(folder))
            found.compared, found.most_kills = found.compared + 1, max(found.most_kills, mine)
            tell(f"{command.name}: {len(found.killed_at)} kills, {found.compared} compared")
            if not found.differences:
                shutil.rmtree(folder)
        found.left_running = len(self.left_running())
        return found

    def _whole(self, command: Command, found: Found) -> Contents:
        """What two runs that nobody killed write; the first one also fills caches."""
        contents, seconds = [], list[float]()
        for name in ("first", "second"):
            folder = self.fresh(f"{command.name}-{name}")
            seconds.append(self.run(command, folder) or 0.0)
            contents.append(command.contents(folder))
        if other := differences(*contents):
            raise AssertionError(f"{command.name} is not the same twice, unbroken: {other}")
        assert contents[0], "nothing is compared"
        found.whole_seconds = round(min(seconds), 3)
        return contents[0]

    def left_running(self) -> list[int]:
        """Processes that were started by one that was killed, and go on without it."""
        end = time.monotonic() + PATIENCE
        while (found := _marked(self.mark)) and time.monotonic() < end:
            time.sleep(0.2)
        return found


def _marked(mark: str) -> list[int]:
    found = []
    for process in psutil.process_iter():
        try:
            ours = process.environ().get(MARK) == mark and process.status() != psutil.STATUS_ZOMBIE
        except psutil.Error:  # it ended meanwhile, or is somebody else's
            continue
        if ours:
            found.append(process.pid)
    return found


def differences(expected: Contents, other: Contents) -> list[str]:
    """Names of what is not the same."""
    names = sorted({*expected, *other})
    return [name for name in names if expected.get(name) != other.get(name)]
